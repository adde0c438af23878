"""Float8 matmuls with per-tensor scaling.

Activations and weights are e4m3, gradients e5m2 (arXiv 2209.05433): 3 and 2 bits behind the leading
one. A tensor is divided by its largest magnitude over the format's before it is rounded ("current
scaling"), and the product multiplied back; nothing is remembered from step to step.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.matmul.einsum import contraction, sides, spec_of
from jaxtrain.parallel.sharding import current_layout

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# A smaller largest element counts as this, so that 1 / scale is a number.
_SMALLEST = 2.0**-100


def over_batch() -> tuple[str, ...]:
    """The mesh axes along which the code being traced sees a part alone of what has one scale."""
    layout = current_layout()
    return () if layout is None else tuple(sorted(layout.one_batch))


def quantize(
    x: jax.Array, dtype: jnp.dtype, over: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """x / scale in a float8 dtype, and the scale: its largest magnitude over the format's.

    The maximum runs over the whole array, however it is split. What is not finite becomes NaN.

    Args:
      x: the array, or the part of it that is here.
      dtype: of the result.
      over: from `over_batch`.
    """
    largest, found = float(jnp.finfo(dtype).max), jnp.max(jnp.abs(x)).astype(jnp.float32)
    if over:
        found = jax.lax.pmax(found, over)
    scale = jnp.maximum(found, _SMALLEST) / largest
    # The quotient may round to just above the largest, which e4m3 has no infinity for.
    scaled = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest)
    return scaled.astype(dtype), scale


def bits_of(x8: jax.Array) -> jax.Array:
    """What is kept of an e4m3 activation: its bits.

    `jax.checkpoint` rounds what is kept with reduce_precision, which has an infinity where e4m3 has
    the numbers from 256 to 448.
    """
    return jax.lax.bitcast_convert_type(x8, jnp.uint8)


def of_bits(bits: jax.Array) -> jax.Array:
    """The e4m3 activation whose bits these are."""
    return jax.lax.bitcast_convert_type(bits, E4M3)


def float8_einsum(
    equation: str, x: jax.Array, weight: jax.Array, out_sharding: P | None
) -> jax.Array:
    """The einsum and both its gradients of operands in float8; an `Einsum`."""
    left, right, result = sides(equation)
    dtype, of_x, of_weight = x.dtype, spec_of(x), spec_of(weight)
    over = over_batch()

    def product(equation: str, a: tuple, b: tuple, spec: P | None) -> jax.Array:
        (a, a_scale), (b, b_scale) = a, b
        # Sums in float32 within the product; between devices in the dtype of the activations.
        y = contraction(equation, a, b, dtype, spec)
        return (y.astype(jnp.float32) * (a_scale * b_scale)).astype(dtype)

    @jax.custom_vjp
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        return forward(x, weight)[0]

    def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
        x8, scale = quantize(x, E4M3, over)
        y = product(equation, (x8, scale), quantize(weight, E4M3), out_sharding)
        # The weight itself is kept, and rounded again: it is gathered again where others are.
        return y, (bits_of(x8), scale, weight)

    def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits, scale, weight = kept
        x8, g8 = (of_bits(bits), scale), quantize(gradient, E5M2, over)
        of_activation = product(f"{result},{right}->{left}", g8, quantize(weight, E4M3), of_x)
        return of_activation, product(f"{left},{result}->{right}", x8, g8, of_weight)

    run.defvjp(forward, backward)
    return run(x, weight)
