"""Notebook displays: parameter shardings, and tables as HTML."""

import html
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import Console

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.run.show.report import parameters
from jaxtrain.training.state import TrainState

if TYPE_CHECKING:
    from jaxtrain.run.show.figures import Picture

_MAX_PANELS = 16
# Number of parts along a direction above which labels would overlap.
_MAX_NUMBERED = 16
_WIDTH_COLUMNS = 110
_STYLE = "line-height:normal; font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace"

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


def as_pre(text: str) -> str:
    """Text as HTML that keeps its lines."""
    return f"<pre>{html.escape(text, quote=False)}</pre>"


def details(summary: str, text: str) -> str:
    """Text as HTML that opens when its summary is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>{as_pre(text)}</details>"


def export_html(show: Callable[[Console], None]) -> str:
    """Return the output of `show` as HTML."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH_COLUMNS, force_jupyter=False)
    show(console)
    return console.export_html(
        inline_styles=True, code_format=f'<pre style="{_STYLE}">{{code}}</pre>'
    )


def parameter_picture(state: TrainState, name: str) -> "Picture":
    """`sharding_picture` of a parameter.

    Raises:
      UserError: there is no parameter of this name.
    """
    known = parameters(state)
    if name not in known:
        raise UserError(
            f"no parameter {name!r}{did_you_mean(name, known)}; table() lists all names"
        )
    array, axes = known[name]
    return sharding_picture(array, name, axes)


def parts_of(array: jax.Array) -> dict[Bounds, list[int]]:
    """Return the shards of an array, in order, and the devices of each."""
    parts: dict[Bounds, list[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        cut = zip(index, array.shape, strict=True)
        bounds = tuple(part.indices(size)[:2] for part, size in cut)
        parts.setdefault(bounds, []).append(device.id)
    return {bounds: sorted(parts[bounds]) for bounds in sorted(parts)}


def sharding_picture(array: jax.Array, name: str, axes: Sequence[str]) -> "Picture":
    """Return the array as a rectangle, cut as its sharding cuts it, in each part its devices'
    numbers.

    The first two split dimensions are drawn; further split ones become panels, and
    unsplit dimensions are in the title.

    Args:
      array: of any rank, on any mesh.
      name: for the title.
      axes: its logical axes.
    """
    from jaxtrain.run.show.figures import Picture

    parts = parts_of(array)
    shape = array.shape
    counts = [len({bounds[i] for bounds in parts}) for i in range(len(shape))]
    by_cuts = sorted(range(len(shape)), key=lambda i: (counts[i] > 1, shape[i] > 1, i))
    drawn = sorted(by_cuts[-2:])
    others = [i for i in range(len(shape)) if i not in drawn]
    panels = sorted({tuple(bounds[i] for i in others) for bounds in parts})
    columns = math.ceil(math.sqrt(min(len(panels), _MAX_PANELS)))
    rows = math.ceil(min(len(panels), _MAX_PANELS) / columns)
    figure = Picture(max(5.0, 3.0 * columns), 1.2 + (3.0 if len(drawn) > 1 else 1.0) * rows)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    # Light enough for black digits; neighbors differ in lightness, so grayscale prints are
    # readable.
    shades = dict(zip(parts, np.linspace(0.95, 0.6, len(parts)), strict=True))
    numbered = all(counts[i] <= _MAX_NUMBERED for i in drawn)
    for panel, plot in zip(panels, grid, strict=False):
        plot.set_title(_where(panel, [axes[i] for i in others], [counts[i] for i in others]))
        for bounds, devices in parts.items():
            if tuple(bounds[i] for i in others) == panel:
                box = [bounds[i] for i in drawn]
                _draw_part(plot, box, str(shades[bounds]), _numbers(devices) if numbered else "")
        _label(plot, [(axes[i], shape[i], counts[i]) for i in drawn])
    for plot in list(grid)[len(panels) :]:
        plot.set_axis_off()
    holders = len(next(iter(parts.values())))
    whole = [f"{axes[i]} {shape[i]}" for i in others if counts[i] == 1]
    figure.suptitle(
        f"{name}: {_pluralize(len(parts), 'part')}, each on {_pluralize(holders, 'device')}"
        + (f"\nwhole in every part: {', '.join(whole)}" if whole else "")
        + (f"\nthe first {_MAX_PANELS} of {len(panels)} panels" * (len(panels) > _MAX_PANELS))
        + ("" if numbered else "\ntoo many parts to number their devices"),
        fontsize=10,
    )
    return figure


def _draw_part(plot: Any, box: Sequence[tuple[int, int]], shade: str, devices: str) -> None:
    (left, right), (top, bottom) = box[-1] if box else (0, 1), box[0] if len(box) > 1 else (0, 1)
    plot.fill_between([left, right], top, bottom, facecolor=shade, edgecolor="black", linewidth=0.8)
    if devices:
        middle = (left + right) / 2, (top + bottom) / 2
        plot.text(*middle, devices, ha="center", va="center", fontsize=9, wrap=True)


def _label(plot: Any, dimensions: Sequence[tuple[str, int, int]]) -> None:
    """Return names, sizes and splits of the drawn dimensions, the first from top to bottom."""
    label = [
        f"{axis} {size}, {_pluralize(count, 'part') if count > 1 else 'whole'}"
        for axis, size, count in dimensions
    ]
    cuts = [np.linspace(0, size, min(count, 8) + 1).round() for _, size, count in dimensions]
    plot.margins(0)
    if dimensions:
        plot.set_xlabel(label[-1])
        plot.set_xticks(cuts[-1])
    if len(dimensions) > 1:
        plot.set_ylabel(label[0])
        plot.set_yticks(cuts[0])
        plot.invert_yaxis()
    else:
        plot.set_yticks([])


def _where(panel: Sequence[tuple[int, int]], axes: Sequence[str], counts: Sequence[int]) -> str:
    """Return the label of a panel: its part of the dimensions that are not drawn."""
    return ", ".join(
        f"{axis} {start}" if stop == start + 1 else f"{axis} {start} to {stop - 1}"
        for (start, stop), axis, count in zip(panel, axes, counts, strict=True)
        if count > 1
    )


def _numbers(devices: Sequence[int]) -> str:
    """Return device ids, a few per line; only the first if many have the same shard."""
    shown = [str(number) for number in devices[:8]]
    lines = [", ".join(shown[i : i + 4]) for i in range(0, len(shown), 4)]
    more = [f"and {len(devices) - 8} more"] if len(devices) > 8 else []
    return "\n".join([*lines, *more])


def _pluralize(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
