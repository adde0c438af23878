"""Batch normalisation over the global batch: one pass for the statistics, one for the gradient's.

Letters: B batch, H height, W width, C channels.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.parallel.sharding import mean_over_batch

_OVER = (0, 1, 2)
Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def batch_norm(
    x_BHWC: jax.Array, scale_C: jax.Array, bias_C: jax.Array, shift_C: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (arXiv 1502.03167), in float32.

    Args:
      x_BHWC: activations; their mean and variance over a sharded batch are those of all devices.
      scale_C: gamma of the paper.
      bias_C: beta of the paper, of gamma's dtype.
      shift_C: a guess of the mean, float32, such as the running mean. Results do not depend on it
        but for rounding: of the variance, about (mean - shift)^2 / variance * 2^-20 is lost.
      epsilon: added to the variance.

    Returns:
      the normalised activations in x's dtype, mean [C] and biased variance [C] in float32.
    """
    # Sums of x and x^2 come from one pass over x (and one reduction between devices), those of
    # x and (x - mean)^2 from two; but mean(x^2) - mean(x)^2 cancels where the mean is large.
    from_shift = x_BHWC.astype(jnp.float32) - shift_C
    offset_C, square_C = mean_over_batch(
        (from_shift.mean(_OVER), jnp.square(from_shift).mean(_OVER))
    )
    variance_C = jnp.maximum(square_C - jnp.square(offset_C), 0)
    mean_C = shift_C + offset_C
    return normalised(x_BHWC, mean_C, variance_C, scale_C, bias_C, epsilon), mean_C, variance_C


def normalised(
    x_BHWC: jax.Array,
    mean_C: jax.Array,
    variance_C: jax.Array,
    scale_C: jax.Array,
    bias_C: jax.Array,
    epsilon: float,
) -> jax.Array:
    """x normalised by a given mean and variance, in x's dtype."""
    factor_C = jax.lax.rsqrt(variance_C + epsilon) * scale_C
    y_BHWC = (x_BHWC.astype(jnp.float32) - mean_C) * factor_C + bias_C
    return y_BHWC.astype(x_BHWC.dtype)


def _forward(
    x_BHWC: jax.Array, scale_C: jax.Array, bias_C: jax.Array, shift_C: jax.Array, epsilon: float
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Kept]:
    y_BHWC, mean_C, variance_C = batch_norm(x_BHWC, scale_C, bias_C, shift_C, epsilon)
    return (y_BHWC, mean_C, variance_C), (x_BHWC, scale_C, mean_C, variance_C)


def _backward(
    epsilon: float, kept: Kept, gradients: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """JAX's own sums twice more over the activations: what is zero, or `bias`'s times a factor."""
    x_BHWC, scale_C, mean_C, variance_C = kept
    of_y, of_mean_C, of_variance_C = gradients
    centred, of_y = x_BHWC.astype(jnp.float32) - mean_C, of_y.astype(jnp.float32)
    of_bias_C, along_x_C = of_y.sum(_OVER), (of_y * centred).sum(_OVER)
    inverse_C = jax.lax.rsqrt(variance_C + epsilon)
    count = of_y.size // of_y.shape[-1]
    factor_C = inverse_C * scale_C
    offset_C = (of_mean_C - factor_C * of_bias_C) / count
    slope_C = (2 * of_variance_C - factor_C * inverse_C**2 * along_x_C) / count
    offset_C, slope_C = mean_over_batch((offset_C, slope_C))
    of_x = of_y * factor_C + centred * slope_C + offset_C
    of_scale_C = inverse_C * along_x_C
    dtype = scale_C.dtype
    return of_x.astype(x_BHWC.dtype), of_scale_C.astype(dtype), of_bias_C.astype(dtype), None


batch_norm.defvjp(_forward, _backward)
