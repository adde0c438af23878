"""Offload of the optimizer's state to files."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx

from jaxtrain.parallel.sharding import by_name
from jaxtrain.training.finetune.tuning import join, part
from jaxtrain.training.guard import select
from jaxtrain.training.offload.blocks import Blocks, Pending
from jaxtrain.training.offload.files import FileArray, Scratch
from jaxtrain.training.offload.streaming import on_device
from jaxtrain.training.optimizers.rule import EvaluationParams
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import Applied, Gradient, TrainState, Updated
from jaxtrain.training.step import Step, transform

_NONE = frozenset[str]()


@transform
def offload_to_disk(
    step: Step,
    scratch: Scratch,
    first: tuple[optax.GradientTransformation, ...],
    rule: optax.GradientTransformationExtraArgs,
) -> Step:
    """Return the step with the optimizer's arrays in files, which the host updates block by block.

    In a `TrainState` they are `FileArray`s, which compiled programs cannot take: programs of a
    step, an evaluation or anything else take `in_memory` of a state. A step's program computes
    gradients and clips them, and leaves the update of the parameters `Pending`.

    Args:
      step: whose optimizer is the chain of `first` and `rule`.
      scratch: the folder of the files.
      first: transformations of all gradients together, such as clipping by norm; stateless.
      rule: transformation of each parameter, and each of its layers, separately.
    """

    def apply(
        setup: Setup,
        old: TrainState,
        grads: nnx.State,
        good: jax.Array | None,
        extra: Mapping[str, Any],
    ) -> Applied:
        del setup
        state: Any = old.opt_state
        nothing, before = state[: len(first)], state[len(first) :]
        if first:
            clip: Any = optax.chain(*first)
            grads, nothing = clip.update(grads, nothing, on_device(old.params), **extra)
        # Without parameters the rule still counts steps: every block shares these counts.
        none = part((grads, old.params, dict(extra)), _NONE)
        _, after = rule.update(none[0], before, none[1], **none[2])
        after = select(good, after, before)
        pending = Pending(grads, before, good, old.step, dict(extra))
        return Applied(old.params, (*nothing, *after), pending)

    step = step.rebuild(apply=apply)
    files = _OnDisk(step, scratch, len(first), rule)

    def update(state: TrainState, found: Gradient) -> Updated:
        done = step.update(state, found)
        # The host still has to update the parameters.
        return done._replace(state=done.state.replace(params=state.params))

    def eval_state(state: TrainState) -> TrainState:
        def read(part: Any) -> Any:
            if not isinstance(part, EvaluationParams):
                return part
            return jax.tree.map(lambda x: x.read() if isinstance(x, FileArray) else x, part)

        parts = jax.tree.map(
            read, state.opt_state, is_leaf=lambda x: isinstance(x, EvaluationParams)
        )
        return files.in_memory(step.eval_state(state.replace(opt_state=parts)))

    return step._replace(
        update=update,
        current_state=lambda state: step.current_state(files.in_memory(state)),
        eval_state=eval_state,
        files=files,
    )


@dataclasses.dataclass(frozen=True)
class _OnDisk:
    """Optimizer state in files; implements `step.Files`.

    Attributes:
      step: the step of this state.
      scratch: the folder of the files.
      first: number of stateless parts of the optimizer's state before the rule's.
      rule: as in `offload_to_disk`.
    """

    step: Step
    scratch: Scratch
    first: int
    rule: Any

    def in_memory(self, state: TrainState) -> TrainState:
        return state.replace(opt_state=part(state.opt_state, _NONE))

    def finisher(
        self, options: Mapping[str, str]
    ) -> Callable[[TrainState, TrainState, Any], TrainState]:
        blocks = self._blocks(options)

        def finish(before: TrainState, after: TrainState, pending: Pending) -> TrainState:
            files: Any = before.opt_state
            params = blocks.update(after.params, files[self.first :], pending)
            return self._with_files(after.replace(params=params), files)

        return finish

    def attach(self, state: TrainState, before: TrainState | None = None) -> TrainState:
        if before is not None:
            new = dict(jax.tree_util.tree_leaves_with_path(state.opt_state))
            for path, file in jax.tree_util.tree_leaves_with_path(before.opt_state):
                if isinstance(file, FileArray) and path in new:
                    file.write(new[path])
            return self._with_files(self.in_memory(state), before.opt_state)
        files = self._new_files()
        with self.step.setup.layout.active():
            self._blocks({}).begin(state.params, files[self.first :])
        return self._with_files(state, files)

    def restore(self, state: TrainState, read: Callable[[Callable[..., Any]], Any]) -> TrainState:
        files = self._new_files()
        for name in by_name(state.params):
            names = frozenset({name})

            def of_name(whole: TrainState) -> dict[str, Any]:
                return {"opt_state": part(whole.opt_state, names)}  # noqa: B023

            found = [x for x in jax.tree.leaves(read(of_name)) if x.ndim]
            mine = [x for x in jax.tree.leaves(part(files, names)) if x.ndim]
            for file, x in zip(mine, found, strict=True):
                file.write(x)
        return self._with_files(state, files)

    def _blocks(self, options: Mapping[str, str]) -> Blocks:
        setup = self.step.setup
        store = functools.partial(setup.storage.store, setup.layout)
        return Blocks(self.rule, setup.layout, store, options)

    def _new_files(self) -> Any:
        """Return the optimizer state with its arrays replaced by new files."""

        def one(path: Any, x: jax.ShapeDtypeStruct) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return FileArray(self.scratch, name, x) if x.ndim else x

        return jax.tree_util.tree_map_with_path(one, self.step.abstract_state().opt_state)

    def _with_files(self, state: TrainState, files: Any) -> TrainState:
        return state.replace(opt_state=join([state.opt_state, files]))
