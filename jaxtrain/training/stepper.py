"""Takes optimizer steps on a state, which between them is no more than its arrays."""

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.parallel.devices import RunAhead
from jaxtrain.training.corruption import Corruption, compare_replicas, replayed
from jaxtrain.training.exchange.program import ExchangeProgram
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.step import Program, TrainState

Arrays = list[jax.Array]


class Stepper:
    """The compiled train step of a program, and the state it steps on.

    The parameters and moments of a TrainState are objects, which Python takes apart before a step
    and makes anew after it, and whose metadata it compares: longer than all the rest of giving a
    step to the devices (benchmarks/overhead.py). So the arrays alone go in and out, and a
    TrainState is made when somebody asks for it.

    Attributes:
      train_step: arrays, batch -> arrays, metrics; takes the arrays away from its caller. To be
        called with the layout active.
    """

    def __init__(
        self,
        program: Program | ExchangeProgram,
        state: TrainState,
        corruption: Corruption,
        compiler_options: dict[str, str],
    ) -> None:
        """Compiles nothing yet.

        Args:
          program: what a step is.
          state: the state before the first step; the stepper's from now on.
          corruption: how often `checked_step` looks for it.
          compiler_options: of XLA, by name.
        """
        self._program, self._corruption = program, corruption
        self._arrays, self._structure = jax.tree.flatten(state)
        out = (jax.tree.leaves(program.state_shardings(state)), None)

        def train_step(arrays: Arrays, batch: Batch) -> tuple[Arrays, Sums]:
            after, metrics = program.train_step(self._tree(arrays), batch)
            return jax.tree.leaves(after), metrics

        self._ahead = RunAhead()
        self._jitted = jax.jit(
            train_step,
            donate_argnums=0,
            out_shardings=out,
            compiler_options=compiler_options,
        )
        self.train_step: Callable[..., Any] = self._jitted

    @property
    def state(self) -> TrainState:
        """The current state; the next step takes its arrays away."""
        return self._tree(self._arrays)

    @state.setter
    def state(self, state: TrainState) -> None:
        arrays, structure = jax.tree.flatten(state)
        if structure != self._structure:
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

    def checked_step(self, batch: Batch, step: int) -> Sums:
        """Step `step` of a run: where it is due, checked for silent corruption.

        Raises:
          CorruptionError: devices disagree about what they should hold alike.
        """
        replay, compare = self._corruption.replay_every, self._corruption.compare_replicas_every
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            replays = replay > 0 and step % replay == 0
            metrics = self._replayed(batch, step) if replays else self.step(batch)
        if compare > 0 and step % compare == 0:
            compare_replicas(self.state, step)
        return metrics

    def _replayed(self, batch: Batch, step: int) -> Sums:
        """A step taken twice and compared, as states: differences are named by their place."""

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
            arrays, metrics = self.train_step(jax.tree.leaves(state), batch)
            return self._tree(arrays), metrics

        after, metrics = replayed(train_step, self.state, batch, step)
        self._arrays = jax.tree.leaves(after)
        return metrics

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The train step lowered from shapes alone; `batch` holds shapes and shardings."""
        arrays = jax.tree.leaves(self._program.abstract_state())
        return self._jitted.lower(arrays, batch)

    def _tree(self, arrays: Arrays) -> TrainState:
        return jax.tree.unflatten(self._structure, arrays)
