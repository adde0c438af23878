"""When a run saves: `Train.save_every` as a number of steps, or 'auto' by the rate of failures.

Published failure rates of accelerators give an MTBF; the interval follows from it in closed form
(Young, Daly, ETTR). Failures are a Poisson process: the time to the next one is exponential,
whatever came before.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxtrain.run.phases import IDLE, Phases

_HOURS = 24 * 1000  # device-hours of 1,000 device-days


@dataclasses.dataclass(frozen=True)
class FailureRate:
    """One published failure rate.

    Attributes:
      name: of the run or the cluster.
      devices: the unit of a device there.
      per_1000_device_days: interruptions of a job per 1,000 device-days.
      counted: how the figure follows from what was published.
      source: where it was published.
    """

    name: str
    devices: str
    per_1000_device_days: float
    counted: str
    source: str

    @property
    def mtbf_hours(self) -> float:
        """Device-hours per interruption."""
        return _HOURS / self.per_1000_device_days


FAILURE_RATES = (
    FailureRate(
        "Llama 3 405B", "H100", 419 / (16_384 * 54) * 1000,
        "419 unexpected interruptions, 16,384 GPUs, 54 days", "arXiv 2407.21783, section 3.3.4",
    ),
    FailureRate(
        "Meta RSC-1", "A100", 6.50 / 8,
        "6.50 failures per 1,000 node-days, 8 GPUs a node", "arXiv 2410.21680 (Kokolis et al.)",
    ),
    FailureRate(
        "Meta RSC-2", "A100", 2.34 / 8,
        "2.34 failures per 1,000 node-days, 8 GPUs a node", "arXiv 2410.21680 (Kokolis et al.)",
    ),
    FailureRate(
        "OPT-175B", "A100", 105 / (992 * 60) * 1000,
        "35 manual and 70 automatic restarts, 992 GPUs, 2 months", "arXiv 2205.01068, section 2.5",
    ),
    FailureRate(
        "BLOOM", "A100", 1.5 / 7 / 384 * 1000,
        "1 to 2 GPU failures a week, 384 GPUs", "arXiv 2211.05100, section 3.4",
    ),
    FailureRate(
        "MPT-7B", "A100", 4 / (440 * 9.5) * 1000,
        "4 hardware failures, 440 GPUs, 9.5 days", "mosaicml.com/blog/mpt-7b",
    ),
    FailureRate(
        "MegaScale", "A100", 100 / (12_288 * 28) * 1000,
        "100 restarts, 12,288 GPUs, \"several weeks\": 4 assumed", "arXiv 2402.15627, section 6.3",
    ),
    FailureRate(
        "Alibaba, June 2023", "H800", 40 / (4_096 * 30) * 1000,
        "40 crashes of a job in a month, 4,096 GPUs", "arXiv 2406.04594 (C4)",
    ),
    FailureRate(
        "Google TPU v4", "TPU v4", 0.0008 / 4 * 1000,
        "0.08% of the machines a day, 4 chips each; only hardware failures",
        "Zu et al., NSDI 2024",
    ),
)  # fmt: skip

# Default device-hours per interruption: the median of the table. Chips have no
# rates of their own: rows of one chip differ by more than chips do, and those that count software
# and maintenance differ most from those that do not.
DEFAULT_MTBF_HOURS = statistics.median(rate.mtbf_hours for rate in FAILURE_RATES)


_MOST_EXPONENT = 700.0  # of a float64


def young_interval(save_seconds: float, mtbf: float) -> float:
    """Return the seconds of work between two saves by the first-order rule sqrt(2 C M).

    Args:
      save_seconds: time that a save takes from the steps, C.
      mtbf: seconds between two failures of the whole job, M.

    Source: Young, "A first order approximation to the optimum checkpoint interval", CACM 1974.
    """
    return math.sqrt(2 * save_seconds * mtbf)


def daly_interval(save_seconds: float, mtbf: float) -> float:
    """Return the seconds of work between two saves by Daly's higher-order estimate.

    Args:
      save_seconds, mtbf: as of `young_interval`.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    FGCS 2006, equation 37.
    """
    if save_seconds >= 2 * mtbf:
        return mtbf
    part = save_seconds / (2 * mtbf)
    return math.sqrt(2 * save_seconds * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - save_seconds


def effective_training_time_ratio(
    interval_seconds: float, restart_seconds: float, mtbf: float, *, save_seconds: float = 0.0
) -> float:
    """Return the expected ETTR of a long job to first order: half an interval is lost per failure.

    Args:
      interval_seconds: between two checkpoints.
      restart_seconds: from a failure to the first step that is new or repeated.
      mtbf: seconds between two failures of the whole job.
      save_seconds: time that a save takes from the steps.

    Returns:
      Productive time over all time; 0 where the estimate is below.

    Source: Kokolis et al. 2024, arXiv 2410.21680, section III; without time in a queue.
    """
    lost = (restart_seconds + interval_seconds / 2) / mtbf
    return max(0.0, 1 - lost) * interval_seconds / (interval_seconds + save_seconds)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of failures and saves to a run; all in seconds.

    Attributes:
      step: of one optimizer step.
      save: time that a save takes from the steps.
      write: from there until the checkpoint is complete, while steps continue.
      recovery: from a failure to the first step after it.
      mtbf: between two failures of the whole job.
      startup: before the first step of the first attempt.
    """

    step: float
    save: float
    write: float
    recovery: float
    mtbf: float
    startup: float = 0.0

    def segment_seconds(self, steps: int) -> float:
        """Return the expected seconds for `steps` steps and their save, failures included.

        Exact for Poisson failures, also during recovery: M e^((R + w) / M) (e^((n s + C) / M) - 1),
        Daly 2006 equation 20 with the write w, in which a failure costs the interval before too.
        `math.inf` if a run makes no progress.
        """
        length = steps * self.step + self.save
        exponent = (self.recovery + self.write) / self.mtbf
        if exponent + length / self.mtbf > _MOST_EXPONENT:
            return math.inf
        return self.mtbf * math.exp(exponent) * math.expm1(length / self.mtbf)

    def fraction(self, save_every: int) -> float:
        """Return productive time over all time of a run without end."""
        return save_every * self.step / self.segment_seconds(save_every)

    def run_seconds(self, steps: int, save_every: int) -> float:
        """Return the expected seconds of a whole run, its end saved.

        Args:
          steps: of the run.
          save_every: steps between two saves.
        """
        segments, rest = divmod(steps, save_every)
        seconds = segments * self.segment_seconds(save_every) if segments else 0.0
        return self.startup + seconds + (self.segment_seconds(rest) if rest else 0.0) + self.write

    def best_interval(self, steps: int) -> int:
        """Return the steps between two saves with which the expected time is least.

        Args:
          steps: of the run: no interval is longer, as the end is saved.
        """
        # The next save waits for the previous write.
        least = min(steps, max(1, math.ceil((self.write - self.save) / self.step)))
        low, high = least, steps
        while low < high:  # `fraction` has one maximum
            middle = (low + high) // 2
            if self._is_better(middle + 1, middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_better(self, one: int, other: int) -> bool:
        """Whether a segment of `one` steps wastes less per step than one of `other`.

        Compares (e^(L / M) - 1) / n alone: the other factors are the same, and may be infinite.
        """

        def waste(steps: int) -> float:
            exponent = (steps * self.step + self.save) / self.mtbf
            return math.inf if exponent > _MOST_EXPONENT else math.expm1(exponent) / steps

        return waste(one) < waste(other)


# Steps of an attempt before its first save, which measures what a save costs: caches are then warm.
FIRST_STEPS = 20
# A new interval within this part of the current one changes nothing: near the best interval the
# time lost is flat (10% off the optimum costs 0.5% more), and a run should not report noise.
_CHANGE = 0.2
_RECENT = 5  # number of recent saves that are measured

Agree = Callable[[Sequence[float]], Sequence[float]]


class SaveSchedule(Protocol):
    """Interface: which steps are followed by a save."""

    def resume(self, step: int) -> None:
        """Start at a step: of an attempt, or after a rewind."""
        ...

    def is_due(self, step: int) -> bool:
        """Whether a save follows this step; equal on all processes."""
        ...

    def record(self, step: int, save_seconds: float, *, waited_seconds: float) -> None:
        """Take note of a save; all processes call it at the same step.

        Args:
          step: the saved step.
          save_seconds: time that the save took from the steps, in this process.
          waited_seconds: for steps that were in flight when the save was due.
        """
        ...


class FixedInterval(SaveSchedule):
    """A save at every multiple of a number of steps."""

    def __init__(self, period: int) -> None:
        """Save every `period` steps; 0 is never."""
        self._period = period

    def resume(self, step: int) -> None:
        pass

    def is_due(self, step: int) -> bool:
        return self._period > 0 and step % self._period == 0

    def record(self, step: int, save_seconds: float, *, waited_seconds: float) -> None:
        pass


class AutomaticInterval(SaveSchedule):
    """The optimal interval, from measured saves and steps and a failure rate.

    The first save of an attempt follows `FIRST_STEPS` steps. At each save all processes agree on
    the slowest one's figures, so that all save at the same steps.

    Attributes:
      interval: steps between two saves; None before the first save of an attempt.
    """

    def __init__(
        self,
        *,
        mtbf: float,
        steps: int,
        phases: Phases,
        agree: Agree,
        report: Callable[[str], None],
    ) -> None:
        """Measure at the first save.

        Args:
          mtbf: seconds between two failures of the whole job.
          steps: of the run: no interval is longer.
          phases: where the time of this process goes.
          agree: returns the maximum over processes of each value.
          report: called with each line to print.
        """
        self._mtbf, self._steps = mtbf, steps
        self._phases, self._agree, self._report = phases, agree, report
        self.interval: int | None = None
        self._save_costs: list[float] = []
        self.resume(0)

    def resume(self, step: int) -> None:
        self._last, self._timed = step, self._seconds_of_steps()

    def is_due(self, step: int) -> bool:
        return step - self._last >= (FIRST_STEPS if self.interval is None else self.interval)

    def record(self, step: int, save_seconds: float, *, waited_seconds: float) -> None:
        done, now = step - self._last, self._seconds_of_steps()
        each = (now - self._timed + waited_seconds) / done if done else 0.0
        self._last, self._timed = step, now
        each, cost = self._agree([each, save_seconds])
        # The first save of a process also sets up threads and compiles fingerprints.
        self._save_costs = [*self._save_costs, cost][-_RECENT:]
        if each <= 0:
            return  # saved twice at one step
        cost = statistics.median(self._save_costs[1:] or self._save_costs)
        costs = Costs(step=each, save=cost, write=0.0, recovery=0.0, mtbf=self._mtbf)
        best = costs.best_interval(self._steps)
        if self.interval is not None and abs(best - self.interval) <= _CHANGE * self.interval:
            return
        self.interval = best
        self._report(
            f"Train.save_every='auto': a save every {best:,} steps ({_human(best * each)}) from "
            f"step {step} on. A save takes {_human(cost)}, a step {_human(each)}, and one failure "
            f"is expected every {_human(self._mtbf)} (Checkpoint.mtbf)"
        )

    def _seconds_of_steps(self) -> float:
        """Return the time of all steps so far: without saves, evaluations, compilation and
        start."""
        seconds = self._phases.seconds
        return sum(seconds.get(name, 0.0) for name in ("step", "data", IDLE))


def _human(seconds: float) -> str:
    for size, name in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
