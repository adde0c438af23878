"""When a run saves checkpoints: `Train.save_every` as a number of steps, or 'auto'."""

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxtrain.run.attempts.phases import IDLE, Phases

# Steps of an attempt before its first save, which measures what a save costs: caches are then warm.
FIRST_STEPS = 20
# A new interval within this part of the current one changes nothing: near the best interval the
# time lost is flat (10 % beside it cost 0.5 % more), and a run should not report noise.
_CHANGE = 0.2
_RECENT = 5  # saves whose cost counts

Agree = Callable[[Sequence[float]], Sequence[float]]


class SaveSchedule(Protocol):
    """Which steps are followed by a save."""

    def resume(self, step: int) -> None:
        """Start at a step: of an attempt, or after a rewind."""
        ...

    def is_due(self, step: int) -> bool:
        """Whether a save follows this step; alike on all processes."""
        ...

    def record(self, step: int, save_seconds: float, *, waited_seconds: float) -> None:
        """Take note of a save; all processes call it at the same step.

        Args:
          step: that was saved.
          save_seconds: that the save took from the steps, in this process.
          waited_seconds: for steps that were under way when the save was due.
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
    """The interval with the least time lost, from measured saves and steps and a failure rate.

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
        say: Callable[[str], None],
    ) -> None:
        """Measure at the first save.

        Args:
          mtbf: seconds between two failures of the whole job.
          steps: of the run: no interval is longer.
          phases: where the time of this process goes.
          agree: returns the largest of every process's value, for each of the values.
          say: takes a line for people.
        """
        self._mtbf, self._steps = mtbf, steps
        self._phases, self._agree, self._say = phases, agree, say
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
        # Imported here: most runs name their interval.
        from jaxtrain.run.checkpoint.interval import Costs

        costs = Costs(step=each, save=cost, write=0.0, recovery=0.0, mtbf=self._mtbf)
        best = costs.best_interval(self._steps)
        if self.interval is not None and abs(best - self.interval) <= _CHANGE * self.interval:
            return
        self.interval = best
        self._say(
            f"Train.save_every='auto': a save every {best:,} steps ({_human(best * each)}) from "
            f"step {step} on. A save takes {_human(cost)}, a step {_human(each)}, and one failure "
            f"is expected every {_human(self._mtbf)} (Checkpoint.mtbf)"
        )

    def _seconds_of_steps(self) -> float:
        """Own time of all steps so far: no save, evaluation, compilation or start."""
        seconds = self._phases.seconds
        return sum(seconds.get(name, 0.0) for name in ("step", "data", IDLE))


def _human(seconds: float) -> str:
    for size, name in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
