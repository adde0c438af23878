"""Streaming DiLoCo (arXiv 2501.18512): fragments synchronized in turn, overlapped with steps.

DiLoCo sends all parameters at once, and all replicas wait. Here each fragment has its turn once a
period, at a step of its own. Its mean is computed during the next steps, and the result of the
outer step is mixed into the replicas' parameters when it arrives. Letters: k replicas, P fragments.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import reshard
from jaxtrain.training.exchange.exchange_program import ExchangeProgram
from jaxtrain.training.exchange.fragments import Fragments
from jaxtrain.training.exchange.replicas import Replicas, distance
from jaxtrain.training.exchange.rules import DiLoCo
from jaxtrain.training.exchange.shares import shares
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Streaming(ExchangeProgram):
    """DiLoCo of a fragment at a time.

    The outer step is taken as soon as a fragment's mean is there, with nobody looking: until it
    comes, `delay` steps after it was sent, the outer parameters alone have it. They are part of the
    state, and so is what is on its way.

    Attributes:
      rule: the outer step, and after how many steps a fragment has its turn again.
      fragments: how many there are, one's turn being at most one's a step.
      delay: steps from when a fragment is sent to when it comes.
      mixing: the part of what they have that replicas keep when it comes.
    """

    rule: DiLoCo
    fragments: int
    delay: int
    mixing: float

    @functools.cached_property
    def _replicas(self) -> Replicas:
        return Replicas(self.plain, self.rule)

    @property
    def _pieces(self) -> Fragments:
        return Fragments(self.fragments)

    def init(self, key: jax.Array, params: nnx.State | None = None) -> TrainState:
        """As of DiLoCo's; `targets` [k, P] are those since each fragment's last turn."""
        state = self._replicas.init(key, params)
        targets = jnp.zeros((self.replicas, self.fragments), jnp.float32)
        return dataclasses.replace(state, exchange={**state.exchange, "targets": targets})

    def state_shardings(self, state: TrainState) -> TrainState:
        """As of DiLoCo's."""
        return self._replicas.state_shardings(state)

    def turn(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return which fragment is sent after `step` steps, and whether one is.

        Fragment p's turn is where steps and floor(p period / P) leave the same rest over periods.
        """
        rest = step % self.rule.period
        place = -(-rest * self.fragments // self.rule.period)
        due = place * self.rule.period < (rest + 1) * self.fragments
        return place, due & (step > 0)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """One step of every replica on its rows; one fragment at most is sent, one comes.

        Returns:
          As of DiLoCo's; `replica_spread` is of the last fragment that was sent.
        """
        if self.delay:
            # What is sent is there as the step begins, and the step does not wait for it.
            state = self._in_turn(self._apply_outer_step, state.step, state)
        after, metrics = self._replicas.alone(state, batch)
        if not self.delay:
            after = self._in_turn(self._apply_outer_step, after.step, after)
        after = self._in_turn(self._come, after.step - self.delay, after)
        return after, {**metrics, "replica_spread": after.exchange["spread"]}

    def _in_turn(
        self, function: Callable[..., TrainState], step: jax.Array, state: TrainState
    ) -> TrainState:
        place, due = self.turn(step)
        if self.fragments == self.rule.period:
            # Every step has one's turn: without a branch, which the compiler runs as a whole.
            return function(state, place, due)
        return jax.lax.cond(
            due, lambda state: function(state, place, True), lambda state: state, state
        )

    def _apply_outer_step(
        self, state: TrainState, place: jax.Array, due: jax.Array | bool
    ) -> TrainState:
        """The outer step of a fragment; the replicas' parameters stay."""
        memory, cut = dict(state.exchange), functools.partial(self._pieces.cut, place=place)
        targets, spread = memory.pop("targets"), memory.pop("spread")
        seen = jax.lax.dynamic_index_in_dim(targets, place, 1, keepdims=False)
        params: Any = cut(reshard(state.params, self.layout.moment, self.layout))
        before = {name: cut(tree) for name, tree in memory.items()}
        told, after, agreed = self.rule.exchange(
            dataclasses.replace(state, params=params), before, shares(seen)
        )
        after = jax.tree.map(functools.partial(jnp.where, due), after, before)
        begun = due & (jnp.arange(self.fragments) == place)
        return dataclasses.replace(
            state,
            statistics=_where(due, told.statistics, state.statistics),
            exchange={
                "targets": jnp.where(begun, 0.0, targets),
                "spread": jnp.where(due, distance(params, agreed), spread),
                **{
                    name: self._pieces.paste(tree, after[name], place)
                    for name, tree in memory.items()
                },
            },
        )

    def _come(self, state: TrainState, place: jax.Array, due: jax.Array | bool) -> TrainState:
        """What the outer step made of a fragment, mixed into what every replica has."""
        layout, pieces = self.layout, self._pieces
        params = reshard(state.params, layout.moment, layout)

        def mixed(own: jax.Array, outer: jax.Array) -> jax.Array:
            kept = self.mixing * own.astype(jnp.float32) + (1 - self.mixing) * outer
            return jnp.where(due, kept.astype(own.dtype), own)

        outer = pieces.cut(state.exchange["outer"], place)
        parts = jax.tree.map(mixed, pieces.cut(params, place), outer)
        params = pieces.paste(params, parts, place)
        return dataclasses.replace(state, params=reshard(params, layout.parameter, layout))

    def consensus(self, state: TrainState) -> TrainState:
        """As of DiLoCo's."""
        return self._replicas.consensus(state)

    def trained(self, state: TrainState) -> TrainState:
        """As of DiLoCo's."""
        return self._replicas.trained(state)

    def with_weights(
        self, state: TrainState, params: nnx.State, statistics: nnx.State
    ) -> TrainState:
        """As of DiLoCo's."""
        return self._replicas.with_weights(state, params, statistics)


def _where(due: jax.Array | bool, tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(due, a, b), tree, other)
