"""Asynchronous data parallelism with stale gradients.

A parameter server takes each worker's gradient when it comes; by then the parameters have moved on.
With as many workers as take turns, each gradient is `staleness` steps old. Here all devices take
that step together, in one program whose numbers are those of such a run, on any mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import reshard, shardings
from jaxtrain.training.exchange.exchange_program import ExchangeProgram
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Asynchronous(ExchangeProgram):
    """w(t+1) = w(t) + update of g(w(t - staleness)); before the first steps all are the first.

    Attributes:
      staleness: how many steps old the parameters are that a gradient is taken at.
      compensation: lambda of what is added to a gradient for the way since, g g (w(t) - w(t -
        staleness)) times lambda, the diagonal of its outer product standing for the Hessian
        (DC-ASGD, arXiv 1609.08326, equation 10).
    """

    staleness: int
    compensation: float

    def init(self, key: jax.Array, params: nnx.State | None = None) -> TrainState:
        """A fresh state; `exchange` holds the parameters of the last steps, the oldest first."""
        return self._since(self.plain.init(key, params))

    def _since(self, state: TrainState) -> TrainState:
        """The state as if it had always had its parameters."""
        past = tuple(jax.tree.map(jnp.copy, state.params) for _ in range(self.staleness))
        return dataclasses.replace(state, exchange=past)

    def state_shardings(self, state: TrainState) -> TrainState:
        """A NamedSharding for every array of a state."""
        layout = self.layout
        past = tuple(shardings(one, layout.parameter, layout) for one in state.exchange)
        return dataclasses.replace(self.plain.state_shardings(state), exchange=past)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """One optimizer step; the loss is that of the old parameters."""
        now, past = self.trained(state), (*state.exchange, state.params)
        then = dataclasses.replace(now, params=past[0])
        grads, metrics, statistics = self.plain.gradients(then, batch)
        if self.compensation:
            moment = self.layout.moment
            moved = (reshard(tree, moment, self.layout) for tree in (grads, now.params, past[0]))
            grads = jax.tree.map(self._compensate, *moved)
        after, metrics = self.plain.update(now, grads, metrics, statistics)
        return dataclasses.replace(after, exchange=past[1:]), metrics

    def _compensate(self, g: jax.Array, now: jax.Array, then: jax.Array) -> jax.Array:
        way = now.astype(jnp.float32) - then.astype(jnp.float32)
        return g + self.compensation * g * g * way

    def consensus(self, state: TrainState) -> TrainState:
        """As of the synchronous program: there is one model."""
        return self.plain.consensus(self.trained(state))

    def trained(self, state: TrainState) -> TrainState:
        """As of the synchronous program, without the parameters of the last steps."""
        return dataclasses.replace(state, exchange=())

    def with_weights(
        self, state: TrainState, params: nnx.State, statistics: nnx.State
    ) -> TrainState:
        """The old parameters are these too: gradients of others would mean nothing to them."""
        return self._since(self.plain.with_weights(self.trained(state), params, statistics))
