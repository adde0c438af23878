"""Type checks of settings: values against annotations, allowed values, suggestions."""

import ast
import contextlib
import dataclasses
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.errors import UserError, nearest
from jaxtrain.config.registry import CONFIGURABLES

LARGEST = 2**32 - 1  # of an integer: seeds, counts and sizes have 32 bits


@dataclasses.dataclass(frozen=True)
class PathOr:
    """Mark of a setting that takes a path: `source: Annotated[str, PathOr(("embedded", "tfds:"))]`.

    Attributes:
      words: other accepted values; one that ends in a colon is a prefix.
    """

    words: tuple[str, ...] = ()

    def absolute(self, value: str) -> str:
        """Return an absolute path on this machine; words and URLs are unchanged."""
        is_word = any(value.startswith(w) if w[-1] == ":" else value == w for w in self.words)
        return (
            value if is_word or "://" in value else str(Path(os.path.expanduser(value)).absolute())
        )


@dataclasses.dataclass(frozen=True)
class ByName:
    """Mark of a setting that is one of several registered dataclasses, bound by name.

    `rule: Annotated[Rule, ByName("name", rules)]` of Optimizer is bound as `Optimizer.name =
    'sgd'`, and the settings of the class with this name are a section of their own: `SGD.momentum`.

    Attributes:
      binding: the setting's name in a gin file.
      choices: the classes by their names.
    """

    binding: str
    choices: Callable[[], Mapping[str, type]]

    def name_of(self, cls: type) -> str:
        """Return the name of a class.

        Raises:
          UserError: it is not a class with this name.
        """
        choices, own = self.choices(), getattr(cls, "name", None)
        if own in choices and choices[own] is cls:  # without importing the others
            return str(own)
        for name, choice in choices.items():
            if choice is cls:
                return name
        raise UserError(
            f"{cls.__name__} cannot be named: no {self.binding!r} of its own is the last that was "
            f"given; give it one that is none of {', '.join(self.choices())}"
        )


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Mark of a setting that is a word of a table: `policy: Annotated[str,
    OneOf(tuple(POLICIES))]`.

    Attributes:
      words: those of the table.
    """

    words: tuple[str, ...]


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Return the annotation of each field of a settings class with its mark; `OneOf` becomes a
    Literal.
    """
    found = typing.get_type_hints(cls, include_extras=True)
    return {name: _spell_out(annotation) for name, annotation in found.items()}


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is field.default_factory is dataclasses.MISSING


def strip_mark(annotation: Any) -> Any:
    """Return an annotation without its mark."""
    marked = typing.get_origin(annotation) is typing.Annotated
    return typing.get_args(annotation)[0] if marked else annotation


def literal(words: Iterable[str]) -> Any:
    """Return the Literal annotation of these words."""
    of_words: Any = typing.Literal
    return of_words[tuple(words)]


def _spell_out(annotation: Any) -> Any:
    marks = getattr(annotation, "__metadata__", ())
    return next((literal(mark.words) for mark in marks if isinstance(mark, OneOf)), annotation)


def by_name(annotation: Any) -> ByName | None:
    """Return the `ByName` mark of an annotation."""
    marks = getattr(annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, ByName)), None)


@functools.cache
def settings_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a settings class by their gin names."""
    takes = hints(cls)
    marks = {field: by_name(takes[field.name]) for field in dataclasses.fields(cls)}
    return {mark.binding if mark else field.name: field for field, mark in marks.items()}


def resolve_paths(value: Any, annotation: Any) -> Any:
    """Return `value`, or each value of a dict, as absolute paths if its annotation is marked
    `PathOr`.
    """
    marks = getattr(annotation, "__metadata__", ())
    mark = next((mark for mark in marks if isinstance(mark, PathOr)), None)
    if mark is None or value is None:
        return value
    if isinstance(value, dict):
        return {name: mark.absolute(path) for name, path in value.items()}
    return mark.absolute(value)


def check_value(name: str, value: Any, annotation: Any, origin: str) -> Any:
    """Return `value` if it fits the annotation (an int becomes a float where one is required).

    Raises:
      UserError: naming the setting, its value, what it takes and the nearest valid choice.
    """
    with contextlib.suppress(_Misfit):
        return _check_bounds(name, _convert(value, annotation), origin)
    strings = [choice for choice in choices(annotation) if isinstance(choice, str)]
    written = f"@{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)
    hint = ""
    if strings and isinstance(value, str):
        close = nearest(value, strings)  # None: the message lists all of them already
        hint = f"; did you mean {close!r}?" if close is not None else ""
    elif isinstance(value, str):
        try:
            literal = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            literal = value
        if not isinstance(literal, str) and _fits(literal, annotation):
            hint = f"; write {literal!r} without quotes"
    elif dataclasses.is_dataclass(value):
        lacking = sorted({member for part in _parts(annotation) for member in lacks(value, part)})
        hint = f", and this has no {', '.join(lacking)}" if lacking else ""
    if not hint and _fits((value,), annotation):
        hint = f"; write {(value,)!r}"
    raise UserError(
        f"{origin}: {name} = {written} is {_kind(value)}; it takes {_describe(annotation)}{hint}"
    )


def _check_bounds(name: str, value: Any, origin: str) -> Any:
    """Return the value of a setting if all numbers in it are representable.

    Raises:
      UserError: a number is not finite, or an integer has more than 32 bits.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{origin}: {name} = {value}; use a finite number")
    if isinstance(value, int) and abs(value) > LARGEST:
        bound = f"at least -{LARGEST}" if value < 0 else f"at most {LARGEST}"
        raise UserError(f"{origin}: {name} = {value}; use {bound}")
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, tuple | dict):
        for part in parts:
            _check_bounds(name, part, origin)
    return value


def lacks(value: Any, annotation: Any) -> list[str]:
    """Return the members of a protocol that a value lacks; none if the annotation is not a
    protocol.
    """
    if not _is_protocol(annotation):
        return []
    members = {*annotation.__annotations__, *vars(annotation)}
    return sorted(name for name in members - {*dir(value)} if name[0] != "_")


def _is_protocol(annotation: Any) -> bool:
    return isinstance(annotation, type) and typing.Protocol in annotation.__bases__


def missing(name: str, annotation: Any, classes: Iterable[type]) -> str:
    """Return the error message for a setting that has no value and needs one.

    Args:
      name: the setting.
      annotation: what it takes.
      classes: what can be referred to.
    """
    examples = sorted(f"@{cls.__name__}()" for cls in classes if _is_of(cls, annotation))
    examples += [repr(choice) for choice in choices(annotation)]
    plain = {int: "1", float: "0.1", str: "'text'", bool: "True"}
    examples += [plain[part] for part in _parts(annotation) if part in plain]
    takes = f" to one of {', '.join(examples)}" if len(examples) > 1 else ""
    such = f", such as {name} = {examples[0]}" if examples else ""
    return f"{name} has no value: bind it{takes}{such}"


def _is_of(cls: type, annotation: Any) -> bool:
    """Whether a dataclass implements a protocol; a field without a default is not a member."""
    fields = {field.name for field in dataclasses.fields(cls)}
    return _is_protocol(annotation) and fields.issuperset(lacks(cls, annotation))


def takes_text(annotation: Any) -> bool:
    """Whether an annotation takes text, any or one of some choices."""
    return str in _parts(annotation) or any(isinstance(one, str) for one in choices(annotation))


def takes_plain_values(annotation: Any) -> bool:
    """Whether an annotation takes no section: only numbers, text and collections of them."""
    return all(
        part is type(None)
        or typing.get_origin(part) is not None
        or (isinstance(part, type) and part is not object and part.__module__ == "builtins")
        for part in _parts(annotation)
    )


def _parts(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def choices(annotation: Any) -> list[Any]:
    """Return the values of an annotation's Literals."""
    return [
        choice
        for part in _parts(annotation)
        if typing.get_origin(part) is typing.Literal
        for choice in typing.get_args(part)
    ]


class _Misfit(Exception):  # noqa: N818 - no error yet: another annotation may be tried
    """A value does not fit an annotation."""


def _fits(value: Any, annotation: Any) -> bool:
    try:
        _convert(value, annotation)
    except _Misfit:
        return False
    return True


def _convert(value: Any, annotation: Any) -> Any:
    """Return the value converted to the annotation: an int becomes a float where one is required.

    Raises:
      _Misfit: the annotation does not take it.
    """
    parts = _parts(annotation)
    if len(parts) > 1:
        return _convert_to_one_of(value, parts)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return _convert_tuple(value, arguments)
    if origin is dict:
        return _convert_dict(value, *arguments)
    if origin is typing.Literal:
        # True == 1 in Python: a bool is not a choice among numbers.
        fits = any(value == a and type(value) is type(a) for a in arguments)
    elif annotation in (int, float):
        fits = isinstance(value, int | annotation) and not isinstance(value, bool)
        value = annotation(value) if fits else value
    elif annotation is None:
        fits = value is None
    else:
        fits = annotation is Any or isinstance(value, origin or annotation)
    if not fits:
        raise _Misfit
    return value


def _convert_to_one_of(value: Any, annotations: Iterable[Any]) -> Any:
    for annotation in annotations:
        with contextlib.suppress(_Misfit):
            return _convert(value, annotation)
    raise _Misfit


def _convert_tuple(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise _Misfit
    of_any_length = len(arguments) == 2 and arguments[1] is ...
    kinds = (arguments[0],) * len(value) if of_any_length else arguments
    if len(kinds) != len(value):
        raise _Misfit
    return tuple(_convert(item, kind) for item, kind in zip(value, kinds, strict=True))


def _convert_dict(value: Any, of_keys: Any, of_values: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _Misfit
    return {_convert(key, of_keys): _convert(item, of_values) for key, item in value.items()}


def _describe(annotation: Any) -> str:
    choices_text = []
    for part in _parts(annotation):
        if typing.get_origin(part) is typing.Literal:
            choices_text.append("one of " + ", ".join(repr(a) for a in typing.get_args(part)))
        elif part is type(None):
            choices_text.append("None")
        elif typing.get_origin(part) is None:
            choices_text.append(getattr(part, "__name__", str(part)))
        else:
            choices_text.append(str(part))
    return " or ".join(choices_text)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _marks(cls: type) -> list[ByName]:
    return [mark for mark in map(by_name, hints(cls).values()) if mark is not None]


def of_a_choice(cls: type, setting: str) -> str:
    """Return a hint if the setting belongs to a class that one of `cls`'s settings names."""
    found = [
        f"{choice.__name__}.{setting}"
        for mark in _marks(cls)
        for choice in mark.choices().values()
        if setting in settings_of(choice)
    ]
    return f"; it belongs to what {cls.__name__} names: {', '.join(found)}" if found else ""


def how_to_choose(unused: str) -> str:
    """Return the binding that makes a configuration use a class, if there is one."""
    for cls in list(CONFIGURABLES.values()):  # choices may import modules that register more
        for mark in _marks(cls):
            for name, choice in mark.choices().items():
                if choice is CONFIGURABLES[unused]:
                    return f"; {cls.__name__}.{mark.binding} = {name!r} does"
    return ""


def add_quotes(text: str) -> str | None:
    """Return a binding with quotes around its unquoted text, or None if that is not obvious."""
    name, _, value = (part.strip() for part in text.partition("="))
    section, _, field = name.partition(".")
    known = settings_of(CONFIGURABLES[section]) if section in CONFIGURABLES else {}
    if field not in known:
        return None
    takes = hints(CONFIGURABLES[section])[known[field].name]
    mark = by_name(takes)
    annotation = strip_mark(takes) if mark is None else literal(mark.choices())
    # Quotes, brackets, references and comments mean something else; so do true, none and classes,
    # except for a choice of that name.
    other = not value or re.search(r"^['\"(\[{@%]|['\"]$|[#\n]", value) or _guess_quotes(value)
    if value in choices(annotation) or (takes_text(annotation) and not other):
        return f"{name} = {value!r}"
    return None


def _guess_quotes(word: str) -> str | None:
    """Return the gin value that an unquoted word probably means, or None."""
    known = {"True": "True", "False": "False", "None": "None"}
    known |= {cls: f"@{cls}()" for cls in CONFIGURABLES}
    return known.get(word.removesuffix("()")) or known.get(word.capitalize())


def no_value(error: SyntaxError) -> tuple[str, str] | None:
    """Return what is wrong with an invalid value, and the same line with the value quoted."""
    name, _, rest = (error.text or "").partition("=")
    name, value = name.strip(), rest.strip()
    token = re.search(r"Failed to parse token '(.*)'", error.msg)
    if not value or not (token or error.msg.startswith("Unable to parse value")):
        return None
    word = token.group(1) if token else value
    if not value.startswith(word):  # one of several, in brackets
        return f"{word}is not a value", f"{name} = {value.replace(word, repr(word), 1)}"
    if value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return f"{value} is not a number that a setting accepts", "TextData.source = 'notes.txt'"
    meant = _guess_quotes(word)
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{value}is not a value{hint}", f"{name} = {value.strip(chr(39) + chr(34))!r}"
