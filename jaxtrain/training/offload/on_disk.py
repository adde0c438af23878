"""Offload of the optimizer's state to files, updated block by block with read-ahead."""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import Layout, by_name, reshard
from jaxtrain.training.finetune.tuning import join, part
from jaxtrain.training.guard import select
from jaxtrain.training.offload.files import FileArray, Scratch
from jaxtrain.training.offload.streaming import on_device, stacks
from jaxtrain.training.optimizers.moments import apply_updates
from jaxtrain.training.optimizers.rule import EvaluationParams
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import Applied, Gradient, TrainState, Updated
from jaxtrain.training.step import Step, transform

# -- the update of blocks --------------------------------------------------------------------------
# A block is a layer of a stack of parameters, or parameters without layers, with the rule's state
# for them: what a rule updates separately. A device has a few blocks at a time, and so does a host.

BLOCK_BYTES = 32 << 20  # on a device, of a rule's state; more if one parameter's layer is larger
_WRITTEN_LATE = 2  # computed blocks that may wait to be written
# Maximum blocks on a device: one read ahead, one in computation, its results, those that
# wait.
BLOCKS_ALIVE = 3 + _WRITTEN_LATE


class Group(NamedTuple):
    """Group of parameters whose blocks are equal parts of each.

    Attributes:
      names: of the parameters.
      layers: number of their blocks, one per layer; None: one block of whole parameters.
    """

    names: frozenset[str]
    layers: int | None

    @property
    def layer_indices(self) -> list[int] | list[None]:
        """Layer of each block."""
        return [None] if self.layers is None else list(range(self.layers))


class Pending(NamedTuple):
    """Pending update of a step in memory.

    Attributes:
      grads: the rule's input, sharded like the moments.
      counts: the rule's previous state, without its arrays.
      good: bool scalar, whether the update counts; None: it does.
      step: int32 scalar, optimizer steps taken before.
      more: further inputs of the rule.
    """

    grads: nnx.State
    counts: Any
    good: jax.Array | None
    step: jax.Array
    more: dict[str, Any]


def groups(params: nnx.State, kept: Any) -> list[Group]:
    """Return the groups of parameters that are updated together.

    Args:
      params: their shapes.
      kept: the rule's state, or its shapes with shardings.
    """
    found = []
    for layers, names in stacks(params):
        together: list[str] = []
        size = 0
        for name in by_name(params):
            if name not in names:
                continue
            own = bytes_of(part(kept, frozenset({name}))) // (layers or 1)
            if together and size + own > BLOCK_BYTES:
                found.append(Group(frozenset(together), layers))
                together, size = [], 0
            together.append(name)
            size += own
        found.append(Group(frozenset(together), layers))
    return found


def bytes_of(kept: Any) -> int:
    """Return the bytes per device of a rule's arrays."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(kept)
        if x.ndim
    )


def largest_block(params: nnx.State, kept: Any) -> int:
    """Return the bytes per device of the optimizer state in the largest block; arguments as in
    `groups`.
    """
    return max(
        bytes_of(part(kept, group.names)) // (group.layers or 1) for group in groups(params, kept)
    )


class Blocks:
    """Compiled functions that initialize and update a state in files, one pair per group."""

    def __init__(
        self,
        rule: Any,
        layout: Layout,
        store: Callable[[nnx.State], nnx.State],
        options: Mapping[str, str],
    ) -> None:
        """Prepare the functions; nothing is compiled yet.

        Args:
          rule: the optax transformation that updates each parameter on its own.
          layout: how everything is sharded.
          store: moves updated parameters to their sharding between steps.
          options: of XLA, by name.
        """
        self._rule, self._layout, self._store = rule, layout, store
        self._options = dict(options)
        self._groups: list[Group] | None = None
        self._compiled: dict[tuple[Group, str], Callable[..., Any]] = {}
        self._layers: dict[int, jax.Array] = {}

    def begin(self, params: nnx.State, files: Any) -> None:
        """Write the rule's initial state of these parameters; to be called with the
        layout active.
        """
        for group in self._of(params, files):
            mine, kept = (part(tree, group.names) for tree in (params, files))
            init = self._compile_for(group, self._init, mine, kept)
            for layer in group.layer_indices:
                made = init(mine, self._layer_array(layer))
                for file, x in zip(_large(kept), made, strict=True):
                    file.write(x, layer)

    def update(self, params: nnx.State, files: Any, pending: Pending) -> nnx.State:
        """Return the updated parameters; the old ones are donated. To be called with the layout
        active.

        Args:
          params: as stored between steps.
          files: the rule's state, its arrays in files, which are overwritten.
          pending: the step's pending update.
        """
        found = self._of(params, files)
        blocks = [(group, layer) for group in found for layer in group.layer_indices]
        kept = {group: _large(part(files, group.names)) for group in found}
        given = {group: part(pending, group.names) for group in found}
        after = {group: part(params, group.names) for group in found}

        def read(block: tuple[Group, int | None]) -> list[jax.Array]:
            group, layer = block
            return [file.read(layer) for file in kept[group]]

        def write(block: tuple[Group, int | None], arrays: list[jax.Array]) -> None:
            group, layer = block
            for file, x in zip(kept[group], arrays, strict=True):
                file.write(x, layer)

        writes: deque[Future[None]] = deque()
        with (
            ThreadPoolExecutor(1, thread_name_prefix="offload-read") as reading,
            ThreadPoolExecutor(1, thread_name_prefix="offload-write") as writing,
        ):
            ahead = reading.submit(read, blocks[0])
            for block, following in zip(blocks, [*blocks[1:], None], strict=True):
                group, layer = block
                arrays = ahead.result()
                if following is not None:
                    ahead = reading.submit(read, following)
                mine, own = after[group], part(files, group.names)
                one = self._compile_for(group, self._update, mine, own)
                after[group], arrays = one(mine, arrays, given[group], self._layer_array(layer))
                if len(writes) == _WRITTEN_LATE:
                    writes.popleft().result()
                writes.append(writing.submit(write, block, arrays))
            for one in writes:
                one.result()
        return join(list(after.values()))

    def _of(self, params: nnx.State, files: Any) -> list[Group]:
        if self._groups is None:
            self._groups = groups(params, files)
        return self._groups

    def _compile_for(
        self, group: Group, make: Callable[[nnx.State, Any], Callable[..., Any]], *of: Any
    ) -> Callable[..., Any]:
        key = group, make.__name__
        if key not in self._compiled:
            self._compiled[key] = make(*of)
        return self._compiled[key]

    def _layer_array(self, layer: int | None) -> jax.Array | None:
        if layer is None:
            return None
        if layer not in self._layers:
            with jax.transfer_guard("allow"):  # each process writes its own part once
                self._layers[layer] = jax.make_array_from_callback(
                    (), self._layout.sharding_of(P()), lambda _: np.array(layer, np.int32)
                )
        return self._layers[layer]

    def _init(self, _: nnx.State, files: Any) -> Callable[..., Any]:
        """(parameters, its layer) -> arrays of a block."""

        def init(params: nnx.State, layer: jax.Array | None) -> list[jax.Array]:
            return _large(self._rule.init(self._slice(params, layer)))

        of_kept = [file.sharding for file in _large(files)]
        return jax.jit(init, out_shardings=of_kept, compiler_options=self._options)

    def _update(self, params: nnx.State, files: Any) -> Callable[..., Any]:
        """(parameters, arrays of a block, Pending, its layer) -> parameters, arrays."""
        leaves, structure = jax.tree.flatten(files)
        large = [isinstance(x, FileArray) for x in leaves]

        def update(
            params: nnx.State, kept: list[jax.Array], given: Pending, layer: jax.Array | None
        ) -> tuple[nnx.State, list[jax.Array]]:
            old = self._slice(params, layer)
            grads, more = (_slice_layer(x, layer) for x in (given.grads, given.more))
            layers = None if layer is None else layer[None]
            if layers is not None:
                more = {**more, "layers": layers}
            arrays, counts = iter(kept), iter(jax.tree.leaves(given.counts))
            state = structure.unflatten([next(arrays if one else counts) for one in large])
            updates, state = self._rule.update(grads, state, old, **more)
            new = apply_updates(old, updates, given.step, layers)
            new, kept = select(given.good, (new, _large(state)), (old, kept))
            return self._put(params, new, layer), kept

        return jax.jit(
            update,
            donate_argnums=0,
            out_shardings=(
                jax.tree.map(lambda x: x.sharding, params),
                [file.sharding for file in _large(files)],
            ),
            compiler_options=self._options,
        )

    def _slice(self, params: nnx.State, layer: jax.Array | None) -> nnx.State:
        """Return a block's parameters on the devices, sharded like the moments."""
        mine = on_device(_slice_layer(params, layer))
        return reshard(mine, self._layout.moment, self._layout)

    def _put(self, params: nnx.State, new: nnx.State, layer: jax.Array | None) -> nnx.State:
        """Return the parameters with those of a block replaced, wherever they are stored."""

        def one(x: jax.Array, new: jax.Array) -> jax.Array:
            new = jax.device_put(new, jax.typeof(x).memory_space)
            if layer is None:
                return new
            return jax.lax.dynamic_update_slice_in_dim(x, new, layer, 0)

        return jax.tree.map(one, params, self._store(new))


def _slice_layer(tree: Any, layer: jax.Array | None) -> Any:
    """Return one layer [1, ...] of each array of a tree except scalars; None: all layers."""
    if layer is None:
        return tree
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, 1) if x.ndim else x, tree)


def _large(state: Any) -> list[Any]:
    """Return the arrays of a rule's state except scalars."""
    return [x for x in jax.tree.leaves(state) if x.ndim]


# -- the transform ---------------------------------------------------------------------------------

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
