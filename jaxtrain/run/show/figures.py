"""Figures of a run: loss and metric curves, confusion matrix.

Matplotlib takes a second to import: this module is imported only to draw.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:  # it imports JAX, and `jaxtrain plot` does not
    from jaxtrain.training.objectives.objective import Yardstick


class Picture(Figure):
    """A figure that notebooks display.

    Not pyplot's: those are global state, and drawing may happen concurrently with the training
    thread. Without pyplot IPython does not know how to show a figure, so this class does it itself.
    """

    def __init__(self, width: float, height: float) -> None:
        """Create an empty figure; width and height in inches, at 120 dpi."""
        super().__init__(figsize=(width, height), dpi=120, layout="constrained")
        FigureCanvasAgg(self)

    def png(self) -> bytes:
        """Return the bytes of a PNG file."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


# Distinguished by line style and lightness, so that grayscale prints and color-blind readers can
# read the figure: light thin training curve, black evaluation points, dashed references.
_TRAIN: dict[str, Any] = {"color": "#5b9bd5", "linewidth": 1.2}
_EVAL: dict[str, Any] = {"color": "black", "linewidth": 1.2, "marker": "o", "markersize": 4}
_REFERENCE_STYLES = ("--", ":", "-.")


def loss_figure(
    lines: Iterable[Mapping[str, Any]], yardstick: "Yardstick | None" = None
) -> Picture:
    """Plot the loss and the objective's other metrics over steps, a panel each.

    Args:
      lines: the objects of metrics.jsonl; those whose value is null leave a gap.
      yardstick: the objective's: metrics, scale, and horizontal
        lines. Missing metrics are skipped. None: the loss alone.
    """
    names = ("loss", *yardstick.metrics) if yardstick is not None else ("loss",)
    unit_of_loss = yardstick.unit if yardstick is not None else ""
    baselines = yardstick.baselines if yardstick is not None else ()
    points: dict[str, list[tuple[int, float]]] = {
        key: [] for name in names for key in (name, f"eval_{name}")
    }
    for line in lines:
        for key in points.keys() & line.keys():
            points[key].append((line["step"], float("nan") if line[key] is None else line[key]))
    shown = [n for n in names if n == "loss" or points[n] or points[f"eval_{n}"]]
    heights = [4.5 if name == "loss" else 2.2 for name in shown]
    figure = Picture(8, sum(heights))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, name in zip(panels[:, 0], shown, strict=True):
        word, unit = name.replace("_", " "), unit_of_loss if name == "loss" else ""
        for prefix, kind, style in (("", "training", _TRAIN), ("eval_", "evaluation", _EVAL)):
            if points[prefix + name]:
                curve = zip(*points[prefix + name], strict=True)
                axes.plot(*curve, label=f"{kind} {word}", **style)
        if name == "loss" and yardstick is not None:
            axes.set_yscale(yardstick.scale)
        beaten = [one for one in baselines if one.metric == name]
        for one, line_style in zip(beaten, _REFERENCE_STYLES, strict=False):
            label = f"{one.label} {one.value:.2f}"
            axes.axhline(one.value, color="dimgrey", linestyle=line_style, label=label)
        axes.set_ylabel(f"{word} ({unit})" if unit else word)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False)
    panels[-1, 0].set_xlabel("step")
    return figure


def loss_png(lines: Iterable[Mapping[str, Any]], yardstick: "Yardstick | None" = None) -> bytes:
    """`loss_figure` as a PNG file's bytes."""
    return loss_figure(lines, yardstick).png()


_MOST_WRITTEN = 20  # maximum number of classes with numbers in cells
_MOST_LETTERS = 16  # of a class's name


def confusion_figure(counts: Sequence[Sequence[int]], names: Sequence[str] = ()) -> Picture:
    """Plot a confusion matrix, labels as rows, normalized by row.

    Args:
      counts: how often each label (a row) was predicted as each class (a column).
      names: of the classes; numbers if their count does not match.
    """
    table, size = np.asarray(counts), len(counts)
    called = names if len(names) == size else [str(number) for number in range(size)]
    short = [one if len(one) <= _MOST_LETTERS else one[:_MOST_LETTERS] + "…" for one in called]
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    side = min(max(0.45 * size + 1.8, 4.0), 14.0)
    figure = Picture(side, side)
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Greys", vmin=0, vmax=1)
    every = -(-size // 50)  # names that would overlap are skipped
    ticks = range(0, size, every)
    axes.set_xticks(ticks, [short[tick] for tick in ticks], rotation=90)
    axes.set_yticks(ticks, [short[tick] for tick in ticks])
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    if size <= _MOST_WRITTEN:
        for (row, column), count in np.ndenumerate(table):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "small"}
                axes.text(column, row, str(count), color=color, **style)
    return figure
