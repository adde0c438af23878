"""Replicas with their own parameters: local SGD, DiLoCo, gossip.

Every replica takes ordinary steps on its own rows, its loss the mean over its own targets, without
any collective over `data`. A rule then brings the replicas together. Means over replicas weigh each
by the targets it has seen since the last exchange (as FedAvg does, arXiv 1602.05629): where the
update is linear in the gradient, a step with an exchange after it is then exactly the synchronous
step, however the targets are spread; but for auxiliary losses, whose means are over a replica's own
tokens. Letter: k replicas.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import reshard
from jaxtrain.training.exchange.exchange_program import (
    REPLICA,
    ExchangeProgram,
    over_replicas,
    replica_shardings,
    spread_out,
    to_replicas,
)
from jaxtrain.training.exchange.rules import Agreement
from jaxtrain.training.exchange.shares import shares
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.optimizers.average import averaged_params, restart_averages
from jaxtrain.training.step import Program, TrainState


@dataclasses.dataclass(frozen=True)
class Replicas(ExchangeProgram):
    """Replicas with their own parameters and optimizer state, and the rule that makes them agree.

    Attributes:
      rule: how and how often.
    """

    rule: Agreement

    def init(self, key: jax.Array, params: nnx.State | None = None) -> TrainState:
        """A fresh state, all replicas alike; the same parameters as the synchronous program's.

        `exchange` holds, beside the rule's memory, the `targets` that each replica has seen since
        the last exchange and its `spread` at it, both float32 [k].
        """
        state = self.plain.init(key, params)
        memory = self.rule.first_memory(state.params)
        zeros = jnp.zeros(self.replicas, jnp.float32)
        no_step: Any = ()
        own_parts = dataclasses.replace(state, step=no_step)
        return dataclasses.replace(
            to_replicas(own_parts, self.replicas),
            step=state.step,
            exchange={"targets": zeros, "spread": zeros, **memory},
        )

    def state_shardings(self, state: TrainState) -> TrainState:
        """A NamedSharding for every array of a state."""
        layout = self.layout
        of: dict[str, Any] = {
            "step": layout.named(P()),
            "params": replica_shardings(state.params, layout.parameter, layout),
            "opt_state": replica_shardings(state.opt_state, layout.moment, layout),
            "statistics": replica_shardings(state.statistics, layout.weight, layout),
            "loss_scale": layout.named(REPLICA),
            "exchange": replica_shardings(state.exchange, layout.moment, layout),
        }
        return TrainState(**of)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """One step of every replica on its rows and, every `period` steps, an exchange.

        Returns:
          The new state and the metrics, with one number [k] for each replica: of its own loss, of
          its own gradient's norm, and `replica_spread`, its relative distance from what was agreed
          on at the last exchange. `weight`, its targets that count, is what their means are to be
          weighed with.
        """
        after, metrics = self.alone(state, batch)
        if self.rule.period == 1:
            after = self._agree(after)
        else:
            due = after.step % self.rule.period == 0
            after = jax.lax.cond(due, self._agree, lambda state: state, after)
        return after, {**metrics, "replica_spread": after.exchange["spread"]}

    def alone(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """Take one step of every replica on its rows; return its metrics. Nothing is sent."""
        dims: dict[str, Any] = {
            "step": None, "params": 0, "opt_state": 0, "statistics": 0, "loss_scale": 0,
        }  # fmt: skip
        specs = TrainState(**dims)
        step = self.on_each_replica(_own_step, (specs, 0), (specs, 0))
        after, metrics = step(dataclasses.replace(state, exchange=()), self.rows_of_replicas(batch))
        exchange = dict(state.exchange)
        exchange["targets"] += spread_out(metrics["weight"], exchange["targets"])
        # The same for all: a scalar needs no mean.
        metrics["learning_rate"] = jnp.asarray(self.plain.schedule(state.step), jnp.float32)
        return dataclasses.replace(after, exchange=exchange), metrics

    def _agree(self, state: TrainState) -> TrainState:
        layout, memory = self.layout, dict(state.exchange)
        weights, _ = shares(memory.pop("targets")), memory.pop("spread")
        # Each device exchanges its shard of the update (ZeRO 1 and up).
        before = reshard(state.params, layout.moment, layout)
        state = dataclasses.replace(state, params=before)
        state, memory, agreed = self.rule.exchange(state, memory, weights)
        return dataclasses.replace(
            state,
            params=reshard(state.params, layout.parameter, layout),
            exchange={
                "targets": jnp.zeros_like(weights),
                "spread": distance(before, agreed),
                **memory,
            },
        )

    def consensus(self, state: TrainState) -> TrainState:
        """The plain mean over replicas; the optimizer's state, which nothing there reads, is left
        out."""
        with self.layout.active():
            return _mean(self, True, state)

    def trained(self, state: TrainState) -> TrainState:
        """The plain mean over replicas, without the optimizer's state."""
        with self.layout.active():
            return _mean(self, False, state)

    def with_weights(
        self, state: TrainState, params: nnx.State, statistics: nnx.State
    ) -> TrainState:
        """The rule's memory restarts, as in `init`: all replicas agree on these weights."""
        layout, copies = self.layout, to_replicas((params, statistics), self.replicas)
        moved = reshard(copies[0], layout.moment, layout)
        zeros = {name: jnp.zeros_like(state.exchange[name]) for name in ("targets", "spread")}
        memory = self.rule.first_memory(reshard(params, layout.moment, layout))
        return dataclasses.replace(
            state,
            params=copies[0],
            opt_state=restart_averages(state.opt_state, moved),
            statistics=copies[1],
            exchange={**zeros, **memory},
        )


def _own_step(program: Program, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
    state, metrics = program.train_step(state, batch)
    del metrics["learning_rate"]
    metrics["weight"] = program.objective.counts(batch)["weight"]
    return state, metrics


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mean(program: Replicas, of_averages: bool, state: TrainState) -> TrainState:
    """One model: the mean of the replicas' parameters, or of the averages they keep, if any."""
    layout = program.layout
    average = averaged_params(state.opt_state, state.params) if of_averages else None
    kept = state.params if average is None else average
    dtype = program.plain.precision.params
    params = over_replicas(lambda x: x.mean(0, dtype=jnp.float32).astype(dtype), kept)
    return TrainState(
        step=state.step,
        params=reshard(params, layout.parameter, layout),
        opt_state=(),
        statistics=over_replicas(lambda x: x.mean(0), state.statistics),
        loss_scale=state.loss_scale.mean(0),
    )


def distance(tree: Any, agreed: Any) -> jax.Array:
    """|replica - agreed| / |agreed| of every replica, float32 [k]."""

    def squares(x: jax.Array) -> jax.Array:
        return jnp.square(x.astype(jnp.float32)).sum(range(1, x.ndim))

    def total(tree: Any) -> jax.Array:
        return jnp.sqrt(sum(squares(x) for x in jax.tree.leaves(tree)))

    difference = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b, tree, agreed)
    return total(difference) / jnp.maximum(total(agreed), jnp.finfo(jnp.float32).tiny)
