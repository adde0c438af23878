"""Rules to combine replicas: averaging, outer optimizer (DiLoCo), gossip.

Means over replicas weigh each by the targets it has seen since the last exchange (as FedAvg does,
arXiv 1602.05629). Letter: k replicas.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.parallel.sharding import on_each_device
from jaxtrain.training.exchange.exchange import Graph, neighbours
from jaxtrain.training.exchange.per_replica import expand_per_replica, over_replicas
from jaxtrain.training.step import TrainState

Memory = dict[str, Any]


class Agreement(Protocol):
    """Rule that combines replicas with their own parameters.

    Attributes:
      period: steps between two exchanges.
    """

    @property
    def period(self) -> int: ...

    def first_memory(self, params: nnx.State) -> Memory:
        """Return the rule's initial memory, from the parameters of a new train
        state.
        """
        ...

    def exchange(
        self, state: TrainState, memory: Memory, weights: jax.Array
    ) -> tuple[TrainState, Memory, nnx.State]:
        """Return the replicas' states after an exchange, the new memory, and the combined
        parameters.

        Args:
          state: every array [k, ...], parameters in the moments' layout.
          memory: from `first_memory` or the last exchange.
          weights: float32 [k], their sum 1.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Averaging:
    """Local SGD (arXiv 1805.09767): parameters, moments and statistics become their means.

    Moments are averaged too, so that a period of 1 equals the synchronous step also with momentum.
    """

    period: int

    def first_memory(self, params: nnx.State) -> Memory:
        return {}

    def exchange(
        self, state: TrainState, memory: Memory, weights: jax.Array
    ) -> tuple[TrainState, Memory, nnx.State]:
        mean = functools.partial(_mean_everywhere, weights=weights)
        params = jax.tree.map(mean, state.params)
        state = dataclasses.replace(
            state,
            params=params,
            opt_state=jax.tree.map(mean, state.opt_state),
            statistics=jax.tree.map(mean, state.statistics),
        )
        return state, memory, params


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """DiLoCo (arXiv 2311.08105): an outer Nesterov step on the replicas' mean movement.

    The optimizer's moments stay with their replica, as in the paper.
    """

    period: int
    learning_rate: float
    momentum: float

    def first_memory(self, params: nnx.State) -> Memory:
        outer = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return {"outer": outer, "momentum": jax.tree.map(jnp.zeros_like, outer)}

    def exchange(
        self, state: TrainState, memory: Memory, weights: jax.Array
    ) -> tuple[TrainState, Memory, nnx.State]:
        means = over_replicas(functools.partial(_mean, weights=weights), state.params)
        moved = jax.tree.map(jnp.subtract, memory["outer"], means)
        momentum = jax.tree.map(lambda m, d: self.momentum * m + d, memory["momentum"], moved)
        outer = jax.tree.map(
            lambda old, d, m: old - self.learning_rate * (d + self.momentum * m),
            memory["outer"],
            moved,
            momentum,
        )
        mean = functools.partial(_mean_everywhere, weights=weights)
        after = dataclasses.replace(
            state,
            params=_zip(_everywhere, state.params, outer),
            statistics=jax.tree.map(mean, state.statistics),
        )
        return (
            after,
            {"outer": outer, "momentum": momentum},
            _zip(_everywhere, state.params, means),
        )


@dataclasses.dataclass(frozen=True)
class Gossip:
    """D-PSGD (arXiv 1705.09056): the mean with all neighbors in a graph, after every step.

    The mixing matrix has 1 / (1 + neighbors) on the diagonal and on edges: the mean
    over all replicas is preserved, and the distance from it shrinks by the largest singular value
    below 1: on a ring |1/3 + 2/3 cos(2 pi / k)| or more.

    Attributes:
      graph: the name of the graph.
    """

    graph: Graph = "ring"
    period: int = 1

    def first_memory(self, params: nnx.State) -> Memory:
        return {}

    def exchange(
        self, state: TrainState, memory: Memory, weights: jax.Array
    ) -> tuple[TrainState, Memory, nnx.State]:
        params = mix_with_neighbours(state.params, self.graph)
        state = dataclasses.replace(
            state, params=params, statistics=mix_with_neighbours(state.statistics, self.graph)
        )
        return state, memory, params


def mix_with_neighbours(tree, graph: Graph = "ring"):  # noqa: ANN001, ANN201
    """Return the mean of each replica's arrays [k, ...] with those of its neighbors in
    the graph.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    specs = [jax.typeof(x).sharding.spec for x in leaves]
    mix = functools.partial(_mix, graph)
    return structure.unflatten(on_each_device(mix, (specs,), specs)(leaves))


def _mix(graph: Graph, leaves: list[jax.Array]) -> list[jax.Array]:
    edges = neighbours(graph, jax.lax.axis_size("data"))

    def one(x: jax.Array) -> jax.Array:
        total = x.astype(jnp.float32)
        for to in edges:
            total += jax.lax.ppermute(x, "data", list(enumerate(to)))
        return (total / (1 + len(edges))).astype(x.dtype)

    return [one(x) for x in leaves]


def _mean(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the weighted mean [...] of an array [k, ...], in float32."""
    return (x.astype(jnp.float32) * expand_per_replica(weights, x)).sum(0)


def _everywhere(like: jax.Array, x: jax.Array) -> jax.Array:
    """Return an array [...] copied to each replica: [k, ...], with the dtype and layout
    of `like`.
    """
    return jnp.broadcast_to(
        x.astype(like.dtype), like.shape, out_sharding=jax.typeof(like).sharding
    )


def _mean_everywhere(x: jax.Array, weights: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x  # counts of steps
    return _everywhere(x, _mean(x, weights))


def _zip(function, tree, other):  # noqa: ANN001, ANN202
    """Apply `function` to the leaves of two trees that differ only in their dimension names."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        function(a, b) for a, b in zip(leaves, jax.tree.leaves(other), strict=True)
    )
