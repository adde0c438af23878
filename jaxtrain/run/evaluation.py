"""Evaluation over held-out batches, the best one so far, and early stopping.

The best evaluation is read from metrics.jsonl at every start, without what was written after the
checkpoint that the run resumes from: a restart and a rewind see the state at that step.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.data.batch import Batch
from jaxtrain.run.phases import Phases
from jaxtrain.training.compiled_step import RunAhead
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.settings import Best
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step


class Evaluation:
    """The compiled evaluation of a step; each target counts once, whatever its batch."""

    def __init__(
        self,
        step: Step,
        compiler_options: dict[str, str],
        phases: Phases,
    ) -> None:
        """Compiles nothing yet.

        Args:
          step: the step of the evaluated states.
          compiler_options: of XLA, by name.
          phases: of this process.
        """
        self._step, self._phases = step, phases
        self._eval_step = jax.jit(step.setup.eval_step, compiler_options=compiler_options)
        # Computed once: they trace the model, and JAX keeps a part of each trace.
        self._zeros: Sums | None = None

    def of(
        self,
        state: TrainState,
        batches: Iterable[Batch],
        *,
        step: int,
        before_each: Callable[[], None],
    ) -> dict[str, Any]:
        """`eval_loss` and the task's metrics: numbers, and lists of a confusion matrix.

        Args:
          state: the state.
          batches: batches on the devices.
          step: optimizer steps that the state has taken.
          before_each: called before every batch; its errors end the evaluation.

        Raises:
          UserError: there is no batch, or no target that counts.
        """
        return self._means(self._sums(state, batches, step, before_each))

    def of_parts(
        self,
        state: TrainState,
        parts: Iterable[tuple[str, Iterable[Batch]]],
        *,
        step: int,
        before_each: Callable[[], None],
    ) -> dict[str, Any]:
        """Return the same over several parts, and then of each alone: `eval_loss_NAME` and so on.

        Args:
          state: the state.
          parts: names, and batches on the devices.
          step: optimizer steps that the state has taken.
          before_each: called before every batch; its errors end the evaluation.

        Raises:
          UserError: a part has no batch, or none of its targets counts.
        """
        sums = {name: self._sums(state, batches, step, before_each) for name, batches in parts}
        names = next(iter(sums.values()))
        found = self._means({name: sum(of[name] for of in sums.values()) for name in names})
        for part, values in sums.items():
            found |= {f"{name}_{part}": value for name, value in self._means(values).items()}
        return found

    def names(self, state: TrainState, like: Batch) -> list[str]:
        """Return the names of the metrics of `of`, before there is a batch: `like` is the shapes of
        one."""
        with self._step.setup.layout.active():
            zeros = self._no_sums(self._step.eval_state(state), like)
        ones = {name: np.ones(x.shape) if x.ndim else 1.0 for name, x in zeros.items()}
        metrics = self._step.setup.objective.evaluation(ones)
        return [name for name, value in metrics.items() if not isinstance(value, list)]

    def _no_sums(self, state: TrainState, batch: Batch) -> Sums:
        if self._zeros is None:
            self._zeros = self._step.setup.no_sums(state, batch)
        return self._zeros

    def _sums(
        self,
        state: TrainState,
        batches: Iterable[Batch],
        step: int,
        before_each: Callable[[], None],
    ) -> dict[str, Any]:
        ahead = RunAhead()
        sums: Sums | None = None
        with self._step.setup.layout.active(), self._phases.phase("evaluation", step):
            state = self._step.eval_state(state)
            for batch in batches:
                before_each()
                is_first = sums is None
                if sums is None:
                    sums = self._no_sums(state, batch)
                with self._phases.phase("compile", step) if is_first else nullcontext():
                    sums = self._eval_step(state, batch, sums)
                    ahead.add(sums)
                    if is_first:
                        jax.block_until_ready(sums)
                self._phases.beat()
        if sums is None:
            raise UserError("Trainer.evaluate: there is no batch to evaluate; give at least one")
        return {
            name: value if value.ndim else float(value)
            for name, value in jax.device_get(sums).items()
        }

    def _means(self, sums: dict[str, Any]) -> dict[str, Any]:
        if sums["weight"] == 0:
            raise UserError(
                "Trainer.evaluate: none of the targets counts; loss_mask is 0 everywhere, and a "
                "mean needs a target whose mask is above 0"
            )
        return self._step.setup.objective.evaluation(sums)


@dataclasses.dataclass
class Record:
    """The best evaluation up to a step.

    Attributes:
      settings: the criterion.
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
        """Read the record up to a step from lines of metrics.jsonl; all processes call it.

        Process 0 decides: for a run in a bucket the others have no such file.
        """
        found = cls(settings)
        for line in lines:
            if settings.metric in line and line["step"] <= step:
                found.see(line["step"], line)
        last = found.steps[-1] if found.steps else -1
        bits = np.frombuffer(np.float64(found.value).tobytes(), np.int32)
        with jax.transfer_guard("allow"):
            encoded = multihost_utils.broadcast_one_to_all(
                np.array([last, found.since, *bits], np.int32)
            )
        last, found.since, *bits = (int(number) for number in np.asarray(encoded))
        found.value = float(np.frombuffer(np.array(bits, np.int32).tobytes(), np.float64)[0])
        if last >= 0 and last not in found.steps:
            found.steps = (last,)
        return found

    def see(self, step: int, values: Mapping[str, Any]) -> bool:
        """Whether an evaluation is better than all before it; NaN never is.

        Raises:
          UserError: it lacks the metric.
        """
        numbers = {name: x for name, x in values.items() if not isinstance(x, list)}
        validate_best(self.settings, [name for name in numbers if name.startswith("eval_")])
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


def validate_best(settings: Best, known: Sequence[str]) -> None:
    """Raise UserError if evaluations, which have these metrics, lack the compared one."""
    metric = settings.metric
    if metric is not None and metric not in known:
        raise UserError(
            f"Best.metric={metric!r}: evaluations have no such value{did_you_mean(metric, known)}"
        )
