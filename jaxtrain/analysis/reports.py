"""HTML reports of `jaxtrain plan --html` and `jaxtrain verify --html`."""

from collections.abc import Sequence

from jaxtrain.analysis.planning import show, side_by_side
from jaxtrain.analysis.planning.result import Plan
from jaxtrain.analysis.planning.side_by_side import Entry
from jaxtrain.analysis.planning.timing.timing import StepTime
from jaxtrain.analysis.verify.verify import Report, proof_table, show_end, show_small
from jaxtrain.config.writer import changes
from jaxtrain.run.show import html_charts
from jaxtrain.run.show.html_page import (
    Html,
    Recorder,
    Tile,
    details,
    document,
    element,
    join,
    sections,
    settings,
    tiles,
    verdict,
)
from jaxtrain.run.show.progress import human_seconds, print_lines
from jaxtrain.run.show.report import format_mesh, human_bytes
from jaxtrain.training.settings import Config

# -- plan: key figures, charts, and the tables of the terminal -------------------------------------

_READS_PLAN = (
    "Memory and traffic are those of one device, in binary units (1 GiB is 2^30 bytes). Times are "
    "predictions. The error bar is the distance from the prediction within which two of three "
    "measured runs lie."
)
_DAY = 86_400.0


def plan_page(plan: Plan, name: str, words: Sequence[str] = ()) -> bytes:
    """Return the HTML page of one plan.

    Args:
      plan: the plan.
      name: the name of the configuration.
      words: the arguments of the command line.
    """
    body = _plan_section(plan)
    return document(f"{name} on {plan.target.name}", body, words=words, reads=_READS_PLAN)


def plans_page(entries: Sequence[Entry], name: str, words: Sequence[str] = ()) -> bytes:
    """Return the HTML page of several plans: a comparison, then each plan in a collapsed section.

    Args:
      entries: the plans, including those that cannot run.
      name: the name of the configuration.
      words: the arguments of the command line.
    """
    recorder = Recorder()
    side_by_side.show(recorder, entries)
    made = [(entry.name, entry.plan) for entry in entries if entry.plan is not None]
    each = (details(entry, _plan_section(plan, level="h2")) for entry, plan in made)
    title = f"{name}: {len(entries)} plans side by side"
    body = join(sections(recorder.blocks), _compare(made), *each)
    return document(title, body, words=words, reads=_READS_PLAN)


def _plan_section(plan: Plan, level: str = "") -> Html:
    """Return the section of one plan, without the title of the page."""
    recorder = Recorder()
    print_lines(recorder, *plan.config.notes)
    show.show(recorder, plan)
    # The lines before the first table summarize the plan and whether it fits.
    first = next((i for i, one in enumerate(recorder.blocks) if not isinstance(one, str)), 0)
    mesh = format_mesh(plan.layout.mesh.shape)
    text = plan.verdict.capitalize()
    source = "estimated by closed forms, nothing was compiled"
    if plan.compiled is not None:
        source = "compiled for this machine, without it"
    return join(
        element("p", f"{plan.devices} {plan.target.chip.kind} devices, {mesh}; {source}."),
        verdict(text, "good" if plan.fits else "bad"),
        tiles(_figures(plan)),
        element("div", *_charts(plan), class_="charts"),
        element(level or "h2", "In words and tables"),
        sections(recorder.blocks[:first]),
        sections(recorder.blocks[first:]),
        settings(changes(plan.config)),
    )


def _figures(plan: Plan) -> list[Tile | None]:
    """Return tiles of the key figures, except unknown ones."""
    time, run, capacity = plan.time, plan.whole_run, plan.target.chip.hbm_bytes
    of = "" if capacity is None else f"of {human_bytes(capacity)}"
    found: list[Tile | None] = [Tile("Memory of a device", plan.total, human_bytes(plan.total), of)]
    if time.seconds is not None:
        around = f"± {time.error_bar:.0%}" if time.error_bar else ""
        found.append(Tile("One step", time.seconds, human_seconds(time.seconds), around))
    if time.mfu is not None:
        note = f"{time.tflops or 0:.0f} TFLOP/s a device"
        found.append(Tile("MFU", time.mfu, f"{time.mfu:.1%}", note))
    rate, unit = plan.tokens_per_second, plan.config.train.model.inputs
    if rate is not None:
        found.append(Tile(f"{unit.capitalize()} per second and device", rate, f"{rate:,.0f}"))
    if run is None:
        return found
    steps = f"{run.steps:,} steps"
    seconds = run.days * _DAY
    found.append(Tile("The whole run", seconds, human_seconds(seconds), steps))
    found.append(Tile("Device-hours", run.device_hours, f"{run.device_hours:,.4g}"))
    if run.dollars is not None:
        note = "" if plan.price is None else f"at ${plan.price:,g} a device-hour"
        found.append(Tile("Cost", run.dollars, f"${run.dollars:,.0f}", note))
    if run.kilowatt_hours is not None:
        note = f"at most, {plan.target.chip.watts:g} W a device"
        found.append(Tile("Energy", run.kilowatt_hours, f"{run.kilowatt_hours:,.4g} kWh", note))
    return [*found, *_with_failures(plan)]


def _with_failures(plan: Plan) -> list[Tile]:
    """Return tiles of goodput and the run's total with failures; empty if not planned."""
    goodput = plan.goodput
    if goodput is None:
        return []
    fraction = goodput.fraction
    found = [Tile("Goodput", fraction, f"{fraction:.1%}", "useful time of all time")]
    days, dollars = goodput.days(fraction), goodput.dollars(fraction)
    if days is not None:
        cost = "" if dollars is None else f"for ${dollars:,.0f}"
        seconds = days * _DAY
        found.append(Tile("The run with failures", seconds, human_seconds(seconds), cost))
    return found


def _charts(plan: Plan) -> list[Html]:
    """Return the charts of `--png`: memory against capacity, step time, traffic by mesh axis."""
    capacity, bars = plan.target.chip.hbm_bytes, {"closed forms": show.memory_parts(plan)}
    if plan.compiled is not None:
        bars["compiled"] = show.compiled_parts(plan.compiled)
    limits = {}
    if capacity is not None:
        limits = dict.fromkeys(bars, float(capacity))
    found = [
        html_charts.stacked_bars(
            "Memory of one device, of its capacity", bars, human_bytes, limits=limits
        )
    ]
    if plan.time.seconds is not None:
        closed = plan.time.estimate
        times = (
            {"step": plan.time}
            if closed is None
            else {"schedule": plan.time, "closed forms": closed}
        )
        found.append(
            html_charts.stacked_bars(
                "Time of one step, predicted",
                {name: _pieces(one) for name, one in times.items()},
                human_seconds,
            )
        )
    traffic = show.traffic_by_axis(plan)
    if traffic:
        by_axis = {f"axis {axis}": {"traffic": size} for axis, size in traffic.items()}
        found.append(
            html_charts.stacked_bars("Traffic of one device and step", by_axis, human_bytes)
        )
    return found


def _pieces(time: StepTime) -> dict[str, float]:
    return {
        "computation": time.compute or 0.0,
        "exposed communication": time.exposed or 0.0,
        "pipeline bubble": time.bubble or 0.0,
    }


def _compare(made: Sequence[tuple[str, Plan]]) -> Html:
    """Return bar charts of the memory, days, and cost or device-hours of every plan."""
    memory = {name: {"memory": plan.total} for name, plan in made}
    limits = {
        name: float(plan.target.chip.hbm_bytes)
        for name, plan in made
        if plan.target.chip.hbm_bytes is not None
    }
    found = [
        html_charts.stacked_bars(
            "Memory of one device, of its capacity", memory, human_bytes, limits=limits
        )
    ]
    runs = {name: plan.whole_run for name, plan in made}
    known = {name: run for name, run in runs.items() if run is not None}
    if known:
        took = {name: {"time": run.days * _DAY} for name, run in known.items()}
        found.append(html_charts.stacked_bars("The whole run, predicted", took, human_seconds))
        if all(run.dollars is not None for run in known.values()):
            cost = {name: {"cost": run.dollars or 0.0} for name, run in known.items()}
            found.append(html_charts.stacked_bars("Cost", cost, "${:,.0f}".format))
        else:
            hours = {name: {"device-hours": run.device_hours} for name, run in known.items()}
            found.append(html_charts.stacked_bars("Device-hours", hours, "{:,.4g}".format))
    return element("div", *found, class_="charts") if made else Html()


# -- verify: the verdict, every proof, and the shrunk settings -------------------------------------

_READS_VERIFY = (
    "A proof runs the configuration, shrunk, on 8 simulated devices and compares it with the same "
    "training on one. It is proved if the largest difference is within the limit; a limit of 0 is "
    "bit for bit. Nothing was measured on an accelerator."
)


def verify_page(report: Report, config: Config, name: str, words: Sequence[str] = ()) -> bytes:
    """Return the HTML page of a verification.

    Args:
      report: the report with all proofs.
      config: the user's configuration, before shrinking.
      name: the name of the configuration.
      words: the arguments of the command line.
    """
    count = {"proved": 0, "FAILED": 0, "not checked": 0}
    for proof in report.proofs:
        count[proof.verdict] += 1
    found, tone = "Everything that was checked is proved", "good"
    if count["FAILED"]:
        found, tone = f"{count['FAILED']} of {len(report.proofs)} proofs failed", "bad"
    elif not count["proved"]:
        found, tone = "Nothing was checked", "unsure"
    figures = [
        Tile("Proved", count["proved"], str(count["proved"])),
        Tile("Failed", count["FAILED"], str(count["FAILED"])),
        Tile("Not checked", count["not checked"], str(count["not checked"])),
        Tile("Took", report.seconds, f"{report.seconds:.0f} s"),
    ]
    proofs, small = Recorder(), Recorder()
    proofs.print(proof_table(report.proofs))
    show_end(proofs, report)
    show_small(small, report.small)
    print_lines(small, *config.notes)
    return document(
        f"{name}: proofs",
        verdict(found, tone),
        tiles(figures),
        element("h2", "Proofs"),
        sections(proofs.blocks),
        element("h2", "What ran in its place"),
        element("p", "The configuration was shrunk to sizes that run in seconds:"),
        sections(f"- {line}" for line in small.blocks),
        settings(changes(config)),
        words=words,
        reads=_READS_VERIFY,
    )
