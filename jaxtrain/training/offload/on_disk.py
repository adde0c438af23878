"""Program with optimizer moments on disk."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx

from jaxtrain.parallel.sharding import by_name
from jaxtrain.training.guard import select
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.offload.blocks import Blocks, Pending
from jaxtrain.training.offload.files import FileArray, Scratch
from jaxtrain.training.offload.on_host import OnHost
from jaxtrain.training.offload.streaming import joined, on_device, part
from jaxtrain.training.optimizers.average import Evaluated
from jaxtrain.training.step import PENDING, TrainState

_NONE = frozenset[str]()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDisk(OnHost):
    """The synchronous program; between steps, the arrays of the optimizer's state are in files.

    In a `TrainState` they are `FileArray`s, which no program takes: what is compiled for a step,
    an evaluation or anything else takes `in_memory` of a state. A step's program computes gradients
    and clips them; `finisher` updates the parameters block by block.

    Its `optimizer` is the chain of `first` and `rule`.

    Attributes:
      first: what needs all gradients at once, such as a clip by their norm; they keep nothing.
      rule: what updates each parameter, and each of its layers, on its own.
      scratch: where the files are.
    """

    first: tuple[optax.GradientTransformation, ...]
    rule: optax.GradientTransformationExtraArgs
    scratch: Scratch

    # -- in a compiled step ----------------------------------------------------------------------

    def moved(
        self, old: TrainState, grads: nnx.State, good: jax.Array | None, **more: Any
    ) -> tuple[Any, Any]:
        """What is left to be done, a `Pending` in place of parameters; the counts after it."""
        state: Any = old.opt_state
        nothing, before = state[: len(self.first)], self._of_rule(state)
        if self.first:
            clip: Any = optax.chain(*self.first)
            grads, nothing = clip.update(grads, nothing, on_device(old.params), **more)
        # Of no parameters the rule still counts: every block's counts are these.
        none = part((grads, old.params, more), _NONE)
        _, after = self.rule.update(none[0], before, none[1], **none[2])
        after = select(good, after, before)
        return Pending(grads, before, good, old.step, more), (*nothing, *after)

    def at_rest(self, params: Any) -> Any:
        """What `moved` gave in place of parameters, as it is."""
        return params

    def update(
        self,
        state: TrainState,
        grads: nnx.State,
        metrics: Sums,
        statistics: nnx.State,
        curvature: tuple[jax.Array, nnx.State] | None = None,
    ) -> tuple[TrainState, Sums]:
        """As of `Program`, the parameters as they were; what is left to be done is a metric."""
        new, metrics = super().update(state, grads, metrics, statistics, curvature)
        pending: Any = new.params
        return dataclasses.replace(new, params=state.params), {**metrics, PENDING: pending}

    # -- around it -------------------------------------------------------------------------------

    def in_memory(self, state: TrainState) -> TrainState:
        """The state without what is in files."""
        return dataclasses.replace(state, opt_state=part(state.opt_state, _NONE))

    def finisher(
        self, options: Mapping[str, str]
    ) -> Callable[[TrainState, TrainState, Any], TrainState]:
        """What ends a step, with the layout active: the whole state before it, what its program
        returned and its `Pending`, to the whole state."""
        blocks = self._blocks(options)

        def finish(before: TrainState, after: TrainState, pending: Pending) -> TrainState:
            files = before.opt_state
            params = blocks.update(after.params, self._of_rule(files), pending)
            return self._with_files(dataclasses.replace(after, params=params), files)

        return finish

    def _blocks(self, options: Mapping[str, str]) -> Blocks:
        return Blocks(self.rule, self.layout, super().at_rest, options)

    def filed(self, state: TrainState, before: TrainState | None = None) -> TrainState:
        """The whole state of one in memory.

        Args:
          state: in memory.
          before: whose files go on to hold what they do, but for arrays of `state` in their place;
            None: they are made anew, for the rule's first state.
        """
        if before is not None:
            new = dict(jax.tree_util.tree_leaves_with_path(state.opt_state))
            for path, file in jax.tree_util.tree_leaves_with_path(before.opt_state):
                if isinstance(file, FileArray) and path in new:
                    file.write(new[path])
            return self._with_files(self.in_memory(state), before.opt_state)
        files = self._files()
        with self.layout.active():
            self._blocks({}).begin(state.params, self._of_rule(files))
        return self._with_files(state, files)

    def restored(self, state: TrainState, read: Callable[[Callable[..., Any]], Any]) -> TrainState:
        """The whole state of one in memory, what is in files read one parameter at a time.

        Args:
          state: in memory.
          read: reads a part of the whole state, that which its argument takes of the abstract one.
        """
        files = self._files()
        for name in by_name(state.params):
            names = frozenset({name})

            def of_name(whole: TrainState) -> dict[str, Any]:
                return {"opt_state": part(whole.opt_state, names)}  # noqa: B023

            found = [x for x in jax.tree.leaves(read(of_name)) if x.ndim]
            mine = [x for x in jax.tree.leaves(part(files, names)) if x.ndim]
            for file, x in zip(mine, found, strict=True):
                file.write(x)
        return self._with_files(state, files)

    def _of_rule(self, opt_state: Any) -> Any:
        return opt_state[len(self.first) :]

    def _files(self) -> Any:
        """The optimizer's state with new files in the place of its arrays."""

        def one(path: Any, x: jax.ShapeDtypeStruct) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return FileArray(self.scratch, name, x) if x.ndim else x

        return jax.tree_util.tree_map_with_path(one, self.abstract_state().opt_state)

    def _with_files(self, state: TrainState, files: Any) -> TrainState:
        return dataclasses.replace(state, opt_state=joined([state.opt_state, files]))

    # -- outside of a step -----------------------------------------------------------------------

    def consensus(self, state: TrainState) -> TrainState:
        """As of `OnHost`: in memory, averages read from their files."""

        def read(part: Any) -> Any:
            if not isinstance(part, Evaluated):
                return part
            return jax.tree.map(lambda x: x.read() if isinstance(x, FileArray) else x, part)

        parts = jax.tree.map(read, state.opt_state, is_leaf=lambda x: isinstance(x, Evaluated))
        return self.in_memory(super().consensus(dataclasses.replace(state, opt_state=parts)))

    def trained(self, state: TrainState) -> TrainState:
        """As of `OnHost`, in memory."""
        return super().trained(self.in_memory(state))
