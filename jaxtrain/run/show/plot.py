"""Loss and metric curves of one run (loss.png)."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.training.objectives.objective import Yardstick

if TYPE_CHECKING:
    from jaxtrain.run.show.picture import Picture

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
    from jaxtrain.run.show.picture import Picture

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
