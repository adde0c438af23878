"""`plan --goodput`: a whole run under failures, its best save interval, and possible gains."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from jaxtrain.analysis.planning.goodput.recovery import (
    BY_HAND_SECONDS,
    REPLACE_SECONDS,
    STANDBY_SECONDS,
    START_SECONDS,
    STORAGE_BANDWIDTH,
    Recovery,
    Saving,
    compile_seconds,
    saving,
    seconds_to_notice,
)
from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint.save_schedule import DEFAULT_MTBF_HOURS, FAILURE_RATES, Costs

if TYPE_CHECKING:
    from jaxtrain.analysis.planning.result import Plan


# -- Monte Carlo simulation of whole runs: each failure and restart one by one ---------------------

_RUNS = 2000
_EVENTS = 4_000_000  # at most, failures drawn over all runs: about 2 s of one core
# Runs with a smaller productive fraction count as runs that do not finish.
LEAST_FRACTION = 0.02


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Durations and failures of simulated runs of one configuration.

    Attributes:
      seconds: of each run, from its launch until its final state is saved.
      failures: number of failures of each run.
    """

    seconds: Float[np.ndarray, " runs"]
    failures: Float[np.ndarray, " runs"]


def simulate(
    costs: Costs, steps: int, save_every: int, mtbf: Float[np.ndarray, " runs"], *, seed: int = 0
) -> Simulated:
    """Simulate runs failure by failure until each is complete.

    Args:
      costs: costs of steps, saves and recovery; its own `mtbf` is not used.
      steps: number of steps of the run.
      save_every: steps between two saves.
      mtbf: seconds between two failures of the whole job, of each run.
      seed: seed of the draws.

    Returns:
      Seconds and failures of each run.
    """
    random = np.random.default_rng(seed)
    count = len(mtbf)
    seconds, failures = np.zeros(count), np.zeros(count)
    saved = np.zeros(count)  # steps in the newest complete checkpoint
    active = np.arange(count)
    segment = save_every * costs.step + costs.save
    launch = costs.startup
    while len(active):
        until_failure = random.exponential(mtbf[active])
        at_work = until_failure - launch  # below 0: it fails during recovery
        left = steps - saved[active]
        needed = left * costs.step + np.ceil(left / save_every) * costs.save + costs.write
        ends = at_work >= needed
        seconds[active] += np.where(ends, launch + needed, until_failure)
        # A checkpoint counts once it is written, which overlaps with the next steps.
        complete = np.floor((at_work - costs.write) / segment)
        saved[active] += save_every * np.maximum(complete, 0)
        failures[active] += ~ends
        active = active[~ends]
        launch = costs.recovery
    return Simulated(seconds, failures)


def number_of_runs(costs: Costs, run_seconds: float) -> int:
    """Return the number of runs to draw: fewer if each has many failures and thus less variance."""
    expected = run_seconds / costs.mtbf
    return int(min(_RUNS, max(50, _EVENTS / max(expected, 1))))


# -- goodput ---------------------------------------------------------------------------------------

# Number of devices from which a plan always shows goodput: at Llama 3's failure rate they have one
# interruption a month.
LEAST_DEVICES = 64
_DAY, _HOUR = 86_400.0, 3_600.0


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Failure rate and storage from the user; None uses the table or an assumption.

    Attributes:
      is_requested: whether to show the whole section.
      mtbf: device-hours per interruption.
      storage: GB/s at which each host reads or writes checkpoints.
      seed: seed of the simulation.
    """

    is_requested: bool = False
    mtbf: float | None = None
    storage: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, unit, example in (
            ("--mtbf", self.mtbf, "device-hours per interruption", "50000"),
            ("--storage", self.storage, "GB/s of a host", "1"),
        ):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(
                    f"{name}={value:g}; use {unit}, a finite number above 0, such as {example}"
                )

    @property
    def mtbf_hours(self) -> float:
        """Device-hours per interruption."""
        return DEFAULT_MTBF_HOURS if self.mtbf is None else self.mtbf

    @property
    def bandwidth(self) -> float:
        """Bytes/s at which each host reads or writes checkpoints."""
        return STORAGE_BANDWIDTH if self.storage is None else self.storage * 1e9


@dataclasses.dataclass(frozen=True)
class Change:
    """A change to the run, and its goodput with the best save interval after that change.

    Attributes:
      name: description of the change.
      fraction: productive time over total time; 0 if it makes next to no progress.
      save_every: steps between two saves.
      days: days of the whole run; None if it does not finish.
    """

    name: str
    fraction: float
    save_every: int
    days: float | None


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Goodput of a whole run under failures.

    Attributes:
      steps: number of steps of the run.
      devices: number of devices that run it.
      configured: Train.save_every; 0 saves only at the end, None chooses the best interval.
      price: dollars per device-hour; None if not set.
      reliability: failure rate and storage from the user.
      recovery: seconds of a failure.
      saving: costs of a checkpoint on the run's storage.
      local: costs of a checkpoint on the hosts' local disks.
      step_seconds: seconds of one optimizer step.
    """

    steps: int
    devices: int
    configured: int | None
    price: float | None
    reliability: Reliability
    recovery: Recovery
    saving: Saving
    local: Saving
    step_seconds: float

    @property
    def mtbf(self) -> float:
        """Seconds between two failures of the whole job."""
        return self.reliability.mtbf_hours * _HOUR / self.devices

    def costs(self, recovery: Recovery | None = None, saved: Saving | None = None) -> Costs:
        """Return the costs of this run, or of one with another recovery or other checkpoints."""
        recovery, saved = recovery or self.recovery, saved or self.saving
        return Costs(
            step=self.step_seconds,
            save=saved.step_seconds,
            write=saved.write_seconds,
            recovery=recovery.seconds,
            mtbf=self.mtbf,
            startup=recovery.start + recovery.compile,
        )

    @functools.cached_property
    def save_every(self) -> int:
        """Steps between two saves that minimize the duration of the run."""
        return self.costs().best_interval(self.steps)

    @property
    def useful_seconds(self) -> float:
        """Seconds of all steps, each counted once."""
        return self.steps * self.step_seconds

    def fraction_of(self, costs: Costs, save_every: int) -> float:
        """Return productive over total time, in closed form; 0 if there is next to no progress."""
        if costs.fraction(save_every) < LEAST_FRACTION:
            return 0.0
        return self.useful_seconds / costs.run_seconds(self.steps, save_every)

    @functools.cached_property
    def fraction(self) -> float:
        """Productive time over total time with the best interval, in closed form."""
        return self.fraction_of(self.costs(), self.save_every)

    @property
    def configured_fraction(self) -> float | None:
        """The same with `Train.save_every`; None if that is the best interval or not set."""
        if self.configured is None or self.configured == self.save_every:
            return None
        every = min(self.configured, self.steps) if self.configured else self.steps
        return self.fraction_of(self.costs(), every)

    @property
    def progresses(self) -> bool:
        """Whether the run can finish despite failures."""
        return self.fraction > 0

    @functools.cached_property
    def simulated(self) -> Simulated | None:
        """Simulated runs with the given failure rate; None for a run that makes no progress."""
        if not self.progresses:
            return None
        costs = self.costs()
        count = number_of_runs(costs, self.useful_seconds / self.fraction)
        rates = np.full(count, self.mtbf)
        return simulate(costs, self.steps, self.save_every, rates, seed=self.reliability.seed)

    @property
    def simulated_fraction(self) -> float | None:
        """Productive time over total time, from the mean time of the simulated runs."""
        simulated = self.simulated
        return None if simulated is None else self.useful_seconds / float(simulated.seconds.mean())

    @functools.cached_property
    def fractions(self) -> np.ndarray:
        """Productive fractions of simulated runs, from which p10 and p90 are computed.

        If no failure rate is given, each run draws one of the table's, to include its uncertainty.
        """
        if self.reliability.mtbf is not None:
            simulated = self.simulated
            return np.zeros(1) if simulated is None else self.useful_seconds / simulated.seconds
        found = []
        for number, rate in enumerate(FAILURE_RATES):
            costs = dataclasses.replace(self.costs(), mtbf=rate.mtbf_hours * _HOUR / self.devices)
            expected = self.fraction_of(costs, self.save_every)
            if not expected:
                found.append(np.zeros(1))
                continue
            count = number_of_runs(costs, self.useful_seconds / expected) // 10
            drawn = simulate(
                costs, self.steps, self.save_every, np.full(max(count, 50), costs.mtbf),
                seed=self.reliability.seed + 1 + number,
            )  # fmt: skip
            found.append(self.useful_seconds / drawn.seconds)
        # Every row of the table has the same weight, however many runs it has.
        points = np.linspace(0, 1, 201)
        return np.concatenate([np.quantile(one, points) for one in found])

    @functools.cached_property
    def bounds(self) -> tuple[float, float]:
        """The 10th and 90th percentiles of the productive fraction of simulated runs.

        If most runs have no failure, the mean may be below both: it is then the lower bound.
        """
        low, high = np.percentile(self.fractions, (10, 90))
        return min(float(low), self.fraction), max(float(high), self.fraction)

    def days(self, fraction: float) -> float | None:
        """Return the days of a run with this productive fraction; None if it does not finish."""
        return self.useful_seconds / fraction / _DAY if fraction > 0 else None

    def dollars(self, fraction: float) -> float | None:
        """Return the cost of a run with this productive fraction; None without a price or end."""
        days = self.days(fraction)
        if self.price is None or days is None:
            return None
        return days * 24 * self.devices * self.price

    @property
    def interruptions(self) -> float | None:
        """Expected failures of the whole run; None for a run that does not finish."""
        days = self.days(self.fraction)
        return None if days is None else days * _DAY / self.mtbf

    @functools.cached_property
    def losses(self) -> dict[str, float]:
        """Unproductive fractions of total time by cause; they sum to the total to first order."""
        seconds = self.useful_seconds / self.fraction if self.fraction else math.inf
        per_second = 1 / self.mtbf
        interval = self.save_every * self.step_seconds
        found = {
            "saves": self.saving.step_seconds / (interval + self.saving.step_seconds),
            "repeated steps": (interval / 2 + self.saving.write_seconds) * per_second,
            **{name: part * per_second for name, part in vars(self.recovery).items()},
            "first start": self.costs().startup / seconds,
        }
        lost, scale = 1 - self.fraction, sum(found.values())
        return {name: part * lost / scale for name, part in found.items()}

    @functools.cached_property
    def changes(self) -> list[Change]:
        """The gain of each change alone, and of the useful ones together."""
        recovery = self.recovery
        spare = dataclasses.replace(recovery, replace=0.0)
        cached = dataclasses.replace(recovery, compile=0.0)
        standby = dataclasses.replace(cached, start=STANDBY_SECONDS)
        local = dataclasses.replace(recovery, restore=self.local.restore_seconds)
        together = dataclasses.replace(standby, replace=0.0, restore=local.restore)
        by_hand = dataclasses.replace(recovery, replace=BY_HAND_SECONDS)
        return [
            self._change("a spare host or slice that is ready", spare, self.saving),
            self._change("checkpoints on each host's own disk", local, self.local),
            self._change("compiled programs in a cache of all hosts", cached, self.saving),
            self._change("and standby processes that have imported JAX", standby, self.saving),
            self._change("all of these", together, self.local),
            self._change("restarts by hand instead", by_hand, self.saving),
        ]

    def _change(self, name: str, recovery: Recovery, saved: Saving) -> Change:
        costs = self.costs(recovery, saved)
        every = costs.best_interval(self.steps)
        fraction = self.fraction_of(costs, every)
        return Change(name, fraction, every, self.days(fraction))

    def to_json(self) -> dict[str, Any]:
        """Return the `goodput` object of `plan --json`."""
        fraction = self.fraction
        low, high = self.bounds
        found: dict[str, Any] = {
            "fraction": fraction,
            "p10": low,
            "p90": high,
            "save_every": self.save_every,
            "days": self.days(fraction),
            "days_p10": self.days(high),
            "days_p90": self.days(low),
            "dollars": self.dollars(fraction),
            "dollars_p10": self.dollars(high),
            "dollars_p90": self.dollars(low),
            "interruptions": self.interruptions,
            "simulated_fraction": self.simulated_fraction,
            "configured_save_every": self.configured,
            "configured_fraction": self.configured_fraction,
            "mtbf_device_hours": self.reliability.mtbf_hours,
            "mtbf_job_seconds": self.mtbf,
            "recovery_seconds": {**vars(self.recovery), "total": self.recovery.seconds},
            "checkpoint": vars(self.saving),
            "losses": self.losses,
            "changes": [vars(one) for one in self.changes],
        }
        return found


def goodput_of(plan: "Plan", reliability: Reliability) -> Goodput | None:
    """Return the goodput of a plan's whole run; None without a predicted step time."""
    run, step = plan.whole_run, plan.time.seconds
    if run is None or step is None:
        return None
    save: Callable[..., Saving] = functools.partial(saving, plan, reliability.bandwidth)
    shared = save()
    every = plan.config.train.save_every
    return Goodput(
        steps=run.steps,
        devices=plan.devices,
        configured=every if isinstance(every, int) else None,
        price=plan.price,
        reliability=reliability,
        recovery=Recovery(
            notice=seconds_to_notice(plan.config.timeouts, step),
            replace=REPLACE_SECONDS,
            start=START_SECONDS,
            compile=compile_seconds(plan),
            restore=shared.restore_seconds,
        ),
        saving=shared,
        local=save(local=True),
        step_seconds=step,
    )
