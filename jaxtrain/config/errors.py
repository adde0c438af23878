"""`UserError`, validation of ranges, and nearest valid choices for messages."""

import difflib
from collections.abc import Iterable
from typing import Any

_LONGEST_LINE, _MOST_LINES = 2000, 100  # of a message


class UserError(ValueError):
    """User error: the command line prints only the message and exits with status 2.

    The sentence names the thing, the value, what is allowed and the nearest valid choice. A value
    may be untrusted: control characters are escaped, and long lines and lists are truncated.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(_format(str(message)))


def _format(message: str) -> str:
    lines = [one if one.isprintable() else _escape(one) for one in message.split("\n")]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES:,} lines more"]
    if any(len(line) > _LONGEST_LINE for line in lines):
        half = _LONGEST_LINE // 2
        lines = [
            line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"
            for line in lines
        ]
    return "\n".join(lines)


def _escape(line: str) -> str:
    """Return a line without terminal control characters and those that it cannot encode."""
    return "".join(
        one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode()
        for one in line
    )


class NoCompilerError(UserError):
    """The compiler of the target machine is not installed on this one."""


def require_at_least(least: int, settings: Any, *names: str) -> None:
    """Raise UserError for settings under `least`; None passes."""
    allowed = f"at least {least}" if least else "0 or more"
    values = {name: getattr(settings, name) for name in names}
    _raise_any(
        f"{type(settings).__name__}.{name}={value}; use {allowed}"
        for name, value in values.items()
        if value is not None and value < least
    )


def require_at_most(most: int, settings: Any, *names: str) -> None:
    """Raise UserError for settings over `most`; None passes."""
    values = {name: getattr(settings, name) for name in names}
    _raise_any(
        f"{type(settings).__name__}.{name}={value}; use at most {most}"
        for name, value in values.items()
        if value is not None and value > most
    )


def require_positive(settings: Any, *names: str) -> None:
    """Raise UserError for settings that are not above 0; names their defaults."""
    cls = type(settings)
    values = {name: getattr(settings, name) for name in names}
    _raise_any(
        f"{cls.__name__}.{name}={value}; use a number above 0, such as {getattr(cls, name)}"
        for name, value in values.items()
        if not value > 0
    )


def _raise_any(sentences: Iterable[str]) -> None:
    found = list(sentences)
    if found:
        raise UserError("\n".join(found))


def count_of(count: int, noun: str) -> str:
    """Format a count with its noun: `1 document`, `2,000 documents`, `8 batches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def nearest(word: str, allowed: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """Return the known name closest to `word`, ignoring case, or None if nothing is close.

    Args:
      word: what was written.
      allowed: what may be written.
      cutoff: minimum similarity, `difflib`'s ratio: 1 for the same word.
    """
    by_lower = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close to `word`, else the list of known
    names.
    """
    allowed = sorted(allowed)
    close = nearest(word, allowed)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; known: {', '.join(allowed)}"


def nearest_divisor(count: int, wanted: int) -> int:
    """Return the divisor of `count` closest to `wanted`."""
    return min((d for d in range(1, count + 1) if count % d == 0), key=lambda d: abs(d - wanted))


def nearest_multiple(value: int, of: int) -> int:
    """Return the multiple of `of` closest to `value`, at least one time."""
    return max(round(value / of), 1) * of
