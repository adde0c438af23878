"""Whether a setting's value fits its annotation, and what the setting takes in words."""

import ast
import dataclasses
import os
import types
import typing
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class PathOr:
    """Marks a setting that takes a path: `source: Annotated[str, PathOr(("embedded", "tfds:"))]`.

    Attributes:
      words: what else it takes; a word that ends in a colon begins such a value.
    """

    words: tuple[str, ...] = ()

    def absolute(self, value: str) -> str:
        """A path on this machine from its root on; a word or a URL as it is."""
        is_word = any(value.startswith(w) if w[-1] == ":" else value == w for w in self.words)
        return (
            value if is_word or "://" in value else str(Path(os.path.expanduser(value)).absolute())
        )


def located(value: Any, annotation: Any) -> Any:
    """`value`, absolute where its annotation is marked `PathOr`."""
    marks = getattr(annotation, "__metadata__", ())
    mark = next((mark for mark in marks if isinstance(mark, PathOr)), None)
    return value if mark is None or value is None else mark.absolute(value)


def check_value(name: str, value: Any, annotation: Any, origin: str) -> Any:
    """`value` if it fits the annotation (an int where a float is asked for becomes one).

    Raises:
      UserError: naming the setting, its value, what it takes and the nearest valid choice.
    """
    fits, value = _fit(value, annotation)
    if fits:
        return value
    choices = [
        choice
        for part in _parts(annotation)
        if typing.get_origin(part) is typing.Literal
        for choice in typing.get_args(part)
    ]
    hint = ""
    if choices and isinstance(value, str):
        hint = did_you_mean(value, [choice for choice in choices if isinstance(choice, str)])
    elif isinstance(value, str):
        try:
            literal = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            literal = value
        if not isinstance(literal, str) and _fit(literal, annotation)[0]:
            hint = f"; write {literal!r} without quotes"
    raise UserError(
        f"{origin}: {name} = {value!r} is {_kind(value)}; it takes {_describe(annotation)}{hint}"
    )


def _parts(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _fit(value: Any, annotation: Any) -> tuple[bool, Any]:
    parts = _parts(annotation)
    if len(parts) > 1:
        for part in parts:
            fits, fitted = _fit(value, part)
            if fits:
                return True, fitted
        return False, value
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True, value
    if annotation is None or annotation is type(None):
        return value is None, value
    if origin is typing.Literal:
        # True == 1 in Python: a bool is no choice among numbers.
        return any(value == a and type(value) is type(a) for a in arguments), value
    if origin is tuple:
        if not isinstance(value, tuple):
            return False, value
        variadic = len(arguments) == 2 and arguments[1] is ...
        kinds = (arguments[0],) * len(value) if variadic else arguments
        if len(kinds) != len(value):
            return False, value
        fitted = [_fit(item, kind) for item, kind in zip(value, kinds, strict=True)]
        return all(fits for fits, _ in fitted), tuple(item for _, item in fitted)
    if origin is dict:
        if not isinstance(value, dict):
            return False, value
        keys = [_fit(key, arguments[0]) for key in value]
        values = [_fit(item, arguments[1]) for item in value.values()]
        fits = all(fit for fit, _ in (*keys, *values))
        return fits, {key: item for (_, key), (_, item) in zip(keys, values, strict=True)}
    if annotation is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number, float(value) if number else value
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(value, origin or annotation), value


def _describe(annotation: Any) -> str:
    words = []
    for part in _parts(annotation):
        if typing.get_origin(part) is typing.Literal:
            words.append("one of " + ", ".join(repr(a) for a in typing.get_args(part)))
        elif part is type(None):
            words.append("None")
        elif typing.get_origin(part) is None:
            words.append(getattr(part, "__name__", str(part)))
        else:
            words.append(str(part))
    return " or ".join(words)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
