"""The tables that `jaxtrain plan` prints."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.mesh import MESH_AXES
from jaxtrain.report import human_bytes, show_attention, written_mesh

if TYPE_CHECKING:
    from jaxtrain.planning.plan import Plan

_BAR = 30
_ROWS, _BUFFERS = 14, 8


def show(console: Console, plan: "Plan") -> None:
    """Memory, traffic, time, a search's ranking, and what to do."""
    _head(console, plan)
    _memory(console, plan)
    _buffers(console, plan)
    _traffic(console, plan)
    _time(console, plan)
    _candidates(console, plan)
    _advice(console, plan)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _head(console: Console, plan: "Plan") -> None:
    chip, devices = plan.target.chip, plan.devices
    source = "closed-form ESTIMATE, nothing was compiled"
    if plan.compiled is not None:
        source = f"compiled in {plan.compiled.seconds:.0f} s"
        source += " by an earlier plan" if plan.compiled.cached else ""
    mesh = written_mesh(plan.layout.mesh.shape)
    _line(console, f"Plan for {plan.target.name} ({devices} {chip.kind} devices), {mesh}: {source}")
    show_attention(console, plan.attention)
    if chip.hbm_bytes is None:
        _line(console, f"Memory: {human_bytes(plan.total)} a device")
        return
    verdict = "FITS" if plan.fits else "DOES NOT FIT"
    needs = f"{human_bytes(plan.total)} of {human_bytes(chip.hbm_bytes)} a device"
    _line(console, f"{verdict}: {needs}")
    if plan.compiled is not None and plan.compiled.refusal:
        _line(console, f"The compiler says: {plan.compiled.refusal}")


def memory_parts(plan: "Plan") -> dict[str, int]:
    """What fills a device at the fullest moment, by closed forms, largest parts of a kind first."""
    arguments = plan.estimate.arguments
    return {
        "parameters": arguments.params,
        "optimizer state": arguments.optimizer,
        "batch and counters": arguments.other,
        "gradients": plan.estimate.gradients,
        **plan.estimate.parts,
    }


def _memory(console: Console, plan: "Plan") -> None:
    table = Table(title="Memory of one device (closed forms)", title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("")
    parts = memory_parts(plan)
    most = max(parts.values())
    for name, size in parts.items():
        table.add_row(name, human_bytes(size), "#" * round(_BAR * size / most))
    table.add_section()
    table.add_row("closed forms together", human_bytes(plan.estimate.total), "")
    compiled = plan.compiled
    if compiled is not None:
        table.add_row("compiled: arguments", human_bytes(compiled.argument_bytes), "")
        if compiled.live_bytes is not None:
            table.add_row("compiled: alive beside them", human_bytes(compiled.live_bytes), "")
        if compiled.temp_bytes is not None:
            table.add_row("compiled: reserved beside them", human_bytes(compiled.temp_bytes), "")
        if compiled.host_bytes:
            table.add_row("compiled: host memory", human_bytes(compiled.host_bytes), "")
    console.print(table)


def _buffers(console: Console, plan: "Plan") -> None:
    if not plan.buffers:
        return
    table = Table(title="Largest arrays alive at the fullest moment", title_justify="left")
    table.add_column("bytes", justify="right")
    table.add_column("arrays", overflow="fold")
    table.add_column("made by", overflow="fold")
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
        _line(console, "Traffic: none")
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
            # Its compiler rewrites collectives, so that they prove nothing.
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
        _line(console, f"... and {len(rest)} smaller rows of {size} together (--json has them)")


def _time(console: Console, plan: "Plan") -> None:
    time = plan.time
    if time.seconds is None:
        _line(console, f"Time: {'; '.join(time.assumptions)}")
        return
    pieces = {
        "computation": time.compute,
        "communication that nothing hides": time.exposed,
        "pipeline bubble": time.bubble,
    }
    table = Table(title="Time of one step (predicted)", title_justify="left")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in pieces.items():
        table.add_row(name, f"{seconds:.4g}", f"{(seconds or 0) / time.seconds:.1%}")
    table.add_section()
    mfu = "" if time.mfu is None else f"MFU {time.mfu:.1%}"
    table.add_row("step", f"{time.seconds:.4g}", mfu)
    table.add_row("communication behind computation", f"{time.hidden:.4g}", "")
    console.print(table)
    for words in time.assumptions:
        _line(console, f"Assumed: {words}.")


def _candidates(console: Console, plan: "Plan") -> None:
    found = plan.found
    if found is None:
        return
    table = Table(title="Search: best layouts first", title_justify="left")
    table.add_column("mesh", overflow="fold")
    table.add_column("also", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("memory", justify="right")
    table.add_column("why", overflow="fold")
    for one in found.shown:
        mesh = {axis: getattr(one.config.mesh, axis) for axis in MESH_AXES}
        others = [b for b in one.bindings if not b.startswith("Mesh.")]
        seconds = one.price.time.seconds
        size = one.price.memory.total if one.compiled_bytes is None else one.compiled_bytes
        how = "" if one.compiled_bytes is None else " compiled"
        table.add_row(
            written_mesh(mesh),
            " ".join(others),
            "-" if seconds is None else f"{seconds:.4g} s",
            human_bytes(size) + how,
            one.reason,
        )
    console.print(table)
    refused = sum(found.refused.values())
    _line(
        console,
        f"{found.priced} layouts priced, {found.too_large} of them too large; {found.slower} left "
        f"out, slower than these even without communication; {refused} meshes refused",
    )
    for reason, count in sorted(found.refused.items(), key=lambda item: -item[1])[:5]:
        _line(console, f"  {count} x {reason}")
    pasted = " ".join(f'-b "{binding}"' for binding in found.shown[0].bindings)
    _line(console, f"To train so: {pasted or 'as it is'}")


def _advice(console: Console, plan: "Plan") -> None:
    if plan.advice:
        _line(console, "Advice, the cheapest first:" if plan.fixes else "Noticed:")
    for sentence in plan.advice:
        _line(console, f"- {sentence}")
