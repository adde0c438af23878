"""The loss curve of a run, and what it is drawn beside."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.run.show.picture import Picture

# Told apart by line style and lightness, so that a greyscale print and colour-blind eyes can read
# the picture: light thin training curve, black evaluation points, dashed references.
_TRAIN: dict[str, Any] = {"color": "#5b9bd5", "linewidth": 1.2}
_EVAL: dict[str, Any] = {"color": "black", "linewidth": 1.2, "marker": "o", "markersize": 4}
_REFERENCE_STYLES = ("--", ":", "-.")


def loss_figure(lines: Iterable[Mapping[str, Any]], references: Mapping[str, float]) -> "Picture":
    """The training and evaluation loss over steps.

    Args:
      lines: the objects of metrics.jsonl; those whose loss is null leave a gap.
      references: horizontal lines, label to loss: what a model must beat to have learned anything.
    """
    from jaxtrain.run.show.picture import Picture

    curves = {"loss": ("training loss", _TRAIN), "eval_loss": ("evaluation loss", _EVAL)}
    points: dict[str, list[tuple[int, float]]] = {key: [] for key in curves}
    for line in lines:
        for key in points.keys() & line.keys():
            points[key].append((line["step"], float("nan") if line[key] is None else line[key]))
    figure = Picture(8, 4.5)
    axes = figure.add_subplot()
    for key, (label, style) in curves.items():
        if points[key]:
            axes.plot(*zip(*points[key], strict=True), label=label, **style)
    for index, (label, loss) in enumerate(references.items()):
        line_style = _REFERENCE_STYLES[index % len(_REFERENCE_STYLES)]
        axes.axhline(loss, color="dimgrey", linestyle=line_style, label=f"{label} {loss:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    return figure


def reference_losses(facts: Mapping[str, Any]) -> dict[str, float]:
    """Losses that a model must beat to have learned anything, of what is known of its data."""
    entropy = facts.get("unigram_entropy")
    return {} if entropy is None else {"unigram entropy": float(entropy)}


def loss_png(lines: Iterable[Mapping[str, Any]], references: Mapping[str, float]) -> bytes:
    """`loss_figure` as a PNG file's bytes."""
    return loss_figure(lines, references).png()
