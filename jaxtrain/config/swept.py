"""Sweeps: bindings with lists of values, such as `Optimizer.learning_rate = [1e-3, 3e-3]`."""

import ast
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from jaxtrain.config.errors import UserError

_SWEPT = re.compile(r"\s*([\w.]+)\s*=\s*\[(.*)\]\s*", re.S)
_CLOSES = {"(": ")", "[": "]", "{": "}"}


@dataclasses.dataclass(frozen=True)
class Combination:
    """Combination of the swept settings' values.

    Attributes:
      values: of the swept settings, as they were written.
      bindings: all of its bindings.
    """

    values: dict[str, str]
    bindings: list[str]


def combinations(bindings: Sequence[str]) -> list[Combination]:
    """Return all combinations, the last swept setting changing fastest; a single one without lists.

    Args:
      bindings: gin bindings; `Name.field = [A, B]` means one run with A and one with B.

    Raises:
      UserError: a list is empty, or has a value twice.
    """
    swept: dict[str, list[str]] = {}
    for binding in bindings:
        found = _SWEPT.fullmatch(binding)
        if found is not None:
            swept[found[1]] = list(_items(found[2]))
            if not swept[found[1]]:
                raise UserError(f"-b {binding!r}: the list is empty; write {found[1]} = [A, B]")
            _validate_twice(binding, swept[found[1]])
    fixed = [binding for binding in bindings if _SWEPT.fullmatch(binding) is None]
    chosen = [dict(zip(swept, some, strict=True)) for some in itertools.product(*swept.values())]
    return [
        Combination(values, [*fixed, *(f"{name} = {value}" for name, value in values.items())])
        for values in chosen
    ]


def _validate_twice(binding: str, items: Sequence[str]) -> None:
    """Raise UserError if a value occurs twice, which would be the same run twice."""
    seen: dict[str, str] = {}
    for item in items:
        value = item
        with contextlib.suppress(ValueError, SyntaxError):  # a reference is no literal
            value = repr(ast.literal_eval(item))
        if value in seen:
            raise UserError(
                f"-b {binding!r}: {item} is the same value as {seen[value]}; name each once"
            )
        seen[value] = item


def _items(text: str) -> Iterator[str]:
    """Yield the items between commas that are outside of brackets and quotes."""
    part, closing, quote = "", [], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _CLOSES:
            closing.append(_CLOSES[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter == "," and not closing:
            yield part.strip()
            part = ""
            continue
        part += letter
    if part.strip():
        yield part.strip()
