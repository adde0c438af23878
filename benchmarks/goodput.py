"""Holds planned goodput against published runs: `python -m benchmarks.goodput`.

Each row of `published_goodput.csv` is a run whose useful part of the time was published. What its
source says of failures, saves and recoveries is given to the model; what it does not say has the
values of `jaxtrain plan --goodput`. One number is fitted, the hours of a restart by hand, on the
rows that say so; the others are held out. No accelerator is needed.
"""

import csv
import dataclasses
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.goodput.recovery import (
    BY_HAND_SECONDS,
    COMPILE_SECONDS,
    HOST_BANDWIDTH,
    REPLACE_SECONDS,
    SAVE_SECONDS,
    START_SECONDS,
    STORAGE_BANDWIDTH,
    seconds_to_notice,
)
from jaxtrain.run.checkpoint.save_schedule import DEFAULT_MTBF_HOURS, Costs
from jaxtrain.training.settings import Timeouts

FILE = Path(__file__).parent / "published_goodput.csv"
STEP_SECONDS = 10.0  # of a step where none is published: it only rounds the interval
STATE_BYTES = 14  # of a parameter: bfloat16 weights, float32 masters and two moments
DEVICES_PER_HOST = 8
_LONG = 10**7  # steps of a run so long that its start does not count


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      name: of the run.
      devices: that ran it together.
      published: useful time over all time.
      bound: 'equal', or 'at least' where a lower bound was published.
      mtbf_hours: device-hours per interruption.
      interval: seconds between two saves; None: the best.
      recovery: seconds of one; None: as of a plan.
      parameters: of the model.
      by_hand: whether people restarted it.
      role: 'fitted', 'used', 'held out' or 'another model'.
      source: where it was published.
    """

    name: str
    devices: int
    published: float
    bound: str
    mtbf_hours: float
    interval: float | None
    recovery: float | None
    parameters: float
    by_hand: bool
    role: str
    source: str

    def costs(self, by_hand_seconds: float = BY_HAND_SECONDS) -> Costs:
        """Return the costs of the run, with so long a restart by hand."""
        on_device = self.parameters * STATE_BYTES / self.devices
        storage = STORAGE_BANDWIDTH / DEVICES_PER_HOST
        recovery = self.recovery
        if recovery is None:
            replace = by_hand_seconds if self.by_hand else REPLACE_SECONDS
            notice = seconds_to_notice(Timeouts(), STEP_SECONDS)
            recovery = notice + replace + START_SECONDS + COMPILE_SECONDS + on_device / storage
        saves = SAVE_SECONDS + on_device / HOST_BANDWIDTH if self.parameters else 0.0
        mtbf = self.mtbf_hours * 3600 / self.devices
        return Costs(
            step=STEP_SECONDS, save=saves, write=on_device / storage, recovery=recovery, mtbf=mtbf
        )

    def predicted(self, by_hand_seconds: float = BY_HAND_SECONDS) -> float:
        """Return the useful part of the time that a plan predicts."""
        costs = self.costs(by_hand_seconds)
        if self.interval is None:
            return costs.fraction(costs.best_interval(_LONG))
        return costs.fraction(round(self.interval / STEP_SECONDS))


def read_runs() -> list[Run]:
    """Return the published runs, in the order of the file."""
    with FILE.open(newline="") as file:
        return [
            Run(
                name=row["run"],
                devices=int(row["devices"]),
                published=float(row["published"]),
                bound=row["bound"],
                mtbf_hours=24_000 / float(row["rate"]) if row["rate"] else DEFAULT_MTBF_HOURS,
                interval=60 * float(row["interval_minutes"]) if row["interval_minutes"] else None,
                recovery=60 * float(row["recovery_minutes"]) if row["recovery_minutes"] else None,
                parameters=float(row["parameters"]),
                by_hand=row["restarts"] == "by hand",
                role=row["role"],
                source=row["source"],
            )
            for row in csv.DictReader(file)
        ]


def fit_by_hand(runs: list[Run]) -> float:
    """Return the hours of a restart by hand with the least squared error of the fitted runs."""
    fitted = [run for run in runs if run.role == "fitted"]

    def error(hours: float) -> float:
        return sum((run.predicted(hours * 3600) - run.published) ** 2 for run in fitted)

    return min((tenth / 10 for tenth in range(1, 240)), key=error)


def main() -> None:
    """Print every run with its error, and the fit."""
    console, runs = Console(width=150), read_runs()
    table = Table(title="Goodput, predicted and published", title_justify="left")
    for name in ("run", "devices", "published", "predicted", "points", "lost", "role", "source"):
        table.add_column(name, justify="right" if name in ("devices", "points") else "left")
    for run in runs:
        found = run.predicted()
        at_least = run.bound == "at least"
        points = 100 * (found - run.published)
        inside = at_least and found >= run.published
        table.add_row(
            run.name,
            f"{run.devices:,}",
            f"{'>= ' if at_least else ''}{run.published:.1%}",
            f"{found:.1%}",
            "inside" if inside else f"{points:+.1f}",
            f"{(1 - found) / (1 - run.published):.2f} x",
            run.role,
            run.source,
        )
    console.print(table)
    equal = [run for run in runs if run.role == "held out" and run.bound == "equal"]
    errors = sorted(abs(run.predicted() - run.published) * 100 for run in equal)
    bounds = [run for run in runs if run.bound == "at least"]
    kept = sum(run.predicted() >= run.published for run in bounds)
    console.print(
        f"Held out: median error {errors[len(errors) // 2]:.1f} points, largest {errors[-1]:.1f}; "
        f"{kept} of {len(bounds)} lower bounds kept"
    )
    for run in (run for run in runs if run.role == "fitted"):
        alone = fit_by_hand([run])
        console.print(f"Restart by hand, from {run.name} alone: {alone:.1f} hours")
    console.print(
        f"Restart by hand, fitted: {fit_by_hand(runs):.1f} hours; "
        f"the plan has {BY_HAND_SECONDS / 3600:.1f}"
    )


if __name__ == "__main__":
    main()
