"""Tables of the keys of foreign file formats: each key is used, irrelevant or limited to values.

A file that another program wrote is checked against the table of its format. A key in no table and
a value that is not implemented are errors that name it: an ignored key can change the result
silently.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.config.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Used:
    """A key that is read; the code that reads it validates its value."""


@dataclasses.dataclass(frozen=True)
class Irrelevant:
    """A key that is ignored, since no value of it changes the result.

    Attributes:
      reason: why it does not change the result.
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class Only:
    """A key of which only some values are supported.

    Attributes:
      allowed: the supported values; of an object or a list, equality decides.
      default: the value of a missing key or null.
      reason: why others are not supported, for the message; may be empty.
    """

    allowed: tuple[Any, ...]
    default: Any = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Nested:
    """A key whose value is an object, or a list of objects, with a table of its own."""

    table: "KeyTable"


_MOST_REASONS = 20  # of a message

KeyTable = Mapping[str, Used | Irrelevant | Only | Nested]


def read_keys(*keys: str) -> dict[str, Used]:
    """Return a table of keys that are read."""
    return dict.fromkeys(keys, Used())


def ignore_keys(reason: str, *keys: str) -> dict[str, Irrelevant]:
    """Return a table of keys that are ignored for one reason."""
    return dict.fromkeys(keys, Irrelevant(reason))


def only(*allowed: Any, reason: str = "") -> Only:
    """Return the entry of a key with these values alone, the first of which is its default."""
    return Only(allowed, allowed[0], reason)


def check_keys(content: Mapping[str, Any], table: KeyTable, *, within: str = "") -> Iterator[str]:
    """Yield a clause for each key that the table does not list and each value that it rejects.

    Args:
      content: a JSON object, or the metadata of a file.
      table: of its format.
      within: put before each key, such as "rope_scaling.".
    """
    for key, value in content.items():
        if key not in table:
            close = nearest(key, table)
            hint = "" if close is None else f" (the nearest is {close!r})"
            yield (
                f"{within}{key} = {_format(value)} is an unknown key{hint}; remove "
                "it from the file if it does not change the result"
            )
    for key, entry in table.items():
        value = content.get(key)
        if isinstance(entry, Nested):
            yield from _check_nested(value, entry.table, f"{within}{key}")
        elif isinstance(entry, Only):
            found = entry.default if value is None else value
            if not any(_equal(found, one) for one in entry.allowed):
                shown = _format(found) if value is not None else f"{_format(found)} by default"
                allowed = " or ".join(map(repr, entry.allowed))
                reason = f" ({entry.reason})" if entry.reason else ""
                yield f"{within}{key} = {shown}; it must be {allowed}{reason}"


def validate_keys(content: Mapping[str, Any], table: KeyTable, *, where: str) -> None:
    """Raise UserError with every key and value of a file that its table does not support.

    Args:
      content: of the file.
      table: of its format.
      where: the file, for the message.
    """
    reasons = list(check_keys(content, table))
    if reasons:
        more = len(reasons) - _MOST_REASONS
        reasons[_MOST_REASONS:] = [f"... and {more:,} more"] if more > 0 else []
        lines = "\n".join(f"  {reason}" for reason in reasons)
        raise UserError(f"{where} has what is not supported here:\n{lines}")


def _check_nested(value: Any, table: KeyTable, within: str) -> Iterator[str]:
    if value is None:
        return
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, Mapping):
            yield from check_keys(one, table, within=f"{within}.")
        else:
            yield f"{within} = {_format(value)}; it must be an object"


def _equal(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal: 1 is 1.0, but not true."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _format(value: Any) -> str:
    """Format a value for a message, truncated if it is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
