"""Replicas with their own parameters, and the rules that combine them: local SGD, DiLoCo, gossip.

Every replica takes ordinary steps on its own rows, its loss the mean over its own targets, without
any collective over `data`. A rule then combines the replicas. Means over replicas weight each
by the targets it has seen since the last exchange (as FedAvg does, arXiv 1602.05629): where the
update is linear in the gradient, a step with an exchange after it is then exactly the synchronous
step, however the targets are distributed; except for auxiliary losses, whose means are over a
replica's own tokens. Letter: k replicas.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import on_each_device, reshard
from jaxtrain.training.exchange.exchange import Graph, neighbours
from jaxtrain.training.exchange.per_replica import (
    REPLICA,
    expand_per_replica,
    on_each_replica,
    over_replicas,
    replica_shardings,
    replicas_of,
    rows_of_replicas,
    shares,
    to_replicas,
)
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import Gradient, TrainState, Updated
from jaxtrain.training.step import Step, averaged_params, restart_averages, transform

# -- rules to combine replicas ---------------------------------------------------------------------
# Means over replicas weigh each by the targets it has seen since the last exchange (as FedAvg does,
# arXiv 1602.05629). Letter: k replicas.

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
        means = over_replicas(functools.partial(_mean_by_weight, weights=weights), state.params)
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


def _mean_by_weight(x: jax.Array, weights: jax.Array) -> jax.Array:
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
    return _everywhere(x, _mean_by_weight(x, weights))


def _zip(function, tree, other):  # noqa: ANN001, ANN202
    """Apply `function` to the leaves of two trees that differ only in their dimension names."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        function(a, b) for a, b in zip(leaves, jax.tree.leaves(other), strict=True)
    )


# -- steps of replicas -----------------------------------------------------------------------------


@transform
def agree(step: Step, rule: Agreement) -> Step:
    """Train replicas with their own parameters, which agree by the rule every `rule.period` steps.

    Metrics have one value per replica [k]: its own loss, its own gradient's norm, and
    `replica_spread`, its relative distance from the result of the last exchange.

    Args:
      step: of each replica.
      rule: how and how often they are combined.
    """
    alone = separate(step, rule)

    def update(state: TrainState, found: Gradient) -> Updated:
        done = alone.update(state, found)
        exchange = functools.partial(_exchange, step.setup, rule)
        if rule.period == 1:
            after = exchange(done.state)
        else:
            due = done.state.step % rule.period == 0
            after = jax.lax.cond(due, exchange, lambda state: state, done.state)
        spread = after.exchange["spread"]
        return done._replace(state=after, metrics={**done.metrics, "replica_spread": spread})

    return alone._replace(update=update)


def separate(step: Step, rule: Agreement) -> Step:
    """Train replicas with their own parameters and optimizer state, without communication.

    Metrics have one value per replica [k]. `weight`, its targets that count, is the weight for
    their means. `TrainState.exchange` has, in addition to the rule's memory, the `targets`
    that each replica has seen since the last exchange and its `spread` at it, both float32 [k].

    Args:
      step: of each replica.
      rule: its memory is initialized.
    """
    setup, replicas = step.setup, replicas_of(step.setup)
    layout = setup.layout
    dims: dict[str, Any] = {
        "step": None, "params": 0, "opt_state": 0, "statistics": 0, "loss_scale": 0, "guard": 0,
    }  # fmt: skip
    axes = TrainState(**dims)

    def init(*arguments: Any) -> TrainState:
        state = step.init(*arguments)
        memory = rule.first_memory(state.params)
        zeros = jnp.zeros(replicas, jnp.float32)
        no_step: Any = ()
        own = to_replicas(state.replace(step=no_step), replicas)
        return own.replace(step=state.step, exchange={"targets": zeros, "spread": zeros, **memory})

    def shardings(state: TrainState) -> TrainState:
        of: dict[str, Any] = {
            "step": layout.sharding_of(P()),
            "params": replica_shardings(state.params, layout.parameter, layout),
            "opt_state": replica_shardings(state.opt_state, layout.moment, layout),
            "statistics": replica_shardings(state.statistics, layout.weight, layout),
            "loss_scale": layout.sharding_of(REPLICA),
            "exchange": replica_shardings(state.exchange, layout.moment, layout),
            "guard": replica_shardings(state.guard, layout.moment, layout),
        }
        return TrainState(**of)

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        assert counts is None, "each replica divides by its own"
        run = on_each_replica(step, _own_gradient, (axes, 0), 0)
        found = run(state.replace(exchange=()), rows_of_replicas(setup, batch))
        return found._replace(exchange=state.exchange)

    def update(state: TrainState, found: Gradient) -> Updated:
        run = on_each_replica(step, _own_update, (axes, 0), (axes, 0))
        inner = state.replace(exchange=())
        after, metrics = run(inner, found._replace(exchange=()))
        exchange = dict(found.exchange)
        exchange["targets"] += expand_per_replica(metrics["weight"], exchange["targets"])
        # The same on all replicas: a scalar needs no mean.
        metrics["learning_rate"] = jnp.asarray(setup.schedule(state.step), jnp.float32)
        return Updated(after.replace(exchange=exchange), metrics)

    def mean(of_averages: bool) -> Callable[[TrainState], TrainState]:
        compiled = jax.jit(functools.partial(_mean_model, setup, of_averages))

        def active(state: TrainState) -> TrainState:
            with layout.active():
                return compiled(state)

        return active

    def set_weights(state: TrainState, params: nnx.State, statistics: nnx.State) -> TrainState:
        # The rule's memory restarts, as in `init`: all replicas agree on these weights.
        copies = to_replicas((params, statistics), replicas)
        moved = reshard(copies[0], layout.moment, layout)
        zeros = {name: jnp.zeros_like(state.exchange[name]) for name in ("targets", "spread")}
        memory = rule.first_memory(reshard(params, layout.moment, layout))
        return state.replace(
            params=copies[0],
            opt_state=restart_averages(state.opt_state, moved),
            statistics=copies[1],
            exchange={**zeros, **memory},
        )

    return step._replace(
        init=init,
        shardings=shardings,
        gradient=gradient,
        update=update,
        current_state=mean(of_averages=False),
        eval_state=mean(of_averages=True),
        set_weights=set_weights,
    )


def _own_gradient(step: Step, state: TrainState, batch: Batch) -> Gradient:
    found = step.gradient(state, batch)
    weight = step.setup.objective.counts(batch)["weight"]
    return found._replace(metrics={**found.metrics, "weight": weight})


def _own_update(step: Step, state: TrainState, found: Gradient) -> tuple[TrainState, Sums]:
    done = step.update(state, found)
    metrics = dict(done.metrics)
    del metrics["learning_rate"]
    return done.state, metrics


def _exchange(setup: Setup, rule: Agreement, state: TrainState) -> TrainState:
    """Return the replicas' states after an exchange."""
    layout, memory = setup.layout, dict(state.exchange)
    weights, _ = shares(memory.pop("targets")), memory.pop("spread")
    # Each device exchanges its shard of the update (ZeRO 1 and up).
    before = reshard(state.params, layout.moment, layout)
    state, memory, agreed = rule.exchange(state.replace(params=before), memory, weights)
    return state.replace(
        params=reshard(state.params, layout.parameter, layout),
        exchange={
            "targets": jnp.zeros_like(weights),
            "spread": distance(before, agreed),
            **memory,
        },
    )


def _mean_model(setup: Setup, of_averages: bool, state: TrainState) -> TrainState:
    """Return one model: the plain mean of the replicas' parameters, or of their weight averages if
    any.

    The result has no optimizer state.
    """
    layout = setup.layout
    average = averaged_params(state.opt_state, state.params) if of_averages else None
    kept = state.params if average is None else average
    dtype = setup.precision.params
    params = over_replicas(lambda x: x.mean(0, dtype=jnp.float32).astype(dtype), kept)
    return TrainState(
        step=state.step,
        params=reshard(params, layout.parameter, layout),
        opt_state=(),
        statistics=over_replicas(lambda x: x.mean(0), state.statistics),
        loss_scale=state.loss_scale.mean(0),
    )


def distance(tree: Any, agreed: Any) -> jax.Array:
    """Return |replica - agreed| / |agreed| of each replica, float32 [k]."""

    def squares(x: jax.Array) -> jax.Array:
        return jnp.square(x.astype(jnp.float32)).sum(range(1, x.ndim))

    def total(tree: Any) -> jax.Array:
        return jnp.sqrt(sum(squares(x) for x in jax.tree.leaves(tree)))

    difference = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b, tree, agreed)
    return total(difference) / jnp.maximum(total(agreed), jnp.finfo(jnp.float32).tiny)
