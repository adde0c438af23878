"""Layer norm and RMSNorm.

Letters: B batch, T length, D embed.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.parameters import Weights, constant, param
from jaxtrain.parallel.gathering import gather


@jax.named_scope("norm")
def layer_norm(x: jax.Array, scale: nnx.Param, bias: nnx.Param, *, epsilon: float) -> jax.Array:
    """Layer normalization (arXiv 1607.06450) over the last dimension, in float32."""
    return _normalize(True, epsilon, x, gather(scale), gather(bias))


@jax.named_scope("norm")
def rms_norm(x: jax.Array, scale: nnx.Param, *, epsilon: float, offset: float = 0.0) -> jax.Array:
    """Root-mean-square normalization (arXiv 1910.07467) over the last dimension, in float32.

    The normalized x is multiplied by offset + scale.
    """
    factor = gather(scale) + offset if offset else gather(scale)
    return _normalize(False, epsilon, x, factor, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(
    centered: bool, epsilon: float, x: jax.Array, factor: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """x over its root mean square, or its standard deviation where it is centered, times factor,
    plus bias. With a custom derivative: JAX's own saves x four times, in float32."""
    return _norm_forward(centered, epsilon, x, factor, bias)[0]


def _norm_forward(
    centered: bool, epsilon: float, x: jax.Array, factor: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Any]:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True) if centered else None
    # Two passes: mean(x^2) - mean(x)^2 cancels where the mean is large.
    x_centered = x32 if mean is None else x32 - mean
    inverse = jax.lax.rsqrt(jnp.square(x_centered).mean(-1, keepdims=True) + epsilon)
    y = x_centered * inverse * factor
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, mean, inverse, factor, bias)


def _norm_backward(
    centered: bool, epsilon: float, kept: Any, d_y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    del epsilon
    x, mean, inverse, factor, bias = kept
    x32, d_y = x.astype(jnp.float32), d_y.astype(jnp.float32)
    normed = (x32 if mean is None else x32 - mean) * inverse
    d_normed = d_y * factor
    d_x = d_normed - normed * (d_normed * normed).mean(-1, keepdims=True)
    if centered:
        d_x -= d_normed.mean(-1, keepdims=True)
    before = tuple(range(x.ndim - 1))
    d_factor = (d_y * normed).sum(before).astype(factor.dtype)
    d_bias = None if bias is None else d_y.sum(before).astype(bias.dtype)
    return (d_x * inverse).astype(x.dtype), d_factor, d_bias


_normalize.defvjp(_norm_forward, _norm_backward)


class Norm(Protocol):
    """Protocol of norms over the last dimension."""

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters."""
        ...

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x, in its dtype."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root-mean-square normalization with a scale.

    Attributes:
      dim: size of the normalized dimension.
      epsilon: added to the mean square.
      offset: added to the scale: with 1, a parameter of 0 is the identity scale (Gemma).
    """

    dim: int
    epsilon: float
    offset: float = 0.0

    def weights(self, key: jax.Array) -> Weights:
        """Scale of 1, including the offset."""
        one = constant(1.0 - self.offset)
        return {"scale": param(key, (self.dim,), ("vector",), one, role="norm")}

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x."""
        return rms_norm(x, own["scale"], epsilon=self.epsilon, offset=self.offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """Layer normalization with a scale and a bias."""

    dim: int
    epsilon: float

    def weights(self, key: jax.Array) -> Weights:
        """Scale of 1 and biases of 0."""
        return {
            "scale": param(key, (self.dim,), ("vector",), constant(1.0), role="norm"),
            "bias": param(key, (self.dim,), ("vector",), constant(0.0), role="norm"),
        }

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x."""
        return layer_norm(x, own["scale"], own["bias"], epsilon=self.epsilon)
