"""Gradient noise scale: estimate of the critical batch size.

Source: McCandlish et al. 2018 (arXiv 1812.06162), equations 2.9 and A.1. For the gradient G of the
whole distribution and the covariance S of one example's, the simple noise scale is tr(S) / |G|^2,
in examples. A batch of b examples has E |g|^2 = |G|^2 + tr(S) / b: the norms of two batches of
different sizes give both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.training.microbatches import split_microbatches
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import Gradient, TrainState
from jaxtrain.training.step import Step, transform

# Of the moving means of both estimates: one of a step alone is mostly noise itself.
_DECAY = 0.95


@transform
def measure_noise(step: Step, every: int) -> Step:
    """The step that measures its noise scale by its first microbatch's gradient.

    Its metrics have `noise_scale`, in rows of the batch: the quotient of the means so far, 0 before
    the first. `TrainState.exchange` has the moving means of |G|^2 and of tr(S), float32 [2], and
    how much of them is there, since they begin with nothing, float32.

    Args:
      step: of several microbatches.
      every: steps from one estimate to the next.
    """
    of_one = step.rebuild(accumulation=1)
    parts, layout = step.setup.accumulation, step.setup.layout

    def init(*arguments: Any) -> TrainState:
        nothing = {"means": jnp.zeros(2), "weight": jnp.zeros(())}
        return step.init(*arguments).replace(exchange=nothing)

    def shardings(state: TrainState) -> TrainState:
        everywhere = jax.tree.map(lambda _: layout.named(P()), state.exchange)
        return step.shardings(state).replace(exchange=everywhere)

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        found, kept = step.gradient(state, batch, counts), state.exchange
        rows = jax.tree.leaves(batch)[0].shape[0]
        large = jnp.square(optax.global_norm(found.grads))

        def estimate() -> dict[str, jax.Array]:
            micro = jax.tree.map(lambda x: x[0], split_microbatches(batch, parts))
            small = jnp.square(optax.global_norm(of_one.gradient(state, micro).grads))
            pair = jnp.stack(signal_and_noise(small, large, rows // parts, rows))
            weight = _DECAY * kept["weight"] + (1 - _DECAY)
            return {"means": _DECAY * kept["means"] + (1 - _DECAY) * pair, "weight": weight}

        kept = jax.lax.cond(state.step % every == 0, estimate, lambda: kept)
        signal, noise = kept["means"]
        scale = noise / jnp.where(signal == 0, 1.0, signal)
        return found._replace(metrics={**found.metrics, "noise_scale": scale}, exchange=kept)

    def base_state(state: TrainState) -> TrainState:
        return state.replace(exchange=())

    def set_weights(state: TrainState, *weights: Any) -> TrainState:
        return step.set_weights(base_state(state), *weights).replace(exchange=state.exchange)

    return step._replace(
        init=init,
        shardings=shardings,
        gradient=gradient,
        current_state=lambda state: step.current_state(base_state(state)),
        eval_state=lambda state: step.eval_state(base_state(state)),
        set_weights=set_weights,
    )


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
