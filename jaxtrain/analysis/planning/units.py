"""Human-readable durations and sizes, as text and for axes of figures."""

from typing import NamedTuple


class Unit(NamedTuple):
    """A unit: its size in seconds or bytes, and its name."""

    size: float
    name: str


_SECONDS = (
    Unit(1e-6, "us"), Unit(1e-3, "ms"), Unit(1.0, "s"), Unit(60.0, "min"), Unit(3600.0, "hours"),
    Unit(86_400.0, "days"),
)  # fmt: skip
_BYTES = tuple(Unit(1024.0**n, name) for n, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))
_NOTHING = 1e-9  # seconds below this are rounding errors


def time_unit(seconds: float) -> Unit:
    """Return the largest unit that fits into a duration once, or twice for minutes and hours."""
    fitting = [one for one in _SECONDS if seconds >= one.size * (2 if one.size > 1 else 1)]
    return fitting[-1] if fitting else _SECONDS[0]


def byte_unit(size: float) -> Unit:
    """Return the largest binary unit of which a size has at least one."""
    return [_BYTES[0], *(one for one in _BYTES if size >= one.size)][-1]


def human_seconds(seconds: float) -> str:
    """Format a duration with up to four digits: `13.7 us`, `2.5 ms`, `12.5 days`; 0 below 1 ns."""
    if abs(seconds) < _NOTHING:
        return "0"
    unit = time_unit(abs(seconds))
    value = seconds / unit.size
    return f"{value:,.0f} {unit.name}" if abs(value) >= 1000 else f"{value:.4g} {unit.name}"
