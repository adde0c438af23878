"""Charts as inline SVG: stacked bars, and curves with a legend that toggles them.

The drawings are stretched to the width of the page; their labels are text of the page, which is as
large on a phone as on a desktop. They need no script.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxtrain.run.show.html_page import Html, data, element

_FILLS, _COLORS, _DASHES = 14, 8, 4  # classes of html_page.css
_SMALL = 0.2  # of the capacity: shorter bars are drawn without it
_TICKS = 5
_LAST = 94  # percent of the width

Human = Callable[[float], str]


class Curve(NamedTuple):
    """One run's metric: the index of the run, and its points; NaN leaves a gap."""

    run: int
    steps: np.ndarray
    values: np.ndarray
    is_evaluation: bool


class Panel(NamedTuple):
    """The curves of one metric."""

    name: str
    curves: Sequence[Curve]


def stacked_bars(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    human: Human,
    *,
    limits: Mapping[str, float] | None = None,
) -> Html:
    """Return horizontal bars, each of parts one after another, and the key of the parts.

    Args:
      title: the chart's title.
      bars: parts of each bar; zeros are skipped.
      human: a value, formatted for display.
      limits: the capacity of bars: a dashed line, if the bars would not be too short next to it.
    """
    limits = limits or {}
    bars = {
        name: {part: value for part, value in parts.items() if value > 0}
        for name, parts in bars.items()
    }
    most = max((math.fsum(parts.values()) for parts in bars.values()), default=0.0)
    scale = max([most, *(one for one in limits.values() if most > _SMALL * one)]) or 1.0
    several = list(bars.values())
    # Bars with common parts share a key, others have their own.
    alike = any(
        one.keys() & other.keys() for one in several for other in several if one is not other
    )
    drawn, common = [], dict.fromkeys(part for parts in several for part in parts)
    for name, parts in bars.items():
        fill = {
            part: f"f{number % _FILLS}" for number, part in enumerate(common if alike else parts)
        }
        drawn.append(_bar(name, parts, fill, scale, limits.get(name), human))
        if not alike and len(parts) > 1:
            drawn.append(_key(fill, parts, human))
    if alike and len(common) > 1:
        drawn.append(_key({part: f"f{n % _FILLS}" for n, part in enumerate(common)}, {}, human))
    return element("figure", element("figcaption", title), *drawn)


def _key(fill: Mapping[str, str], values: Mapping[str, float], human: Human) -> Html:
    """Return the colors of the parts, with their values where they belong to one bar."""
    entries = []
    for part, color in fill.items():
        sample = element("svg", _rect(0, 1, color), viewBox="0 0 1 1", aria_hidden="true")
        value = [" ", data(values[part], human(values[part]))] if part in values else []
        entries.append(element("li", sample, part, *value))
    return element("ul", *entries, class_="key")


def _bar(
    name: str,
    parts: Mapping[str, float],
    fill: Mapping[str, str],
    scale: float,
    limit: float | None,
    human: Human,
) -> Html:
    start, pieces = 0.0, []
    for part, value in parts.items():
        tip = element("title", f"{part}: {human(value)}")
        pieces.append(_rect(1000 * start / scale, 1000 * value / scale, fill[part], tip))
        start += value
    parts_text = [data(start, human(start))]
    if limit is not None:
        parts_text += [" of ", data(limit, human(limit)), f" ({start / limit:.0%})"]
        if limit <= scale:
            x = f"{1000 * limit / scale:.2f}"
            pieces.append(element("line", x1=x, x2=x, y1=0, y2=1, class_="limit"))
    label = "; ".join(f"{part} {human(value)}" for part, value in parts.items())
    svg = element(
        "svg",
        *pieces,
        viewBox="0 0 1000 1",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{name}: {label or human(0)}",
    )
    head = element("div", element("span", name), element("span", *parts_text), class_="name")
    return element("div", head, svg, class_="bar")


def _rect(x: float, width: float, fill: str, *children: Html) -> Html:
    return element(
        "rect", *children, x=f"{x:.2f}", y=0, width=f"{width:.2f}", height=1, class_=fill
    )


def curves(names: Sequence[str], panels: Iterable[Panel]) -> tuple[Html, str]:
    """Return the panels of curves over steps under their legend, and the style rules they need.

    Args:
      names: of the runs; each is a toggle in the legend.
      panels: from top to bottom; one without finite values is skipped.
    """
    panels = [
        Panel(name, [one for one in several if np.isfinite(one.values).any()])
        for name, several in panels
    ]
    panels = [one for one in panels if one.curves]
    ends = [curve.steps[at] for panel in panels for curve in panel.curves for at in (0, -1)]
    across = _pad_range(min(ends), max(ends), 0.0) if ends else (0.0, 1.0)
    kinds = {curve.is_evaluation for panel in panels for curve in panel.curves}
    switches = [
        element(
            "label",
            element("input", type="checkbox", id=f"run{number}", checked=True),
            _sample(number),
            name,
        )
        for number, name in enumerate(names)
    ]
    legend = element(
        "fieldset", element("legend", "Runs: tap one to hide or show its curves"), *switches
    )
    several = []
    if len(kinds) > 1:
        several = [
            element(
                "label",
                element("input", type="checkbox", id=identifier, checked=True),
                label,
            )
            for identifier, label in (("training", "training"), ("heldout", "held out (dots)"))
        ]
    kinds_legend = element("fieldset", element("legend", "Measured on"), *several)
    body = element(
        "section",
        legend,
        kinds_legend if several else "",
        *(_panel(panel, *across) for panel in panels),
        class_="plots",
    )
    rules = "".join(
        f".plots:has(#run{n}:not(:checked)) .run{n} {{ display: none; }}\n"
        for n in range(len(names))
    )
    return body, rules


def _look(run: int) -> str:
    """Return the classes of a run's color and dashes: 32 differ, neighbors in their dashes too, for
    prints without color."""
    return f"s{run % _COLORS} d{(run + run // _COLORS) % _DASHES}"


def _sample(run: int) -> Html:
    line = element("line", x1=1, x2=31, y1=4, y2=4, class_=f"curve {_look(run)}")
    return element("svg", line, viewBox="0 0 32 8", aria_hidden="true")


def _panel(panel: Panel, left: float, right: float) -> Html:
    shown = panel.curves
    values = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in shown])
    low, high = _pad_range(values.min(), values.max(), 0.05)
    grid, labels = [], []
    for tick in ticks(low, high):
        at = (tick - low) / (high - low)
        y = f"{100 * (1 - at):.3f}"
        grid.append(element("line", x1=0, x2=100, y1=y, y2=y, class_="grid"))
        labels.append(element("span", f"{tick:.10g}", class_="y", style=f"bottom: {100 * at:.2f}%"))
    for tick in ticks(left, right):
        at = 100 * (tick - left) / (right - left)
        # A label centered at the last tick would overflow a phone's page.
        side = f"left: {at:.2f}%" if at < _LAST else f"right: {100 - at:.2f}%"
        kind = "x" if at < _LAST else "x last"
        labels.append(element("span", f"{tick:,.10g}", class_=kind, style=side))
    # The paths hold the data themselves; this maps them on the frame of 100 x 100.
    across, up = 100 / (right - left), -100 / (high - low)
    transform = f"matrix({across!r} 0 0 {up!r} {-left * across!r} {-high * up!r})"
    # Without other curves, lines join the dots.
    joined = all(curve.is_evaluation for curve in shown)
    paths = [_path(curve, is_line) for curve in shown for is_line in _styles(curve, joined)]
    drawn = element("g", *paths, transform=transform)
    svg = element(
        "svg",
        *grid,
        drawn,
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{panel.name} over steps, {low:.4g} to {high:.4g}",
    )
    return element(
        "figure",
        element("figcaption", f"{panel.name} over steps"),
        element("div", svg, *labels, class_="frame"),
        class_="panel",
    )


def _styles(curve: Curve, joined: bool) -> list[bool]:
    """Return how a curve is drawn: as a line (True), as dots (False), or as both."""
    return [True] * (joined or not curve.is_evaluation) + [False] * curve.is_evaluation


def _path(curve: Curve, is_line: bool) -> Html:
    """Return the points of a run as a line with gaps, or as dots."""
    commands, is_open = [], False
    for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
        if not math.isfinite(value):
            is_open = False
            continue
        point = f"{step:.10g} {value:.7g}"
        # A zero-length line is drawn as a dot, by its round caps.
        commands.append(f"L{point}" if is_open and is_line else f"M{point}L{point}")
        is_open = True
    kind = "heldout" if curve.is_evaluation else "training"
    look = _look(curve.run)
    drawn = f"curve {look}" if is_line else f"dots {look.split()[0]}"
    return element("path", d="".join(commands), class_=f"run{curve.run} {kind} {drawn}")


def _pad_range(low: float, high: float, margin: float) -> tuple[float, float]:
    """Return the range of an axis; one value alone gets some room."""
    room = margin * (high - low) if high > low else max(abs(high) * 0.1, 1e-9)
    return float(low - room), float(high + room)


def ticks(low: float, high: float, most: int = _TICKS) -> list[float]:
    """Return at most `most` + 1 round numbers from `low` to `high`: multiples of 1, 2 or 5 times a
    power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]
