"""Terminal output and figure of `jaxtrain plan`: memory, time and traffic."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.analysis.planning.goodput.show import show as show_goodput
from jaxtrain.analysis.planning.goodput.show import show_line as show_goodput_line
from jaxtrain.analysis.planning.search.candidates import FAR, FSDP
from jaxtrain.analysis.planning.whole_run import sentence
from jaxtrain.run.show.progress import byte_unit, human_seconds, print_lines, time_unit
from jaxtrain.run.show.report import format_mesh, human_bytes, show_attention

if TYPE_CHECKING:
    from jaxtrain.analysis.planning.compiled.compiled import Compiled
    from jaxtrain.analysis.planning.result import Plan
    from jaxtrain.analysis.planning.search.candidates import Candidate, Found
    from jaxtrain.run.show.figures import Picture

_BAR = 30
_ROWS, _BUFFERS = 14, 8


def show(console: Console, plan: "Plan") -> None:
    """Print memory, traffic, time, the ranking of a search, and advice."""
    _head(console, plan)
    _memory(console, plan)
    _buffers(console, plan)
    _traffic(console, plan)
    _time(console, plan)
    _goodput(console, plan)
    _candidates(console, plan)
    _advice(console, plan)


def _head(console: Console, plan: "Plan") -> None:
    chip, devices = plan.target.chip, plan.devices
    source = "closed-form ESTIMATE, nothing was compiled"
    if plan.compiled is not None:
        source = f"compiled in {plan.compiled.seconds:.0f} s"
        source += " by an earlier plan" if plan.compiled.cached else ""
    mesh = format_mesh(plan.layout.mesh.shape)
    print_lines(
        console, f"Plan for {plan.target.name} ({devices} {chip.kind} devices), {mesh}: {source}"
    )
    show_attention(console, plan.attention)
    if chip.hbm_bytes is None:
        print_lines(console, f"Memory: {human_bytes(plan.total)} a device")
        return
    needs = f"{human_bytes(plan.total)} of {human_bytes(chip.hbm_bytes)} a device"
    if plan.fits and plan.total > chip.hbm_bytes and plan.compiled and plan.compiled.live_bytes:
        # What a TPU's compiler reserves beyond the memory, it reserves where there is room.
        live = human_bytes(plan.arguments + plan.compiled.live_bytes)
        needs = f"{live} live of {human_bytes(chip.hbm_bytes)} a device"
    print_lines(console, f"{plan.verdict.upper()}: {needs}")
    if plan.compiled is not None and plan.compiled.error:
        print_lines(console, f"The compiler says: {plan.compiled.error}")
    elif plan.compiled is not None and not plan.fits:
        print_lines(
            console,
            "XLA for GPUs does not reject a program that is too large: its arguments and temporary "
            "buffers exceed the memory that a program gets (Train.gpu_memory_fraction)",
        )


def memory_parts(plan: "Plan") -> dict[str, int]:
    """Return the parts of the peak memory by closed forms, largest of each kind first."""
    arguments = plan.estimate.arguments
    return {
        "parameters": arguments.params,
        "optimizer state": arguments.optimizer,
        "batch and counters": arguments.other,
        "gradients": plan.estimate.gradients,
        **plan.estimate.parts,
    }


def _memory(console: Console, plan: "Plan") -> None:
    table = Table(
        title="Memory of one device at its memory peak (closed forms)", title_justify="left"
    )
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("")
    parts = memory_parts(plan)
    most = max(parts.values())
    for name, size in parts.items():
        table.add_row(name, human_bytes(size), "#" * round(_BAR * size / most))
    table.add_section()
    table.add_row("total of the closed forms", human_bytes(plan.estimate.total), "")
    for name, size in plan.estimate.left_out.items():
        if size:
            table.add_row(f"not counted: {name}", human_bytes(size), "")
    if plan.estimate.host:
        host = human_bytes(plan.estimate.host)
        table.add_row("plus host memory", host, "")
    if plan.estimate.arguments.disk:
        disk = human_bytes(plan.estimate.arguments.disk)
        table.add_row("plus its host's disks", disk, "")
    compiled = plan.compiled
    if compiled is not None:
        table.add_row("compiled: arguments", human_bytes(compiled.argument_bytes), "")
        if compiled.live_bytes is not None:
            table.add_row("compiled: live temporaries", human_bytes(compiled.live_bytes), "")
        if compiled.temp_bytes is not None:
            table.add_row("compiled: temporary buffers", human_bytes(compiled.temp_bytes), "")
        if compiled.host_bytes:
            table.add_row("compiled: host memory", human_bytes(compiled.host_bytes), "")
    console.print(table)


def _buffers(console: Console, plan: "Plan") -> None:
    if not plan.buffers:
        return
    table = Table(title="Largest live arrays at the memory peak", title_justify="left")
    table.add_column("bytes", justify="right")
    table.add_column("arrays", overflow="fold")
    table.add_column("operation", overflow="fold")
    alike: dict[tuple[str, str], list[int]] = {}
    for buffer in plan.buffers:
        made_by = "/".join(buffer.op_name.split("/")[-4:])
        alike.setdefault((buffer.type, made_by), []).append(buffer.bytes)
    largest = sorted(alike.items(), key=lambda item: -sum(item[1]))
    for (kind, made_by), sizes in largest[:_BUFFERS]:
        count = f"{len(sizes)} x " if len(sizes) > 1 else ""
        table.add_row(human_bytes(sum(sizes)), escape(count + kind), escape(made_by))
    console.print(table)


def _traffic(console: Console, plan: "Plan") -> None:
    if not plan.rows:
        print_lines(console, "Traffic: none")
        return
    table = Table(title="Traffic of one device and step", title_justify="left")
    for name in ("collective", "axis", "link"):
        table.add_column(name)
    for name in ("count", "bytes", "textbook"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for row in plan.rows[:_ROWS]:
        textbook = "-" if row.textbook_bytes is None else human_bytes(row.textbook_bytes)
        why = row.cause
        if not row.explained:
            # The CPU compiler rewrites collectives: they prove nothing.
            cpu = plan.target.chip.kind == "cpu"
            why = f"{'the CPU compiler' if cpu else 'NOT EXPLAINED'}: {row.cause}"
        table.add_row(
            row.kind, row.axis, row.link, str(row.count), human_bytes(row.bytes), textbook,
            escape(why),
        )  # fmt: skip
    console.print(table)
    if len(plan.rows) > _ROWS:
        rest = plan.rows[_ROWS:]
        size = human_bytes(sum(row.bytes for row in rest))
        print_lines(
            console, f"... and {len(rest)} smaller rows of {size} together (--json has them)"
        )


def _time(console: Console, plan: "Plan") -> None:
    time = plan.time
    if time.seconds is None:
        print_lines(console, f"Time: {'; '.join(time.assumptions)}")
        return
    # A compiled program's schedule is shown next to the closed forms.
    closed = time.estimate
    by = "" if plan.target.calibration is None else f", calibrated by {plan.time.factor:.3g}"
    table = Table(title=f"Time of one step (predicted{by})", title_justify="left")
    table.add_column("what")
    table.add_column("time" if closed is None else "by the schedule", justify="right")
    if closed is not None:
        table.add_column("closed forms", justify="right")
    table.add_column("share", justify="right")

    def row(name: str, seconds: float | None, closed_form: float | None, share: str) -> None:
        other = (
            [] if closed is None else ["-" if closed_form is None else human_seconds(closed_form)]
        )
        table.add_row(name, human_seconds(seconds or 0.0), *other, share)

    estimate = closed or time
    for name, seconds, extra in (
        ("computation", time.compute, estimate.compute),
        ("exposed communication", time.exposed, estimate.exposed),
        ("pipeline bubble", time.bubble, estimate.bubble),
    ):
        row(name, seconds, extra, f"{(seconds or 0) / time.seconds:.1%}")
    table.add_section()
    row("step", time.seconds, estimate.seconds, "" if time.mfu is None else f"MFU {time.mfu:.1%}")
    around = time.error_bar or 0.0
    row("error bar", time.seconds * around, None, f"{around:.0%}")
    unit = plan.config.train.model.inputs
    extra = [] if closed is None else [""]
    rate = f"{plan.tokens_per_second or 0:,.0f}"
    table.add_row(f"{unit} per second and device", rate, *extra, f"{time.tflops or 0:.0f} TFLOP/s")
    row("overlapped communication", time.hidden, estimate.hidden, "")
    console.print(table)
    if time.kernels:
        print_lines(
            console,
            f"Of the computation {human_seconds(time.kernels)} are attention kernels, whose time "
            "is not in the compiled program: by closed form.",
        )
    if plan.whole_run is not None:
        watts = plan.target.chip.watts
        print_lines(console, sentence(plan.whole_run, unit=unit, error_bar=around, watts=watts))
    for assumption in time.assumptions:
        print_lines(console, f"Assumed: {assumption}.")


def _goodput(console: Console, plan: "Plan") -> None:
    if plan.goodput is not None:
        shown = show_goodput if plan.reliability.is_requested else show_goodput_line
        shown(console, plan.goodput)
    elif plan.reliability.is_requested:
        print_lines(
            console, "Goodput: not known without the time of a step; name a target that has one"
        )


def _candidates(console: Console, plan: "Plan") -> None:
    found = plan.found
    if found is None:
        return
    if found.interrupted:
        left = _describe_unpriced(found)
        print_lines(console, f"The search was interrupted: {left}; others may be better")
    table = Table(title="Search: best layouts first", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("mesh", overflow="fold")
    table.add_column("best of", overflow="fold")
    table.add_column("other settings", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("memory", justify="right")
    table.add_column("why", overflow="fold")
    for one in found.shown:
        size = one.price.memory.total if one.compiled_bytes is None else one.compiled_bytes
        how = "" if one.compiled_bytes is None else " compiled"
        table.add_row(
            str(one.rank),
            format_mesh(one.mesh),
            ", ".join(one.best_of),
            _others(one),
            _step(one),
            human_bytes(size) + how,
            one.reason,
        )
    unfit = found.unfit
    if unfit is not None:
        gain = 1 - unfit.price.seconds / min(one.price.seconds for one in found.candidates)
        table.add_section()
        table.add_row(
            "-",
            format_mesh(unfit.mesh),
            "",
            _others(unfit),
            _step(unfit),
            human_bytes(unfit.price.memory.total),
            f"does not fit: {human_bytes(unfit.over)} too much; the fastest of those that do not, "
            f"{gain:.1%} less time than the fastest that fits",
        )
    console.print(table)
    for kind in found.absent:
        which = "FSDP alone" if kind == FSDP else f"{kind} parallelism"
        print_lines(
            console,
            f"No layout with {which} fits and takes less than {FAR:g} times as long as the best",
        )
    rejected = sum(found.rejected.values())
    print_lines(
        console,
        f"{found.priced} layouts priced, {found.too_large} of them too large; {found.slower} left "
        f"out, slower by their matmuls and exposed communication alone; {rejected} meshes rejected",
    )
    for reason, count in sorted(found.rejected.items(), key=lambda item: -item[1])[:5]:
        print_lines(console, f"  {count} x {reason}")
    pasted = " ".join(f'-b "{binding}"' for binding in found.shown[0].bindings)
    print_lines(console, f"To train this layout: {pasted or 'as it is'}")


def _describe_unpriced(found: "Found") -> str:
    if found.left:
        return f"{found.priced:,} layouts were priced, {found.left:,} more were not considered"
    return "all layouts were priced, but not all of the best compiled"


def _others(one: "Candidate") -> str:
    """Return the bindings other than the mesh's."""
    return " ".join(b for b in one.bindings if not b.startswith("Mesh."))


def _step(one: "Candidate") -> str:
    seconds = one.price.time.seconds
    return "-" if seconds is None else human_seconds(seconds)


def _advice(console: Console, plan: "Plan") -> None:
    if plan.advice:
        print_lines(console, "Advice, the cheapest first:" if plan.fixes else "Warnings:")
    for advice in plan.advice:
        print_lines(console, f"- {advice}")


# Fraction of a device's memory below which a bar would be invisible next to the capacity.
_SMALL = 0.05
# Distinguished by lightness and hatching, so that they are legible in grayscale.
_FILLS: list[dict[str, Any]] = [
    {"color": shade, "hatch": hatch, "edgecolor": "white"}
    for hatch in ("", "//", "..", "xx")
    for shade in ("#1b3a57", "#5b9bd5", "#a9cbe8", "#dbe9f5")
]


_GREYS: list[dict[str, Any]] = [
    {"color": "dimgrey"},
    {"color": "darkgrey"},
    {"color": "0.92", "edgecolor": "grey"},
]


def compiled_parts(compiled: "Compiled") -> dict[str, int]:
    """Return the compiler's memory of a step on one device, in bytes, in the order of the bar."""
    live = compiled.live_bytes or compiled.temp_bytes or 0
    parts = {"arguments": compiled.argument_bytes, "live temporaries": live}
    rest = (compiled.temp_bytes or 0) - live
    return {**parts, "reserved": rest} if rest > 0 else parts


def traffic_by_axis(plan: "Plan") -> dict[str, int]:
    """Return the bytes that one device sends in a step along each mesh axis."""
    together: dict[str, int] = {}
    for row in plan.rows:
        together[row.axis] = together.get(row.axis, 0) + row.bytes
    return together


def plan_figure(plan: "Plan") -> "Picture":
    """Plot one device's memory next to the compiler's figure and the capacity, the components of
    the step time, and the traffic by mesh axis."""
    from jaxtrain.run.show.figures import Picture

    figure = Picture(11, 5)
    memory, time, traffic = figure.subplots(1, 3, width_ratios=[2.2, 1, 1])
    _memory_bars(memory, plan)
    _time_bars(time, plan)
    _traffic_bars(traffic, plan)
    kind = "compiled" if plan.compiled else "estimate"
    mesh = format_mesh(plan.layout.mesh.shape)
    figure.suptitle(
        f"{type(plan.config.train.model).__name__} on {plan.target.name}: {mesh} ({kind})"
    )
    return figure


def _memory_bars(axes: Any, plan: "Plan") -> None:
    bottom = 0.0
    parts = {name: size for name, size in memory_parts(plan).items() if size}
    compiled, capacity = plan.compiled, plan.target.chip.hbm_bytes
    most = max(sum(parts.values()), plan.total)
    is_small = capacity is not None and most < _SMALL * capacity
    unit = byte_unit(most if is_small or capacity is None else max(most, capacity))
    for (name, size), fill in zip(parts.items(), _FILLS, strict=False):
        axes.bar("closed forms", size / unit.size, bottom=bottom, width=0.5, label=name, **fill)
        bottom += size / unit.size
    if compiled is not None:
        bottom = 0.0
        for (name, size), fill in zip(compiled_parts(compiled).items(), _GREYS, strict=False):
            axes.bar("compiled", size / unit.size, bottom=bottom, width=0.5, label=name, **fill)
            bottom += size / unit.size
    if is_small:
        times = f"capacity {human_bytes(capacity)}: {capacity / most:,.0f} times as much"
        axes.plot([], [], linestyle="none", label=times)
    elif capacity is not None:
        line = capacity / unit.size
        label = f"capacity {human_bytes(capacity)}"
        axes.axhline(line, color="black", linestyle="--", label=label)
    axes.set_xlim(-0.5, 0.5 if compiled is None else 1.5)
    axes.set_ylabel(f"{unit.name} of one device")
    axes.set_title("Memory")
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _time_bars(axes: Any, plan: "Plan") -> None:
    time = plan.time
    axes.set_title("Time of a step")
    axes.spines[["top", "right"]].set_visible(False)
    if time.seconds is None:
        axes.text(0.5, 0.5, "speed not known", ha="center", transform=axes.transAxes)
        return
    bars = {"step": time} if time.estimate is None else {"schedule": time, "closed": time.estimate}
    unit = time_unit(max(one.seconds or 0.0 for one in bars.values()))
    for name, one in bars.items():
        pieces = {"computation": one.compute, "communication": one.exposed, "bubble": one.bubble}
        bottom = 0.0
        for (piece, seconds), fill in zip(pieces.items(), _FILLS, strict=False):
            label = piece if one is time else None
            height = (seconds or 0.0) / unit.size
            axes.bar(name, height, bottom=bottom, width=0.5, label=label, **fill)
            bottom += height
    axes.set_xlim(-0.5, len(bars) - 0.5)
    axes.set_ylabel(f"{unit.name}, predicted")
    axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.05))


def _traffic_bars(axes: Any, plan: "Plan") -> None:
    together = traffic_by_axis(plan)
    names = sorted(together, key=lambda name: together[name])
    unit = byte_unit(max(together.values(), default=0))
    sizes = [together[name] / unit.size for name in names]
    axes.barh(names, sizes, height=0.5, color="#5b9bd5")
    axes.margins(y=0.5)
    axes.set_xlabel(f"{unit.name} by one device")
    axes.set_ylabel("mesh axis")
    if not names:
        axes.text(0.5, 0.5, "none", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
    axes.set_title("Traffic by axis")
    axes.spines[["top", "right"]].set_visible(False)
