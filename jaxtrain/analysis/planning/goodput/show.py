"""Tables and sentences on a run's planned goodput, for the terminal."""

from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.goodput.goodput import Change, Goodput
from jaxtrain.config.errors import count_of
from jaxtrain.run.checkpoint.save_schedule import FAILURE_RATES
from jaxtrain.run.show.progress import human_seconds, print_lines
from jaxtrain.run.show.report import human_bytes

_DAY = 86_400.0
_CAUSES = {
    "saves": "saves",
    "repeated steps": "steps repeated after a failure",
    "notice": "noticing a failure",
    "replace": "replacing a host",
    "start": "starting processes",
    "compile": "compiling",
    "restore": "reading the checkpoint",
    "first start": "the first start",
}


def show_line(console: Console, goodput: Goodput) -> None:
    """Print one line, for a plan without `--goodput`."""
    if not goodput.progresses:
        print_lines(console, _stuck(goodput))
        return
    low, high = goodput.bounds
    given = goodput.reliability.mtbf is not None
    rates = "the rate of Checkpoint.mtbf" if given else "the published failure rates"
    print_lines(
        console,
        f"Goodput: about {goodput.fraction:.1%} ({low:.1%} to {high:.1%}) of "
        f"{_days(goodput.days(goodput.fraction))} with a save every "
        f"{count_of(goodput.save_every, 'step')}, at {rates}; "
        "plan --goodput shows more",
    )


def show(console: Console, goodput: Goodput) -> None:
    """Print the section of `plan --goodput`."""
    _rates(console, goodput)
    if not goodput.progresses:
        print_lines(console, _stuck(goodput))
        return
    low, high = goodput.bounds
    interruptions, simulated = goodput.interruptions, goodput.simulated_fraction
    interval = human_seconds(goodput.save_every * goodput.step_seconds)
    print_lines(
        console,
        f"Goodput {goodput.fraction:.1%} ({low:.1%} to {high:.1%}; simulated {simulated:.1%}): "
        f"{_days(goodput.days(goodput.fraction))} ({_days(goodput.days(high))} to "
        f"{_days(goodput.days(low))}), {interruptions:,.3g} interruptions",
    )
    if goodput.price is not None:
        dollars = [goodput.dollars(one) or 0.0 for one in (goodput.fraction, high, low)]
        print_lines(console, f"Cost: ${dollars[0]:,.0f} (${dollars[1]:,.0f} to ${dollars[2]:,.0f})")
    print_lines(console, f"Best Train.save_every: {goodput.save_every:,} ({interval})")
    configured = goodput.configured_fraction
    if goodput.configured is None:
        print_lines(console, "Train.save_every='auto' chooses it from measured times")
    if configured is not None:
        every = goodput.configured or "0, the end alone"
        print_lines(console, f"With Train.save_every={every} as configured: {configured:.1%}")
    saved = goodput.saving
    print_lines(
        console,
        f"A checkpoint of {human_bytes(saved.state_bytes)} takes "
        f"{human_seconds(saved.step_seconds)} from the steps, is complete "
        f"{human_seconds(saved.write_seconds)} later and restored in "
        f"{human_seconds(saved.restore_seconds)} "
        f"({goodput.reliability.bandwidth / 1e9:g} GB/s of each host)",
    )
    _losses(console, goodput)
    _changes(console, goodput)
    if goodput.reliability.mtbf is None:
        print_lines(console, "10% of the runs are below and above, each at a rate of the table.")
    else:
        print_lines(console, "10% of the runs are below and above, at the given rate.")


def _rates(console: Console, goodput: Goodput) -> None:
    if goodput.reliability.mtbf is None:
        table = Table(title="Published failure rates", title_justify="left")
        table.add_column("run or cluster")
        table.add_column("device")
        table.add_column("per 1,000 device-days", justify="right")
        table.add_column("device-hours", justify="right")
        table.add_column("counted", overflow="fold")
        table.add_column("source", overflow="fold")
        for rate in FAILURE_RATES:
            table.add_row(
                rate.name, rate.devices, f"{rate.per_1000_device_days:.2f}",
                f"{rate.mtbf_hours:,.0f}", rate.counted, rate.source,
            )  # fmt: skip
        console.print(table)
    hours = goodput.reliability.mtbf_hours
    which = "the median of the table" if goodput.reliability.mtbf is None else "as given"
    print_lines(
        console,
        f"One interruption in {hours:,.0f} device-hours ({which}): one every "
        f"{human_seconds(goodput.mtbf)} on {goodput.devices:,} devices",
    )


def _losses(console: Console, goodput: Goodput) -> None:
    table = Table(title="Where the rest of the time goes", title_justify="left")
    table.add_column("cause")
    table.add_column("each", justify="right")
    table.add_column("share of run time", justify="right")
    saved = goodput.saving
    each = {
        "saves": saved.step_seconds,
        "repeated steps": goodput.save_every * goodput.step_seconds / 2 + saved.write_seconds,
        "first start": goodput.costs().startup,
        **vars(goodput.recovery),
    }
    for name, part in goodput.losses.items():
        table.add_row(_CAUSES[name], human_seconds(each[name]), f"{part:.2%}")
    console.print(table)


def _changes(console: Console, goodput: Goodput) -> None:
    table = Table(title="What would help", title_justify="left")
    table.add_column("change")
    for name in ("goodput", "save_every", "days", "gained"):
        table.add_column(name, justify="right")
    if goodput.price is not None:
        table.add_column("dollars", justify="right")
    fraction, days = goodput.fraction, goodput.days(goodput.fraction)
    for one in (Change("as planned", fraction, goodput.save_every, days), *goodput.changes):
        cells = [f"{one.fraction:.1%}", f"{one.save_every:,}"]
        if one.days is None or days is None:
            cells += ["no end"] + ["-"] * (1 + (goodput.price is not None))
        else:
            gained = days - one.days
            cells += [f"{one.days:.4g}", f"{gained:+.3g}"]
            if goodput.price is not None:
                cells.append(f"{gained * 24 * goodput.devices * goodput.price:+,.0f}")
        table.add_row(one.name, *cells)
    console.print(table)


def _days(days: float | None) -> str:
    return "no end" if days is None else human_seconds(days * _DAY)


def _stuck(goodput: Goodput) -> str:
    return (
        "Goodput 0%: the run makes almost no progress. A failure every "
        f"{human_seconds(goodput.mtbf)} leaves no time for a recovery of "
        f"{human_seconds(goodput.recovery.seconds)} and the steps until a save: use fewer "
        "devices, or restart and save faster"
    )
