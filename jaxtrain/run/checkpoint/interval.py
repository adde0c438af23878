"""Checkpoint intervals under failures in closed form: Young, Daly, ETTR, and the best one in steps.

Failures are a Poisson process: the time to the next one is exponential, whatever came before.
"""

import dataclasses
import math

_MOST_EXPONENT = 700.0  # of a float64


def young_interval(save_seconds: float, mtbf: float) -> float:
    """Return the seconds of work between two saves by the first-order rule sqrt(2 C M).

    Args:
      save_seconds: that a save takes from the steps, C.
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
    """Return the expected ETTR of a long job to first order: half an interval is lost a failure.

    Args:
      interval_seconds: between two checkpoints.
      restart_seconds: from a failure to the first step that is new or repeated.
      mtbf: seconds between two failures of the whole job.
      save_seconds: that a save takes from the steps.

    Returns:
      Productive time over all time; 0 where the estimate is below.

    Source: Kokolis et al. 2024, arXiv 2410.21680, section III; without time in a queue.
    """
    lost = (restart_seconds + interval_seconds / 2) / mtbf
    return max(0.0, 1 - lost) * interval_seconds / (interval_seconds + save_seconds)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What failures and saves cost a run; all in seconds.

    Attributes:
      step: of one optimizer step.
      save: that a save takes from the steps.
      write: from there until the checkpoint is complete, while steps go on.
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
        `math.inf` where a run makes no progress.
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
        # The next save waits for the write before it.
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
        """Whether a segment of `one` steps wastes less a step than one of `other`.

        Compares (e^(L / M) - 1) / n alone: the other factors are the same, and may be infinite.
        """

        def waste(steps: int) -> float:
            exponent = (steps * self.step + self.save) / self.mtbf
            return math.inf if exponent > _MOST_EXPONENT else math.expm1(exponent) / steps

        return waste(one) < waste(other)
