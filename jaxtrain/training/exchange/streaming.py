"""Streaming DiLoCo (arXiv 2501.18512): fragments synchronized in turn, overlapped with steps.

DiLoCo sends all parameters at once, and all replicas wait. Here each fragment is exchanged once per
period, at its own step. Its mean is computed during the next steps, and the result of the
outer step is mixed into the replicas' parameters when it arrives. Fragments are equal in size and
sharded on every device. Letters: k replicas, P fragments, S elements of a fragment in an array,
over all devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.ordering import run_after
from jaxtrain.parallel.sharding import is_variable, logical_axes, on_each_device, parts_of, reshard
from jaxtrain.training.exchange.per_replica import replicas_of, shares
from jaxtrain.training.exchange.replicas import DiLoCo, distance, separate
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import Gradient, TrainState, Updated
from jaxtrain.training.step import Step, transform

Arrays = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Strided fragments: each has every `count`-th layer (as in arXiv 2501.18512).

    If an array has no layers, or their number is not a multiple of `count`, its first dimension
    that divides on a device is split instead: rows of a table, features of a vector. If there is
    none, its flattened elements are: fragments then depend on the mesh. Elementwise update rules do
    not depend on the split, and every fragment has the same size.

    Attributes:
      count: number of fragments.
    """

    count: int

    def cut(self, tree: Any, fragment_index: jax.Array) -> Arrays:
        """Return a fragment of each named array: [S], or [k, S] of replicas' arrays.

        Args:
          tree: of named arrays.
          fragment_index: int32 scalar.
        """
        wholes, parts = _specs(tree)

        def on_one(arrays: Arrays, fragment_index: jax.Array) -> Arrays:
            return [
                jax.lax.dynamic_index_in_dim(
                    self._dealt(x), fragment_index, 1, keepdims=False
                ).reshape((-1,) if len(part) == 1 else (1, -1))
                for x, part in zip(arrays, parts, strict=True)
            ]

        return on_each_device(on_one, (wholes, P()), parts)(jax.tree.leaves(tree), fragment_index)

    def paste(self, tree: Any, fragment: Arrays, fragment_index: jax.Array) -> Any:
        """Return the tree with a fragment replaced: the inverse of `cut`."""
        wholes, parts = _specs(tree)

        def on_one(arrays: Arrays, fragment: Arrays, fragment_index: jax.Array) -> Arrays:
            pasted: Arrays = []
            for x, part in zip(arrays, fragment, strict=True):
                dealt = self._dealt(x)
                part = part.reshape(dealt.shape[0], dealt.shape[2])
                dealt = jax.lax.dynamic_update_index_in_dim(dealt, part, fragment_index, 1)
                pasted.append(dealt.reshape(-1)[: x.size].reshape(x.shape))
            return pasted

        leaves, structure = jax.tree.flatten(tree)
        run = on_each_device(on_one, (wholes, parts, P()), wholes)
        return structure.unflatten(run(leaves, fragment, fragment_index))

    def _dealt(self, x: jax.Array) -> jax.Array:
        """Return a device's shard with its fragments along the second dimension: [A, count, M]."""
        for dim, size in enumerate(x.shape):
            if size % self.count == 0:
                before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
                return x.reshape(before * size // self.count, self.count, after)
        return jnp.pad(x.reshape(-1), (0, -x.size % self.count)).reshape(1, self.count, -1)


def _specs(tree: Any) -> tuple[list[P], list[P]]:
    """Return the PartitionSpec of each array and of a fragment of it.

    A fragment is sharded over the same devices as the array.
    """
    wholes, parts = [], []
    for variable in jax.tree.leaves(tree, is_leaf=is_variable):
        spec = jax.typeof(variable.get_value()).sharding.spec
        lead = int(logical_axes(variable)[0] == "replica")
        split = tuple(axis for part in spec[lead:] for axis in parts_of(part))
        wholes.append(spec)
        parts.append(P(*spec[:lead], split or None))
    return wholes, parts


@transform
def stream_fragments(step: Step, rule: DiLoCo, fragments: int, delay: int, mixing: float) -> Step:
    """Run DiLoCo on one fragment at a time: a step sends at most one, and receives at most one.

    The outer step is taken as soon as a fragment's mean is available: until it
    arrives, `delay` steps after it was sent, only the outer parameters have it. They are part of
    the state, and so are fragments in transit. State and metrics are as in `agree`, except
    `targets` [k, P], which are those since each fragment's last turn; `replica_spread` is of the
    last fragment that was sent.

    Args:
      step: of each replica.
      rule: the outer step and the period of a fragment.
      fragments: their number; a step sends at most one.
      delay: steps between sending and receiving a fragment.
      mixing: the fraction of their own parameters that replicas keep when it arrives.
    """
    alone, layout, pieces = separate(step, rule), step.setup.layout, Fragments(fragments)

    def init(*arguments: Any) -> TrainState:
        state = alone.init(*arguments)
        targets = jnp.zeros((replicas_of(step.setup), fragments), jnp.float32)
        return state.replace(exchange={**state.exchange, "targets": targets})

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        if delay:
            # The sent values exist when the step begins, and the step does not wait for them.
            state = in_turn(apply_outer_step, state.step, state)
            params, batch = run_after(state.exchange["spread"], (state.params, batch))
            state = state.replace(params=params)
        return alone.gradient(state, batch, counts)

    def update(state: TrainState, found: Gradient) -> Updated:
        done = alone.update(state, found)
        after = done.state
        if not delay:
            after = in_turn(apply_outer_step, after.step, after)
        after = in_turn(mix, after.step - delay, after)
        spread = after.exchange["spread"]
        return done._replace(state=after, metrics={**done.metrics, "replica_spread": spread})

    def in_turn(
        function: Callable[..., TrainState], count: jax.Array, state: TrainState
    ) -> TrainState:
        fragment_index, due = turn(count, period=rule.period, fragments=fragments)
        if fragments == rule.period:
            # Every step sends one: no branch, which would not overlap with other operations.
            return function(state, fragment_index, due)
        return jax.lax.cond(
            due, lambda state: function(state, fragment_index, True), lambda state: state, state
        )

    def apply_outer_step(
        state: TrainState, fragment_index: jax.Array, due: jax.Array | bool
    ) -> TrainState:
        """Apply the outer step to a fragment; the replicas' parameters stay."""
        memory, cut = (
            dict(state.exchange),
            functools.partial(pieces.cut, fragment_index=fragment_index),
        )
        targets, spread = memory.pop("targets"), memory.pop("spread")
        seen = jax.lax.dynamic_index_in_dim(targets, fragment_index, 1, keepdims=False)
        params: Any = cut(reshard(state.params, layout.moment, layout))
        before = {name: cut(tree) for name, tree in memory.items()}
        sent, after, agreed = rule.exchange(state.replace(params=params), before, shares(seen))
        after = jax.tree.map(functools.partial(jnp.where, due), after, before)
        reset = due & (jnp.arange(fragments) == fragment_index)
        statistics = jax.tree.map(
            functools.partial(jnp.where, due), sent.statistics, state.statistics
        )
        return state.replace(
            statistics=statistics,
            exchange={
                "targets": jnp.where(reset, 0.0, targets),
                "spread": jnp.where(due, distance(params, agreed), spread),
                **{
                    name: pieces.paste(tree, after[name], fragment_index)
                    for name, tree in memory.items()
                },
            },
        )

    def mix(state: TrainState, fragment_index: jax.Array, due: jax.Array | bool) -> TrainState:
        """Mix the outer step's result for a fragment into the parameters of each replica."""
        params = reshard(state.params, layout.moment, layout)

        def blend(own: jax.Array, outer: jax.Array) -> jax.Array:
            kept = mixing * own.astype(jnp.float32) + (1 - mixing) * outer
            return jnp.where(due, kept.astype(own.dtype), own)

        outer = pieces.cut(state.exchange["outer"], fragment_index)
        parts = jax.tree.map(blend, pieces.cut(params, fragment_index), outer)
        params = pieces.paste(params, parts, fragment_index)
        return state.replace(params=reshard(params, layout.parameter, layout))

    return alone._replace(init=init, gradient=gradient, update=update)


def turn(step: jax.Array, *, period: int, fragments: int) -> tuple[jax.Array, jax.Array]:
    """Return which fragment is sent after `step` steps, and whether one is.

    Fragment p is sent at steps congruent to floor(p period / P) modulo the period.

    Args:
      step: int32 scalar.
      period: steps between two exchanges of a fragment.
      fragments: P.
    """
    rest = step % period
    fragment_index = -(-rest * fragments // period)
    due = fragment_index * period < (rest + 1) * fragments
    return fragment_index, due & (step > 0)
