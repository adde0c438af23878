"""Suggestions for bindings that cannot be read as written, for error messages."""

import re

from jaxtrain.config.registry import CONFIGURABLES
from jaxtrain.config.values import (
    ByName,
    by_name,
    choices,
    hints,
    literal,
    settings_of,
    strip_mark,
    takes_text,
)


def _marks(cls: type) -> list[ByName]:
    return [mark for mark in map(by_name, hints(cls).values()) if mark is not None]


def of_a_choice(cls: type, setting: str) -> str:
    """Where a setting belongs that a class has not, but what one of its settings names has."""
    found = [
        f"{choice.__name__}.{setting}"
        for mark in _marks(cls)
        for choice in mark.choices().values()
        if setting in settings_of(choice)
    ]
    return f"; it belongs to what {cls.__name__} names: {', '.join(found)}" if found else ""


def how_to_choose(unused: str) -> str:
    """The binding that makes a configuration use a class, where one names it."""
    for cls in list(CONFIGURABLES.values()):  # choices may import modules that register more
        for mark in _marks(cls):
            for name, choice in mark.choices().items():
                if choice is CONFIGURABLES[unused]:
                    return f"; {cls.__name__}.{mark.binding} = {name!r} does"
    return ""


def add_quotes(text: str) -> str | None:
    """A binding whose value is text without quotes, with them; None where that is not obvious."""
    name, _, value = (part.strip() for part in text.partition("="))
    section, _, field = name.partition(".")
    known = settings_of(CONFIGURABLES[section]) if section in CONFIGURABLES else {}
    if field not in known:
        return None
    takes = hints(CONFIGURABLES[section])[known[field].name]
    mark = by_name(takes)
    annotation = strip_mark(takes) if mark is None else literal(mark.choices())
    # Quotes, brackets, references and comments began something else; so did true, none and classes,
    # but for a choice of that name.
    other = not value or re.search(r"^['\"(\[{@%]|['\"]$|[#\n]", value) or _guess_quotes(value)
    if value in choices(annotation) or (takes_text(annotation) and not other):
        return f"{name} = {value!r}"
    return None


def _guess_quotes(word: str) -> str | None:
    """What a word without quotes is in gin; None: nothing."""
    known = {"True": "True", "False": "False", "None": "None"}
    known |= {cls: f"@{cls}()" for cls in CONFIGURABLES}
    return known.get(word.removesuffix("()")) or known.get(word.capitalize())


def no_value(error: SyntaxError) -> tuple[str, str] | None:
    """What is wrong with a value that is none, and the same line with quotes around it."""
    name, _, rest = (error.text or "").partition("=")
    name, value = name.strip(), rest.strip()
    token = re.search(r"Failed to parse token '(.*)'", error.msg)
    if not value or not (token or error.msg.startswith("Unable to parse value")):
        return None
    word = token.group(1) if token else value
    if not value.startswith(word):  # one of several, in brackets
        return f"{word} is no value", f"{name} = {value.replace(word, repr(word), 1)}"
    if value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return f"{value} is no number that a setting takes", "TextData.source = 'notes.txt'"
    meant = _guess_quotes(word)
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{value} is no value{hint}", f"{name} = {value.strip(chr(39) + chr(34))!r}"
