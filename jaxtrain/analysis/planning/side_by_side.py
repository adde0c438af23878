"""Comparison of several plans: machines or layouts in one table and one figure."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.analysis.planning.result import Plan
from jaxtrain.run.show.figures import Picture
from jaxtrain.run.show.progress import human_seconds, print_lines
from jaxtrain.run.show.report import format_mesh, human_bytes

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Entry:
    """One plan of a comparison.

    Attributes:
      target: the value of --target.
      values: values of the settings that differ between the plans, as written by the user.
      plan: the plan; None if the configuration cannot run there.
      error: why it cannot.
    """

    target: str
    values: dict[str, str]
    plan: Plan | None
    error: str | None = None

    @property
    def name(self) -> str:
        """Machine and settings, such as "h100:1x8 Mesh.tensor=2"."""
        return " ".join([self.target, *(f"{name}={value}" for name, value in self.values.items())])

    def to_json(self) -> dict[str, Any]:
        """Return its object for `plan --json`."""
        content: dict[str, Any] = {"target": self.target, "values": self.values}
        if self.plan is None:
            return {**content, "refused": self.error}
        return {**content, **self.plan.to_json()}


def show(console: Console, entries: Sequence[Entry]) -> None:
    """Print one row per plan, the fastest run marked, then why the others cannot run."""
    made = [entry.plan for entry in entries if entry.plan is not None]
    table = Table(title="Plans side by side (predicted)", title_justify="left")
    table.add_column("target", no_wrap=True)
    for name in (*entries[0].values, "mesh"):
        table.add_column(name, overflow="fold")
    unit = made[0].config.train.model.inputs if made else "tokens"
    priced = any(plan.price is not None for plan in made)
    columns = ["devices", "memory", "of", "step", f"{unit}/s a device", "MFU"]
    columns += ["run", "device-hours", *(["dollars"] * priced), "kWh, at most"]
    fails = any(plan.reliability.is_requested for plan in made)
    columns += ["goodput", "days with failures"] * fails
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("")
    fastest = min(
        (plan for plan in made if plan.fits and plan.whole_run is not None),
        key=_days,
        default=None,
    )
    for entry in entries:
        plan = entry.plan
        if plan is None:
            blank = ["-"] * (1 + len(columns))
            table.add_row(entry.target, *map(escape, entry.values.values()), *blank, "refused")
            continue
        remark = "" if plan.fits else plan.verdict
        if plan is fastest and len(made) > 1:
            remark = "fastest"
        cells = [format_mesh(plan.layout.mesh.shape), *_numbers(plan, priced=priced)]
        cells += _under_failures(plan) if fails else []
        table.add_row(entry.target, *map(escape, entry.values.values()), *cells, remark)
    console.print(table)
    for entry in entries:
        if entry.error is not None:
            text = f"{entry.name}: {entry.error}"
            print_lines(console, text)


def _days(plan: Plan) -> float:
    assert plan.whole_run is not None
    return plan.whole_run.days


def _numbers(plan: Plan, *, priced: bool) -> list[str]:
    run, capacity = plan.whole_run, plan.target.chip.hbm_bytes
    cells: list[str] = [str(plan.devices), human_bytes(plan.total)]
    cells.append("-" if capacity is None else human_bytes(capacity))
    mfu = plan.time.mfu
    cells += [_seconds(plan.time.seconds), _short(plan.tokens_per_second)]
    cells.append("-" if mfu is None else f"{mfu:.1%}")
    cells.append(_seconds(None if run is None else run.days * 86_400))
    numbers = [None if run is None else run.device_hours]
    if priced:
        numbers.append(None if run is None else run.dollars)
    numbers.append(None if run is None else run.kilowatt_hours)
    return cells + [_short(number) for number in numbers]


def _under_failures(plan: Plan) -> list[str]:
    goodput = plan.goodput
    if goodput is None:
        return ["-", "-"]
    return [f"{goodput.fraction:.1%}", _short(goodput.days(goodput.fraction))]


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else human_seconds(seconds)


def _short(number: float | None) -> str:
    """Format a number with three digits, or with all digits before the decimal point."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def figure(entries: Sequence[Entry]) -> Picture:
    """Plot memory against capacity, days, and device-hours (dollars, if all have a price) as bars.

    Raises:
      ValueError: none of them has a plan.
    """
    made = [(entry.name, entry.plan) for entry in entries if entry.plan is not None]
    if not made:
        raise ValueError("there is no plan to plot")
    names = [name for name, _ in made]
    picture = Picture(11, 1.2 + 0.45 * len(made))
    memory, days, cost = picture.subplots(1, 3, sharey=True)
    bar: dict[str, Any] = {"height": 0.55, "color": "#5b9bd5"}
    memory.barh(names, [plan.total / _GIB for _, plan in made], **bar)
    for index, (_, plan) in enumerate(made):
        if plan.target.chip.hbm_bytes is not None:
            capacity = plan.target.chip.hbm_bytes / _GIB
            memory.plot([capacity, capacity], [index - 0.4, index + 0.4], color="black")
    memory.set_xlabel("GiB of a device; line: capacity")
    runs = [plan.whole_run for _, plan in made]
    days.barh(names, [0.0 if run is None else run.days for run in runs], **bar)
    days.set_xlabel("days of the run, predicted")
    if all(run is not None and run.dollars is not None for run in runs):
        cost.barh(names, [run.dollars for run in runs if run is not None], **bar)
        cost.set_xlabel("dollars")
    else:
        cost.barh(names, [0.0 if run is None else run.device_hours for run in runs], **bar)
        cost.set_xlabel("device-hours")
    for axes in (memory, days, cost):
        axes.spines[["top", "right"]].set_visible(False)
    memory.invert_yaxis()
    return picture
