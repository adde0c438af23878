"""Products of rows with the weights of the experts they go to, as they are or in float8.

Letters: N rows that stand expert after expert, E experts, S slots of each, K what is summed over, M
what comes of it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers

from jaxtrain.nn.products.float8 import E4M3, E5M2, bits_of, of_bits, over_batch, quantize

# [N, M] of rows [N, K] and weights [E, K, M], so many rows an expert; [E, S, M] of [E, S, K] where
# no numbers of rows are given.
Grouped = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


def grouped(x: jax.Array, weight_EKM: jax.Array, sizes_E: jax.Array | None) -> jax.Array:
    """The `Grouped` in the dtype of its operands."""
    return _rows(x, weight_EKM, sizes_E, 1, x.dtype)


def float8_grouped(x: jax.Array, weight_EKM: jax.Array, sizes_E: jax.Array | None) -> jax.Array:
    """The `Grouped`, and both its gradients, of operands in float8: see `float8`.

    All experts' rows have one scale, and all experts' weights.
    """
    dtype, over = x.dtype, over_batch()

    def scaled(y: jax.Array, *scales: jax.Array) -> jax.Array:
        return (y.astype(jnp.float32) * scales[0] * scales[1]).astype(dtype)

    @jax.custom_vjp
    def run(x: jax.Array, weight: jax.Array, sizes: jax.Array | None) -> jax.Array:
        return forward(x, weight, sizes)[0]

    def forward(
        x: jax.Array, weight: jax.Array, sizes: jax.Array | None
    ) -> tuple[jax.Array, tuple]:
        x8, of_x = quantize(x, E4M3, over)
        w8, of_weight = quantize(weight, E4M3, over)
        y = scaled(_rows(x8, w8, sizes, 1, dtype), of_x, of_weight)
        return y, (bits_of(x8), of_x, weight, sizes)

    def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        bits, of_x, weight, sizes = kept
        g8, of_gradient = quantize(gradient, E5M2, over)
        w8, of_weight = quantize(weight, E4M3, over)
        dx = scaled(_rows(g8, w8, sizes, 2, dtype), of_gradient, of_weight)
        dw = scaled(_of_weights(of_bits(bits), g8, sizes, dtype), of_x, of_gradient)
        return dx, dw, None

    run.defvjp(forward, backward)
    return run(x, weight_EKM, sizes_E)


def _rows(
    x: jax.Array, weight: jax.Array, sizes: jax.Array | None, summed: int, dtype: jnp.dtype
) -> jax.Array:
    """Rows times their experts' weights, summed over this dimension of the weights."""
    if sizes is None:
        batched = (((2,), (summed,)), ((0,), (0,)))
        return jax.lax.dot_general(x, weight, batched, preferred_element_type=dtype)
    numbers = RaggedDotDimensionNumbers((((1,), (summed,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, weight, sizes, numbers, preferred_element_type=dtype)


def _of_weights(
    x: jax.Array, gradient: jax.Array, sizes: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """The weights' gradients [E, K, M]: sums over each expert's own rows."""
    if sizes is None:
        batched = (((1,), (1,)), ((0,), (0,)))
        return jax.lax.dot_general(x, gradient, batched, preferred_element_type=dtype)
    numbers = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x, gradient, sizes, numbers, preferred_element_type=dtype)
