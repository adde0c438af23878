"""Gradient noise scale: estimate of the critical batch size.

Source: McCandlish et al. 2018 (arXiv 1812.06162), equations 2.9 and A.1. For the gradient G of the
whole distribution and the covariance S of one example's, the simple noise scale is tr(S) / |G|^2,
in examples. A batch of b examples has E |g|^2 = |G|^2 + tr(S) / b: the norms of two batches of
different sizes give both.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.training.exchange.exchange_program import ExchangeProgram
from jaxtrain.training.microbatches import split_microbatches
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.step import Program, TrainState

# Of the moving means of both estimates: one of a step alone is mostly noise itself.
_DECAY = 0.95


@dataclasses.dataclass(frozen=True)
class NoiseMeasured(ExchangeProgram):
    """The synchronous program, which every few steps takes its first microbatch's gradient too.

    Attributes:
      every: steps from one estimate to the next.
    """

    every: int

    def init(self, key: jax.Array, params: nnx.State | None = None) -> TrainState:
        """A fresh state; `exchange` holds the moving means of |G|^2 and of tr(S), float32 [2], and
        how much of them is there, since they begin with nothing, float32."""
        nothing = {"means": jnp.zeros(2), "weight": jnp.zeros(())}
        return dataclasses.replace(self.plain.init(key, params), exchange=nothing)

    def state_shardings(self, state: TrainState) -> TrainState:
        """A NamedSharding for every array of a state."""
        everywhere = jax.tree.map(lambda _: self.layout.named(P()), state.exchange)
        return dataclasses.replace(self.plain.state_shardings(state), exchange=everywhere)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """One optimizer step; its metrics have `noise_scale`, in rows of the batch, too: the
        quotient of the means so far, 0 before the first."""
        kept, at = state.exchange, _of_plain(state)
        grads, metrics, statistics = self.plain.gradients(at, batch)
        parts = self.plain.accumulation
        rows = jax.tree.leaves(batch)[0].shape[0]
        large = jnp.square(optax.global_norm(grads))

        def estimate() -> dict[str, jax.Array]:
            micro = jax.tree.map(lambda x: x[0], split_microbatches(batch, parts))
            one = dataclasses.replace(self.plain, accumulation=1)
            small = jnp.square(optax.global_norm(one.gradients(at, micro)[0]))
            found = jnp.stack(signal_and_noise(small, large, rows // parts, rows))
            weight = _DECAY * kept["weight"] + (1 - _DECAY)
            return {"means": _DECAY * kept["means"] + (1 - _DECAY) * found, "weight": weight}

        kept = jax.lax.cond(state.step % self.every == 0, estimate, lambda: kept)
        curvature = self.plain.estimate_curvature(at, batch)
        after, metrics = self.plain.update(at, grads, metrics, statistics, curvature)
        signal, noise = kept["means"]
        metrics["noise_scale"] = noise / jnp.where(signal == 0, 1.0, signal)
        return dataclasses.replace(after, exchange=kept), metrics

    def consensus(self, state: TrainState) -> TrainState:
        """As of the synchronous program."""
        return self.plain.consensus(_of_plain(state))

    def trained(self, state: TrainState) -> TrainState:
        """As of the synchronous program, without the means."""
        return self.plain.trained(_of_plain(state))

    def with_weights(
        self, state: TrainState, params: nnx.State, statistics: nnx.State
    ) -> TrainState:
        """As of the synchronous program; the means stay."""
        after = self.plain.with_weights(_of_plain(state), params, statistics)
        return dataclasses.replace(after, exchange=state.exchange)


def _of_plain(state: TrainState) -> TrainState:
    """The state of the synchronous program."""
    return dataclasses.replace(state, exchange=())


def signal_and_noise(
    small: jax.Array, large: jax.Array, few: int, many: int
) -> tuple[jax.Array, jax.Array]:
    """Unbiased estimates of |G|^2 and of tr(S), either of which may come out below 0.

    Args:
      small: |g|^2 of a batch of few examples.
      large: |g|^2 of one of many.
      few: examples of the one.
      many: examples of the other.
    """
    signal = (many * large - few * small) / (many - few)
    return signal, (small - large) / (1 / few - 1 / many)


def with_noise(every: int, program: Program | ExchangeProgram) -> Program | ExchangeProgram:
    """Return a program that measures its noise every `every` steps; 0: the same program."""
    if every == 0:
        return program
    assert isinstance(program, Program), "what takes gradients in another way is rejected"
    return NoiseMeasured(program, every)
