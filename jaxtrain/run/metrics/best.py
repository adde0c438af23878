"""Best evaluation so far, and early stopping.

It is read from metrics.jsonl at every start, which loses what lies past the checkpoint that a run
resumes from: so a restart, and a rewind, know what the run knew at that step.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.training.settings import Best


@dataclasses.dataclass
class Record:
    """What the evaluations up to a step have shown.

    Attributes:
      settings: which of their values counts.
      steps: of the evaluations that were better than all before, in order.
      value: of the last of them.
      since: evaluations after it.
    """

    settings: Best
    steps: tuple[int, ...] = ()
    value: float = math.nan
    since: int = 0

    @classmethod
    def of(cls, settings: Best, lines: Iterable[Mapping[str, Any]], step: int) -> Self:
        """What the lines of metrics.jsonl up to a step say; all processes ask.

        Process 0's word goes: of a run in a bucket the others have no such file.
        """
        found = cls(settings)
        for line in lines:
            if settings.metric in line and line["step"] <= step:
                found.see(line["step"], line)
        last = found.steps[-1] if found.steps else -1
        bits = np.frombuffer(np.float64(found.value).tobytes(), np.int32)
        with jax.transfer_guard("allow"):
            said = multihost_utils.broadcast_one_to_all(
                np.array([last, found.since, *bits], np.int32)
            )
        last, found.since, *bits = (int(number) for number in np.asarray(said))
        found.value = float(np.frombuffer(np.array(bits, np.int32).tobytes(), np.float64)[0])
        if last >= 0 and last not in found.steps:
            found.steps = (last,)
        return found

    def see(self, step: int, values: Mapping[str, Any]) -> bool:
        """Whether an evaluation is better than all before it; one that is no number never is.

        Raises:
          UserError: it has no such number.
        """
        numbers = {name: x for name, x in values.items() if not isinstance(x, list)}
        validate(self.settings, [name for name in numbers if name.startswith("eval_")])
        metric = self.settings.metric
        assert metric is not None, "nothing is compared"
        value = math.nan if values[metric] is None else float(values[metric])
        sign = 1 if self.settings.order == "lowest" else -1
        if not math.isfinite(value) or (self.steps and not sign * value < sign * self.value):
            self.since += 1
            return False
        self.steps, self.value, self.since = (*self.steps, step), value, 0
        return True

    @property
    def ends_run(self) -> bool:
        """Whether no better one is waited for."""
        return 0 < self.settings.patience <= self.since

    def __str__(self) -> str:
        if not self.steps:
            return f"no {self.settings.metric} was a number"
        return f"the {self.settings.order} {self.settings.metric} is {self.value:.6g}, of step " + (
            f"{self.steps[-1]}, whose checkpoint is kept"
        )


def validate(settings: Best, known: Sequence[str]) -> None:
    """Raises UserError where evaluations, which tell these, do not tell what is compared."""
    metric = settings.metric
    if metric is not None and metric not in known:
        raise UserError(
            f"Best.metric={metric!r}: evaluations have no such value{did_you_mean(metric, known)}"
        )
