"""Streaming DiLoCo (arXiv 2501.18512): fragments synchronized in turn, overlapped with steps.

DiLoCo sends all parameters at once, and all replicas wait. Here each fragment has its turn once a
period, at a step of its own. Its mean is computed during the next steps, and the result of the
outer step is mixed into the replicas' parameters when it arrives. Fragments are equal in size and
sharded on every device. Letters: k replicas, P fragments, S numbers of a fragment in an array, over
all devices.
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
from jaxtrain.parallel.sharding import is_variable, logical_axes, on_each_device, parts_of, reshard
from jaxtrain.training.exchange.per_replica import replicas_of, shares
from jaxtrain.training.exchange.replicas import distance, separate
from jaxtrain.training.exchange.rules import DiLoCo
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import Gradient, TrainState, Updated
from jaxtrain.training.step import Step, transform

Arrays = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Strided fragments: each has every `count`-th layer, from its own on (as in arXiv 2501.18512).

    If an array has no layers, or a number that `count` does not divide, its first dimension that
    divides on a device is split instead: rows of a table, features of a vector. If there is none,
    its flattened elements are: fragments then depend on the mesh. Elementwise update rules do not
    mind, and every fragment has the same size.

    Attributes:
      count: of fragments.
    """

    count: int

    def cut(self, tree: Any, fragment_index: jax.Array) -> Arrays:
        """Return a fragment of each named array: [S], or [k, S] of replicas' arrays.

        Args:
          tree: of named arrays.
          fragment_index: which fragment, an int32 scalar from 0.
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
        """Return the tree with a fragment in place of the one that `cut` returns."""
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

    A fragment has different parts on as many devices as the array has.
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

    The outer step is taken as soon as a fragment's mean is there, with nobody looking: until it
    comes, `delay` steps after it was sent, the outer parameters alone have it. They are part of the
    state, and so is what is on its way. State and metrics are as in `agree`, but for `targets`
    [k, P], which are those since each fragment's last turn; `replica_spread` is of the last
    fragment that was sent.

    Args:
      step: that each replica takes.
      rule: the outer step, and after how many steps a fragment has its turn again.
      fragments: how many there are, one's turn being at most one's a step.
      delay: steps from when a fragment is sent to when it comes.
      mixing: the part of what they have that replicas keep when it comes.
    """
    alone, layout, pieces = separate(step, rule), step.setup.layout, Fragments(fragments)

    def init(*arguments: Any) -> TrainState:
        state = alone.init(*arguments)
        targets = jnp.zeros((replicas_of(step.setup), fragments), jnp.float32)
        return state.replace(exchange={**state.exchange, "targets": targets})

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        if delay:
            # What is sent is there as the step begins, and the step does not wait for it.
            state = in_turn(apply_outer_step, state.step, state)
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
            # Every step has one's turn: without a branch, which the compiler runs as a whole.
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

    Fragment p's turn is where steps and floor(p period / P) leave the same rest over periods.

    Args:
      step: int32 scalar.
      period: steps after which a fragment has its turn again.
      fragments: P.
    """
    rest = step % period
    fragment_index = -(-rest * fragments // period)
    due = fragment_index * period < (rest + 1) * fragments
    return fragment_index, due & (step > 0)
