"""Evaluation: loss and metrics over held-out batches."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.parallel.devices import RunAhead
from jaxtrain.run.attempts.watchdog import Phases
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step


class Evaluation:
    """The compiled evaluation of a program; each target counts once, whatever its batch."""

    def __init__(
        self,
        program: Step,
        compiler_options: dict[str, str],
        phases: Phases,
    ) -> None:
        """Compiles nothing yet.

        Args:
          program: whose states are evaluated.
          compiler_options: of XLA, by name.
          phases: what this process is doing.
        """
        self._program, self._phases = program, phases
        self._eval_step = jax.jit(program.setup.eval_step, compiler_options=compiler_options)
        # Made once: they are asked of the model, which JAX then traces, and never quite forgets.
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
          before_each: called before every batch; what it raises ends the evaluation.

        Raises:
          UserError: there is no batch, or none of their targets counts.
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
        """The same over several parts, and then of each alone: `eval_loss_NAME` and so on.

        Args:
          state: the state.
          parts: names, and batches on the devices.
          step: optimizer steps that the state has taken.
          before_each: called before every batch; what it raises ends the evaluation.

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
        with self._program.setup.layout.active():
            zeros = self._no_sums(self._program.eval_state(state), like)
        ones = {name: np.ones(x.shape) if x.ndim else 1.0 for name, x in zeros.items()}
        told = self._program.setup.objective.evaluation(ones)
        return [name for name, value in told.items() if not isinstance(value, list)]

    def _no_sums(self, state: TrainState, batch: Batch) -> Sums:
        if self._zeros is None:
            self._zeros = self._program.setup.no_sums(state, batch)
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
        with self._program.setup.layout.active(), self._phases.phase("evaluation", step):
            state = self._program.eval_state(state)
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
        return self._program.setup.objective.evaluation(sums)
