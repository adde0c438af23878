"""Terminal tables of a profile."""

from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.profiling.operations import Figures, Profile
from jaxtrain.run.show.progress import print_lines

ROWS = 15


def show(console: Console, found: Profile) -> None:
    """Print the layers, and the operations that take longest."""
    top = found.ceilings
    if top.flops is None or top.bandwidth is None:
        limits = f"{top.source}: no share of the roofline"
    else:
        limits = (
            f"roofline of {top.flops / 1e9:,.0f} GFLOP/s and {top.bandwidth / 1e9:,.1f} GB/s a "
            f"device ({top.source})"
        )
    heads = ("ms a step", "share", "runs", "GFLOP", "MB", "of roofline", "bound by")
    layers = Table(
        title=f"Steps {found.first} to {found.last}: {1e3 * found.step_seconds:.1f} ms a step on "
        f"{found.devices} {found.device_kind}",
        title_justify="left",
    )
    operations = Table(title="Operations that take longest", title_justify="left")
    for table, names in ((layers, ("layer", "pass")), (operations, ("operation", "layer", "from"))):
        for name in names:
            table.add_column(name, overflow="fold")
        for name in heads:
            table.add_column(name, justify="right")
    for one in found.layers[: 2 * ROWS]:
        layers.add_row(one.scope, one.stage, *_cells(one.figures))
    layers.add_row("no operation", "waiting", "", f"{found.elsewhere:.1%}")
    for one in found.operations[:ROWS]:
        where = f"{one.origin.scope} {one.origin.stage}"
        operations.add_row(one.name, where, one.origin.operation, *_cells(one.figures))
    console.print(layers)
    console.print(operations)
    print_lines(console, f"Per device; {limits}")


def _cells(figures: Figures) -> list[str]:
    return [
        f"{1e3 * figures.seconds:.2f}",
        f"{figures.share:.1%}",
        f"{figures.runs:,.0f}",
        "-" if figures.flops is None else f"{figures.flops / 1e9:,.3f}",
        f"{figures.moved_bytes / 1e6:,.1f}",
        "-" if figures.roofline is None else f"{figures.roofline:.0%}",
        figures.bound or "-",
    ]
