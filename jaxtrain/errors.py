"""The one exception that means "the user can fix this", and the nearest valid choices."""

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """A mistake of the user's: the command line prints the sentence alone and exits with status 2.

    The sentence names the thing, the value, what is allowed and the nearest valid choice.
    """


def refuse_below(least: int, settings: Any, *names: str) -> None:
    """Raises UserError for the first of these settings that is under `least`; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            allowed = f"at least {least}" if least else "0 or more"
            raise UserError(f"{type(settings).__name__}.{name}={value}; use {allowed}")


def refuse_not_positive(settings: Any, *names: str) -> None:
    """Raises UserError for the first of these settings that is not above 0; names its default."""
    for name in names:
        value = getattr(settings, name)
        if not value > 0:
            default = getattr(type(settings), name)
            raise UserError(
                f"{type(settings).__name__}.{name}={value}; use a number above 0, such as {default}"
            )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to `word`, letter case ignored, or None when nothing is close."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when something known is close to `word`, else the list of what is."""
    known = sorted(known)
    close = nearest(word, known)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; known: {', '.join(known)}"


def nearest_divisor(count: int, wanted: int) -> int:
    """The divisor of `count` closest to `wanted`."""
    return min((d for d in range(1, count + 1) if count % d == 0), key=lambda d: abs(d - wanted))


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of` closest to `value`, at least one time."""
    return max(round(value / of), 1) * of
