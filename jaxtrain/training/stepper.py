"""Execution of steps on a flat state."""

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.parallel.devices import RunAhead
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.corruption import Corruption, compare_replicas, replay_step
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.step import TrainState


class Stepper:
    """A compiled train step, and the arrays of the state it steps on.

    Attributes:
      train_step: arrays, batch -> arrays, metrics; takes the arrays away from its caller. To be
        called with the layout active.
    """

    def __init__(self, step: CompiledStep, state: TrainState, corruption: Corruption) -> None:
        """Compiles nothing yet.

        Args:
          step: what it takes.
          state: the state before the first step; the stepper's from now on.
          corruption: how often `step_and_check` looks for it.
        """
        self._step, self._corruption = step, corruption
        self._arrays = jax.tree.leaves(state)
        self._ahead = RunAhead()
        self.train_step: Callable[..., Any] = step.on_arrays

    @property
    def state(self) -> TrainState:
        """The current state; the next step takes its arrays away."""
        return self._step.state_of(self._arrays)

    @state.setter
    def state(self, state: TrainState) -> None:
        arrays, structure = jax.tree.flatten(state)
        if structure != self._step.structure:
            raise UserError(
                "Trainer.state is set to a state of another structure than this run's; use one "
                "that this trainer gave, with other values in its arrays"
            )
        self._arrays = arrays

    def step(self, batch: Batch) -> Sums:
        """One optimizer step on a global batch on the devices; metrics on the devices."""
        self._arrays, metrics = self.train_step(self._arrays, batch)
        self._ahead.add(metrics["loss"])
        return metrics

    def step_and_check(self, batch: Batch, step: int) -> Sums:
        """Step `step` of a run: where it is due, checked for silent corruption.

        Raises:
          CorruptionError: devices disagree about what they should hold alike.
        """
        replay, compare = self._corruption.replay_every, self._corruption.compare_replicas_every
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            replays = replay > 0 and step % replay == 0
            metrics = self._replay(batch, step) if replays else self.step(batch)
        if compare > 0 and step % compare == 0:
            compare_replicas(self.state, step)
        return metrics

    def _replay(self, batch: Batch, step: int) -> Sums:
        """A step taken twice and compared, as states: differences are named by their place."""

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
            arrays, metrics = self.train_step(jax.tree.leaves(state), batch)
            return self._step.state_of(arrays), metrics

        after, metrics = replay_step(train_step, self.state, batch, step)
        self._arrays = jax.tree.leaves(after)
        return metrics
