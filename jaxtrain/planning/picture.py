"""The picture of a plan: memory against capacity, time and traffic."""

import functools
from typing import TYPE_CHECKING, Any

from jaxtrain.planning.tables import memory_parts
from jaxtrain.plot import Picture
from jaxtrain.report import written_mesh

if TYPE_CHECKING:
    from jaxtrain.planning.plan import Plan

_GIB = 2**30
# Told apart by lightness and hatching, so that a greyscale print can be read.
_FILLS: list[dict[str, Any]] = [
    {"color": shade, "hatch": hatch, "edgecolor": "white"}
    for hatch in ("", "//", "..", "xx")
    for shade in ("#1b3a57", "#5b9bd5", "#a9cbe8", "#dbe9f5")
]


def plan_figure(plan: "Plan") -> Picture:
    """A stacked bar of one device's memory beside the compiler's figure and the capacity, the
    pieces of a step's time, and the traffic by mesh axis."""
    figure = Picture(11, 5)
    memory, time, traffic = figure.subplots(1, 3, width_ratios=[2.2, 1, 1])
    _memory(memory, plan)
    _time(time, plan)
    _traffic(traffic, plan)
    kind = "compiled" if plan.compiled else "estimate"
    mesh = written_mesh(plan.layout.mesh.shape)
    figure.suptitle(
        f"{type(plan.config.train.model).__name__} on {plan.target.name}: {mesh} ({kind})"
    )
    return figure


def _memory(axes: Any, plan: "Plan") -> None:
    bottom = 0.0
    parts = {name: size for name, size in memory_parts(plan).items() if size}
    for (name, size), fill in zip(parts.items(), _FILLS, strict=False):
        axes.bar("closed forms", size / _GIB, bottom=bottom, width=0.5, label=name, **fill)
        bottom += size / _GIB
    compiled = plan.compiled
    if compiled is not None:
        bar = functools.partial(axes.bar, "compiled", width=0.5)
        bar(compiled.argument_bytes / _GIB, color="dimgrey", label="arguments")
        live = compiled.live_bytes or compiled.temp_bytes or 0
        start = compiled.argument_bytes / _GIB
        bar(live / _GIB, bottom=start, color="darkgrey", label="alive beside them")
        rest = (compiled.temp_bytes or 0) - live
        if rest > 0:
            start += live / _GIB
            bar(
                rest / _GIB, bottom=start, color="0.92", edgecolor="grey",
                label="reserved besides",
            )  # fmt: skip
    if plan.target.chip.hbm_bytes is not None:
        capacity = plan.target.chip.hbm_bytes / _GIB
        label = f"capacity {capacity:.4g} GiB"
        axes.axhline(capacity, color="black", linestyle="--", label=label)
    axes.set_xlim(-0.5, 0.5 if compiled is None else 1.5)
    axes.set_ylabel("GiB of one device")
    axes.set_title("Memory")
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _time(axes: Any, plan: "Plan") -> None:
    time, bottom = plan.time, 0.0
    axes.set_title("Time of a step")
    axes.spines[["top", "right"]].set_visible(False)
    if time.seconds is None:
        axes.text(0.5, 0.5, "speed not known", ha="center", transform=axes.transAxes)
        return
    pieces = {"computation": time.compute, "communication": time.exposed, "bubble": time.bubble}
    for (name, seconds), fill in zip(pieces.items(), _FILLS, strict=False):
        axes.bar("step", seconds, bottom=bottom, width=0.5, label=name, **fill)
        bottom += seconds or 0.0
    axes.set_xlim(-0.5, 0.5)
    axes.set_ylabel("seconds, predicted")
    axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.05))


def _traffic(axes: Any, plan: "Plan") -> None:
    together: dict[str, int] = {}
    for row in plan.rows:
        together[row.axis] = together.get(row.axis, 0) + row.bytes
    names = sorted(together, key=lambda name: together[name])
    axes.barh(names, [together[name] / _GIB for name in names], height=0.5, color="#5b9bd5")
    axes.margins(y=0.5)
    axes.set_xlabel("GiB by one device")
    axes.set_title("Traffic by axis")
    axes.spines[["top", "right"]].set_visible(False)
