"""Sharpness-aware minimization (SAM).

Source: Foret et al. 2020 (arXiv 2010.01412), algorithm 1 with p = 2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import reshard
from jaxtrain.training.exchange.exchange_program import ExchangeProgram
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.step import Program, TrainState

_LEAST_NORM = 1e-12  # of a gradient that is divided by it


@dataclasses.dataclass(frozen=True)
class SharpnessAware(ExchangeProgram):
    """The synchronous program, its gradients taken at w + radius g / |g|, g that at w.

    Attributes:
      radius: rho, in the parameters' own units, over all of them together.
    """

    radius: float

    def init(self, key: jax.Array, params: nnx.State | None = None) -> TrainState:
        """The synchronous program's: nothing is kept besides."""
        return self.plain.init(key, params)

    def state_shardings(self, state: TrainState) -> TrainState:
        """A NamedSharding for every array of a state."""
        return self.plain.state_shardings(state)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """One optimizer step of two passes.

        Returns:
          The new state and the metrics: those of the loss at w; `grad_norm` of the gradient that
          the step is taken with; and `sharpness`, how much more the loss is there.
        """
        at = self.plain.trained(state)
        uphill, metrics, statistics = self.plain.gradients(at, batch)
        step = self.radius / (optax.global_norm(uphill) + _LEAST_NORM)
        uphill = reshard(uphill, self.layout.parameter, self.layout)

        def moved(w: jax.Array, g: jax.Array) -> jax.Array:
            return (w.astype(jnp.float32) + step * g).astype(w.dtype)

        there = dataclasses.replace(at, params=jax.tree.map(moved, at.params, uphill))
        grads, found, _ = self.plain.gradients(there, batch)
        metrics["sharpness"] = found["loss"] - metrics["loss"]
        return self.plain.update(state, grads, metrics, statistics)

    def consensus(self, state: TrainState) -> TrainState:
        """As of the synchronous program."""
        return self.plain.consensus(state)

    def trained(self, state: TrainState) -> TrainState:
        """As of the synchronous program."""
        return self.plain.trained(state)

    def with_weights(
        self, state: TrainState, params: nnx.State, statistics: nnx.State
    ) -> TrainState:
        """As of the synchronous program."""
        return self.plain.with_weights(state, params, statistics)


def with_sharpness(radius: float, program: Program | ExchangeProgram) -> Program | ExchangeProgram:
    """The program whose gradients are taken so far uphill; 0: the same."""
    if radius == 0:
        return program
    assert isinstance(program, Program), "replicas that agree in another way are rejected"
    return SharpnessAware(program, radius)
