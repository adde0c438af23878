"""Sharpness-aware minimization (SAM).

Source: Foret et al. 2020 (arXiv 2010.01412), algorithm 1 with p = 2.
"""

import jax
import jax.numpy as jnp
import optax

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import reshard
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.state import Gradient, TrainState
from jaxtrain.training.step import Step, transform

_LEAST_NORM = 1e-12  # of a gradient that is divided by it


@transform
def minimize_sharpness(step: Step, radius: float) -> Step:
    """The step whose gradients are taken at w + radius g / |g|, g that at w.

    Metrics are those of the loss at w; `grad_norm` is of the gradient that the step is taken with,
    and `sharpness` how much more the loss is there.

    Args:
      step: whose gradient it takes twice.
      radius: rho, in the parameters' own units, over all of them together.
    """
    layout = step.setup.layout

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        at = step.current_state(state)
        here = step.gradient(at, batch, counts)
        length = radius / (optax.global_norm(here.grads) + _LEAST_NORM)
        uphill = reshard(here.grads, layout.parameter, layout)

        def move(w: jax.Array, g: jax.Array) -> jax.Array:
            return (w.astype(jnp.float32) + length * g).astype(w.dtype)

        there = at.replace(params=jax.tree.map(move, at.params, uphill))
        found = step.gradient(there, batch, counts)
        sharpness = found.metrics["loss"] - here.metrics["loss"]
        return here._replace(grads=found.grads, metrics={**here.metrics, "sharpness": sharpness})

    return step._replace(gradient=gradient)
