"""Gradient clipping: by norm, by value, adaptive (AGC)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.training.optimizers.matrices import each, sides

# A unit's weights count as at least this long, so that one that is 0 can begin to grow.
_LEAST_NORM = 1e-3


def clip_each(largest: float) -> optax.GradientTransformation:
    """Every number of a gradient, brought to between -largest and largest."""

    def one(gradient: Any) -> Any:
        return gradient.replace(jnp.clip(gradient.get_value(), -largest, largest))

    return optax.stateless(lambda updates, params: each(one, updates))


def clip_adaptively(ratio: float) -> optax.GradientTransformation:
    """Each unit's gradient, shortened to `ratio` times the length of the unit's weights.

    A unit is a column of a matrix, what one output is made of, or a whole vector; what makes logits
    is left alone (arXiv 2102.06171, section 4.1).
    """

    def one(gradient: Any, param: Any) -> Any:
        if role_of(param) == "output":
            return gradient
        g, axes = gradient.get_value(), logical_axes(param)
        _, rows, columns = sides(axes)
        longest = ratio * jnp.maximum(_norm(param.get_value(), rows or columns), _LEAST_NORM)
        norm = _norm(g, rows or columns)
        return gradient.replace(g * jnp.where(norm > longest, longest / jnp.maximum(norm, 1e-6), 1))

    return optax.stateless(lambda updates, params: each(one, updates, params))


def _norm(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(dims, keepdims=True))
