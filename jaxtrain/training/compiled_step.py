"""The jitted, state-donating train step of a run, and the flat state that it steps on."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.training.corruption import Corruption, compare_replicas, replay_step
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import TrainState, with_shardings
from jaxtrain.training.step import Step

Arrays = list[jax.Array]


class CompiledStep:
    """A `Step` for `jax.jit`: compiled when it is first called, or `lower`ed.

    A run calls it, a plan compiles it for absent devices, a profile names its
    operations, and `verify` checks it. The parameters and moments of a TrainState are objects,
    which Python flattens before a step and rebuilds after it, and whose metadata it compares:
    longer than the rest of dispatching a step (benchmarks/overhead.py). So the compiled
    function takes the arrays alone.

    Call all methods with the step's layout active.

    Where a part of the state is offloaded to files, the compiled step takes the arrays in memory
    and leaves that part's update to the code `around` it.

    Attributes:
      structure: of a TrainState of the step, whose arrays these are.
      options: of XLA, by name.
      on_arrays: arrays, batch -> arrays, metrics; donates the arrays. Outputs are sharded
        exactly like inputs, so that one compilation serves the whole run.
    """

    def __init__(self, step: Step, options: Mapping[str, str] | None = None) -> None:
        """Prepare the step for `jax.jit`; nothing is compiled yet.

        Args:
          step: the step to compile.
          options: of XLA, by name: `compilation.options_of_run`. None: XLA's own.
        """
        shapes = step.shapes()
        held = step.in_memory(shapes)
        shardings = jax.tree.leaves(step.shardings(held))
        self._step, self._held = step, jax.tree.structure(held)
        self.structure, self.options = jax.tree.structure(shapes), dict(options or {})
        self._finish = None if step.files is None else step.files.finisher(self.options)

        def train_step(arrays: Arrays, batch: Batch) -> tuple[Any, ...]:
            with step.setup.precision.products():
                done = step.train_step(jax.tree.unflatten(self._held, arrays), batch)
            pending = () if self._finish is None else (done.pending,)
            return jax.tree.leaves(done.state), done.metrics, *pending

        self._jitted = jax.jit(
            train_step,
            donate_argnums=0,
            out_shardings=(shardings, None) if self._finish is None else (shardings, None, None),
            compiler_options=self.options,
        )
        self.on_arrays: Callable[..., Any] = self.wrap(self._jitted)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """Run one optimizer step, like `Step.train_step`. The state passed in is donated."""
        arrays, metrics = self.on_arrays(jax.tree.leaves(state), batch)
        return self.state_of(arrays), metrics

    def state_of(self, arrays: Arrays) -> TrainState:
        """Return the state with these arrays as leaves."""
        return jax.tree.unflatten(self.structure, arrays)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Lower the program to be compiled, from shapes: no array is made.

        Args:
          batch: a global batch, or its shapes.
        """
        batch = with_shardings(batch, self._step.setup.batch_shardings(batch))
        held = self._step.in_memory(self._step.abstract_state())
        return self._jitted.lower(jax.tree.leaves(held), batch)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the whole step, with the signature of `on_arrays`, around its compiled part."""
        finish, in_memory = self._finish, self._step.in_memory
        if finish is None:
            return compiled

        def run_whole(arrays: Arrays, batch: Batch) -> tuple[Arrays, Sums]:
            before = self.state_of(arrays)
            held, metrics, pending = compiled(jax.tree.leaves(in_memory(before)), batch)
            after = jax.tree.unflatten(self._held, held)
            return jax.tree.leaves(finish(before, after, pending)), metrics

        return run_whole

    def compile_each(self, batches: Sequence[Batch]) -> Callable[..., Any]:
        """Compile the step for batches of several shapes, and replace `on_arrays` with the result.

        Args:
          batches: global batches, or their shapes, of rows of different lengths.
        """
        compiled = {batch.inputs.shape: self.lower(batch).compile() for batch in batches}

        def of_its_shape(arrays: Arrays, batch: Batch) -> tuple[Any, ...]:
            # A user-provided batch of another length is compiled at its first use.
            return compiled.get(batch.inputs.shape, self._jitted)(arrays, batch)

        self.on_arrays = self.wrap(of_its_shape)
        return self.on_arrays

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """Compile the step; later calls that would need another program fail.

        Args:
          batch: a global batch, or its shapes.
        """
        compiled = self.lower(batch).compile()
        self.on_arrays = self.wrap(compiled)
        return compiled


# XLA's CPU client has at most 32 unfinished programs per device; see RunAhead.
RUN_AHEAD_PROGRAMS = 8


class RunAhead:
    """Limiter that keeps the host a few programs ahead of the devices, and no further.

    XLA's CPU client starts and runs programs on one thread pool of as many threads as devices.
    While 32 programs of a device are unfinished, the thread that starts the next one blocks: on
    simulated devices the others then wait in collectives for a device whose program has no thread,
    and the step deadlocks. A few programs keep any device busy.
    """

    def __init__(self) -> None:
        self._results: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> None:
        """Take a program's result, which must not be donated, and wait for an earlier one."""
        self._results.append(result)
        if len(self._results) > RUN_AHEAD_PROGRAMS:
            jax.block_until_ready(self._results.popleft())


class Stepper:
    """A compiled train step, and the arrays of the state it steps on.

    Attributes:
      train_step: arrays, batch -> arrays, metrics; donates the arrays. To be
        called with the layout active.
    """

    def __init__(self, step: CompiledStep, state: TrainState, corruption: Corruption) -> None:
        """Take over the state; nothing is compiled yet.

        Args:
          step: the step.
          state: the state before the first step; the stepper's from now on.
          corruption: settings of `step_and_check`.
        """
        self._step, self._corruption = step, corruption
        self._arrays = jax.tree.leaves(state)
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
                "Trainer.state is set to a state with a different structure than this run's; use a "
                "state of this trainer, with changed values in its arrays"
            )
        self._arrays = arrays

    def step(self, batch: Batch) -> Sums:
        """Run one optimizer step on a global batch on the devices, and return its metrics on the
        devices.
        """
        self._arrays, metrics = self.train_step(self._arrays, batch)
        return metrics

    def step_and_check(self, batch: Batch, step: int) -> Sums:
        """Run step `step`; where it is due, check for silent data corruption.

        Raises:
          CorruptionError: devices disagree about replicated values.
        """
        replay, compare = self._corruption.replay_every, self._corruption.compare_replicas_every
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            replays = replay > 0 and step % replay == 0
            metrics = self._replay(batch, step) if replays else self.step(batch)
        if compare > 0 and step % compare == 0:
            compare_replicas(self.state, step)
        return metrics

    def _replay(self, batch: Batch, step: int) -> Sums:
        """Run a step twice and compare the states; differences are named by their path."""

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
            arrays, metrics = self.train_step(jax.tree.leaves(state), batch)
            return self._step.state_of(arrays), metrics

        after, metrics = replay_step(train_step, self.state, batch, step)
        self._arrays = jax.tree.leaves(after)
        return metrics
