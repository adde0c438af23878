"""Figures of a run and its data: curves, confusion matrix, document lengths, images.

Matplotlib takes a second to load: this module is imported where something is drawn.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, HasDocuments
from jaxtrain.run.show.examples import SHEET_IMAGES
from jaxtrain.training.objectives.objective import Yardstick


class Picture(Figure):
    """A figure that notebooks show by themselves.

    Not pyplot's: those are global state, and drawing may happen beside the training thread.
    Without pyplot IPython does not know how to show a figure, so this class does it itself.
    """

    def __init__(self, width: float, height: float) -> None:
        """An empty figure; width and height in inches, of 120 dots each."""
        super().__init__(figsize=(width, height), dpi=120, layout="constrained")
        FigureCanvasAgg(self)

    def png(self) -> bytes:
        """The bytes of a PNG file."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


# Distinguished by line style and lightness, so that a greyscale print and color-blind eyes can read
# the picture: light thin training curve, black evaluation points, dashed references.
_TRAIN: dict[str, Any] = {"color": "#5b9bd5", "linewidth": 1.2}
_EVAL: dict[str, Any] = {"color": "black", "linewidth": 1.2, "marker": "o", "markersize": 4}
_REFERENCE_STYLES = ("--", ":", "-.")
_NO_YARDSTICK = Yardstick()


def loss_figure(
    lines: Iterable[Mapping[str, Any]], yardstick: Yardstick = _NO_YARDSTICK
) -> "Picture":
    """The loss and the objective's other metrics over steps, a panel each.

    Args:
      lines: the objects of metrics.jsonl; those whose value is null leave a gap.
      yardstick: the objective's: which metrics are drawn, on what scale, with which horizontal
        lines. A metric that no line has is left out.
    """
    names = ("loss", *yardstick.metrics)
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
        word, unit = name.replace("_", " "), yardstick.unit if name == "loss" else ""
        for prefix, kind, style in (("", "training", _TRAIN), ("eval_", "evaluation", _EVAL)):
            if points[prefix + name]:
                curve = zip(*points[prefix + name], strict=True)
                axes.plot(*curve, label=f"{kind} {word}", **style)
        if name == "loss":
            axes.set_yscale(yardstick.scale)
        beaten = [one for one in yardstick.baselines if one.metric == name]
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


def loss_png(lines: Iterable[Mapping[str, Any]], yardstick: Yardstick = _NO_YARDSTICK) -> bytes:
    """`loss_figure` as a PNG file's bytes."""
    return loss_figure(lines, yardstick).png()


_MOST_WRITTEN = 20  # classes whose numbers have room in their cells
_MOST_LETTERS = 16  # of a class's name


def confusion_figure(counts: Sequence[Sequence[int]], names: Sequence[str] = ()) -> "Picture":
    """Labels down, predictions across; each row's shades are shares of its label.

    Args:
      counts: how often each label (a row) was predicted as each class (a column).
      names: of the classes; numbers where there are not as many names as classes.
    """
    table, size = np.asarray(counts), len(counts)
    called = names if len(names) == size else [str(number) for number in range(size)]
    short = [one if len(one) <= _MOST_LETTERS else one[:_MOST_LETTERS] + "…" for one in called]
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    side = min(max(0.45 * size + 1.8, 4.0), 14.0)
    figure = Picture(side, side)
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Greys", vmin=0, vmax=1)
    every = -(-size // 50)  # names that would run into each other are left out
    places = range(0, size, every)
    axes.set_xticks(places, [short[place] for place in places], rotation=90)
    axes.set_yticks(places, [short[place] for place in places])
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    if size <= _MOST_WRITTEN:
        for (row, column), count in np.ndenumerate(table):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "small"}
                axes.text(column, row, str(count), color=color, **style)
    return figure


_BARS = 40
_BLUE = "#5b9bd5"


def data_picture(batch: Batch, dataset: Dataset) -> Picture:
    """A picture of a batch and of the data that it is of.

    Args:
      batch: rows of the first step.
      dataset: the opened data.

    Raises:
      UserError: the data are vectors or pairs.
    """
    if dataset.unit == "images":
        return _sheet(batch, dataset)
    if dataset.unit in ("vectors", "pairs"):
        raise UserError(f"--png: {dataset.unit} are not drawn; leave it out")
    return _text(batch, dataset)


def _text(batch: Batch, dataset: Dataset) -> Picture:
    """Beside each other: how long documents are, and how often each token occurs."""
    figure = Picture(9, 4)
    lengths, counts = figure.subplots(1, 2)
    if isinstance(dataset.train, HasDocuments):
        sizes = np.asarray(dataset.train.document_lengths())
        bounds = np.unique(np.geomspace(1, max(2, sizes.max() + 1), _BARS).round())
        lengths.hist(sizes, bins=bounds.tolist(), color=_BLUE)
        lengths.set_title(
            f"{len(sizes):,} documents, median {np.median(sizes):,.0f}, longest {sizes.max():,}"
        )
    length = batch.inputs.shape[1]
    lengths.axvline(length, color="black", linestyle="--", label=f"a row: {length:,}")
    lengths.set_xscale("log")
    lengths.set_xlabel("tokens of a document")
    lengths.set_ylabel("documents")
    lengths.legend(frameon=False)
    real = batch.inputs if batch.segment_ids is None else batch.inputs[batch.segment_ids > 0]
    often = np.sort(np.unique(real, return_counts=True)[1])[::-1]
    counts.loglog(np.arange(1, len(often) + 1), often, color=_BLUE)
    counts.set_title(f"{real.size:,} tokens of the first batch")
    counts.set_xlabel("rank of a token")
    counts.set_ylabel("how often it occurs")
    return figure


def _labels(labels: np.ndarray, shares: np.ndarray, names: list[str]) -> str:
    """What an image shows; of a mixed one each label with its share."""
    told = [names[one] if one < len(names) else str(one) for one in np.ravel(labels).tolist()]
    if len(told) == 1:
        return told[0]
    parts = zip(told, np.ravel(shares).tolist(), strict=True)
    return ", ".join(f"{name} {share:.0%}" for name, share in parts if share)


def _sheet(batch: Batch, dataset: Dataset) -> Picture:
    """Images in rows, each over its label, their values from the least to the greatest."""
    images = np.asarray(batch.inputs[:SHEET_IMAGES], np.float32)
    least, most = float(images.min()), float(images.max())
    images = (images - least) / max(most - least, 1e-9)
    facts = dataset.facts
    names = str(facts["class_names"]).split(", ") if "class_names" in facts else []
    columns = math.ceil(math.sqrt(len(images)))
    figure = Picture(columns, 1.25 * math.ceil(len(images) / columns))
    grid = figure.subplots(math.ceil(len(images) / columns), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, (axes, image) in enumerate(zip(grid.flat, images, strict=False)):
        axes.imshow(image.squeeze(), cmap="grey" if image.shape[-1] == 1 else None, vmin=0, vmax=1)
        if np.issubdtype(batch.targets.dtype, np.integer):
            axes.set_title(_labels(batch.targets[row], batch.loss_mask[row], names), fontsize=7)
    return figure
