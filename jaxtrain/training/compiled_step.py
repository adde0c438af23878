"""The one jitted, state-donating train step of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxtrain.data.batch import Batch
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.step import PENDING, Program, TrainState, with_shardings

if TYPE_CHECKING:
    from jaxtrain.training.exchange.exchange_program import ExchangeProgram

Arrays = list[jax.Array]


class CompiledStep:
    """A program's train step for `jax.jit`: compiled when it is first called, or `lower`ed.

    A run calls it, a plan compiles it for devices that are not there, a profile names its
    operations, and `verify` proves it. The parameters and moments of a TrainState are objects,
    which Python takes apart before a step and makes anew after it, and whose metadata it compares:
    longer than all the rest of giving a step to the devices (benchmarks/overhead.py). So what is
    compiled takes the arrays alone.

    All its methods are to be called with the program's layout active.

    Where a part of the state lies in files, what is compiled takes the arrays in memory and leaves
    the update to be done: `around` it stands what does that.

    Attributes:
      structure: of a TrainState of the program, whose arrays these are.
      options: of XLA, by name.
      on_arrays: arrays, batch -> arrays, metrics; takes the arrays away from its caller. They go
        out exactly as they came in, so that one compilation serves the whole run.
    """

    def __init__(
        self, program: "Program | ExchangeProgram", options: Mapping[str, str] | None = None
    ) -> None:
        """Compiles nothing yet.

        Args:
          program: what a step is.
          options: of XLA, by name: `compilation.options_of_run`. None: XLA's own.
        """
        shapes, plain = program.shapes(), program.plain
        held = plain.in_memory(shapes)
        shardings = jax.tree.leaves(program.state_shardings(held))
        self._program, self._held = program, jax.tree.structure(held)
        self.structure, self.options = jax.tree.structure(shapes), dict(options or {})
        self._finish = plain.finisher(self.options)

        def train_step(arrays: Arrays, batch: Batch) -> tuple[Arrays, Sums]:
            with plain.precision.products():
                after, metrics = program.train_step(jax.tree.unflatten(self._held, arrays), batch)
            return jax.tree.leaves(after), metrics

        self._jitted = jax.jit(
            train_step,
            donate_argnums=0,
            out_shardings=(shardings, None),
            compiler_options=self.options,
        )
        self.on_arrays: Callable[..., Any] = self.wrap(self._jitted)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """One optimizer step, as `Program.train_step`; takes the state away from its caller."""
        arrays, metrics = self.on_arrays(jax.tree.leaves(state), batch)
        return self.state_of(arrays), metrics

    def state_of(self, arrays: Arrays) -> TrainState:
        """The state whose arrays these are."""
        return jax.tree.unflatten(self.structure, arrays)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """What will be compiled, lowered from shapes: no array is made.

        Args:
          batch: a global batch, or its shapes.
        """
        batch = with_shardings(batch, self._program.batch_shardings(batch))
        held = self._program.plain.in_memory(self._program.abstract_state())
        return self._jitted.lower(jax.tree.leaves(held), batch)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The whole step, as `on_arrays`, of what was compiled for it."""
        finish, in_memory = self._finish, self._program.plain.in_memory
        if finish is None:
            return compiled

        def run_whole(arrays: Arrays, batch: Batch) -> tuple[Arrays, Sums]:
            before = self.state_of(arrays)
            held, metrics = compiled(jax.tree.leaves(in_memory(before)), batch)
            after = jax.tree.unflatten(self._held, held)
            return jax.tree.leaves(finish(before, after, metrics.pop(PENDING))), metrics

        return run_whole

    def compile_each(self, batches: Sequence[Batch]) -> Callable[..., Any]:
        """Compiles it now for batches of several shapes; what `on_arrays` is from then on.

        Args:
          batches: global batches, or their shapes, of rows of different lengths.
        """
        compiled = {batch.inputs.shape: self.lower(batch).compile() for batch in batches}

        def of_its_shape(arrays: Arrays, batch: Batch) -> tuple[Arrays, Sums]:
            # A batch of your own of another length is compiled for when it comes.
            return compiled.get(batch.inputs.shape, self._jitted)(arrays, batch)

        self.on_arrays = self.wrap(of_its_shape)
        return self.on_arrays

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """Compiles it now; from then on a call that would need another program is rejected.

        Args:
          batch: a global batch, or its shapes.
        """
        compiled = self.lower(batch).compile()
        self.on_arrays = self.wrap(compiled)
        return compiled
