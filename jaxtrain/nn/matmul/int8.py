"""Int8 matmuls with per-row scaling.

The forward product and the activation's gradient have int8 operands and int32 sums. The weight's
gradient stays in the dtype of the activations: its sum runs over all tokens, and rounding harms it
more the longer it is (SwitchBack, arXiv 2304.13013).

A row is what one index of the dimensions that are not summed over selects: a token of an activation
or of a gradient, a channel of a weight. It is divided by its largest magnitude over 127 and rounded
to the nearest, even where two are; nothing is remembered from step to step.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.nn.matmul.einsum import contraction, sides, spec_of
from jaxtrain.nn.remat import PRODUCT
from jaxtrain.parallel.sharding import on_each_device, parts_of, without

LARGEST = 127  # -128 has no opposite
# A smaller largest element counts as this, so that 1 / scale is a number.
_SMALLEST = 2.0**-100
# The number of terms whose sum always fits into int32.
_MOST_TERMS = (2**31 - 1) // LARGEST**2


def quantize(x: jax.Array, summed: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """x / scale in int8, and the scales: the largest magnitude of each row over 127.

    The maximum runs over the whole row, however it is split. The scale of a row with anything that
    is not finite is not finite.

    Args:
      x: the array.
      summed: the dimensions that a row has. The float32 scales have the others.
    """
    largest = jnp.max(jnp.abs(x), axis=tuple(summed), keepdims=True).astype(jnp.float32)
    scale = jnp.maximum(largest, _SMALLEST) / LARGEST
    rounded = jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8)
    return rounded, jnp.squeeze(scale, tuple(summed))


def int8_einsum(
    equation: str, x: jax.Array, weight: jax.Array, out_sharding: P | None
) -> jax.Array:
    """The einsum, and the gradient of x, of operands in int8; an `Einsum`.

    Raises:
      UserError: int32 cannot hold the sums.
    """
    left, right, result = sides(equation)
    of_x, of_weight = spec_of(x), spec_of(weight)

    @jax.custom_vjp
    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        return forward(x, weight)[0]

    def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
        # Named, for the int32 sums before it are larger. Both operands are rounded again in the
        # backward pass, where their rows are others.
        y = _product(equation, *_meet(equation, x, weight, out_sharding), out_sharding)
        return checkpoint_name(y, PRODUCT), (x, weight)

    def backward(kept: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, weight = kept
        by_x = f"{result},{right}->{left}"
        # Both products want the gradient laid out like this, so it is gathered once.
        gradient, weight, axes = _meet(by_x, gradient, weight, of_x)
        of_activation = _product(by_x, gradient, weight, axes, of_x)
        by_weight = f"{left},{result}->{right}"
        return of_activation, jnp.einsum(by_weight, x, gradient, out_sharding=of_weight)

    run.defvjp(forward, backward)
    return run(x, weight)


def _meet(
    equation: str, a: jax.Array, b: jax.Array, spec: P | None
) -> tuple[jax.Array, jax.Array, tuple[str, ...]]:
    """Operands laid out for a product of this spec, and the mesh axes that its sums are split over.

    Along what is summed over both are split alike, or gathered; along the rest as the result is.
    """
    if spec is None:
        return a, b, ()
    left, right, result = sides(equation)
    of_a, of_b = (
        dict(zip(side, jax.typeof(x).sharding.spec, strict=True))
        for side, x in ((left, a), (right, b))
    )
    summed = [letter for letter in left if letter in right]
    parts = {letter: of_a[letter] for letter in summed if of_a[letter] == of_b[letter]}
    axes = tuple(name for part in parts.values() for name in parts_of(part))
    parts |= {letter: without(part, axes) for letter, part in zip(result, spec, strict=True)}
    a, b = (
        jax.sharding.reshard(x, P(*(parts.get(letter) for letter in side)))
        for side, x in ((left, a), (right, b))
    )
    return a, b, axes


def _product(
    equation: str, a: jax.Array, b: jax.Array, axes: tuple[str, ...], spec: P | None
) -> jax.Array:
    """einsum(equation, a, b) of operands in int8, in a's dtype, after `_meet`."""
    left, right, result = sides(equation)
    summed = [letter for letter in left if letter in right]
    of_a, of_b = ([side.index(letter) for letter in summed] for side in (left, right))
    terms, dtype = math.prod(a.shape[i] for i in of_a), a.dtype
    if terms > _MOST_TERMS:
        raise UserError(
            f"Precision.matmul='int8': int32 holds the sum of {_MOST_TERMS:,} products, and "
            f"{equation!r} adds up {terms:,}; use Precision.matmul='compute'"
        )
    (a, a_scale), (b, b_scale) = quantize(a, of_a), quantize(b, of_b)
    a_scale, b_scale = _along(left, a_scale, result), _along(right, b_scale, result)

    def multiply(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
        sums = contraction(equation, a, b, jnp.int32)
        return (sums.astype(jnp.float32) * a_scale * b_scale).astype(dtype)

    operands = (a, b, a_scale, b_scale)
    if spec is None or not axes:
        return multiply(*operands)

    def partial_sums(*shards: jax.Array) -> jax.Array:
        # Cast before they are added up: int32 would be twice bfloat16's bytes between devices.
        return _sum_into(spec, axes, multiply(*shards))

    return on_each_device(partial_sums, tuple(spec_of(x) for x in operands), spec)(*operands)


def _along(letters: str, scale: jax.Array, result: str) -> jax.Array:
    """The scales of an operand with these letters, in as many dimensions as the result has."""
    letters = "".join(letter for letter in letters if letter in result)
    order = sorted(range(len(letters)), key=lambda i: result.index(letters[i]))
    absent = [i for i, letter in enumerate(result) if letter not in letters]
    return jnp.expand_dims(jnp.transpose(scale, order), absent)


def _sum_into(spec: P, axes: Sequence[str], x: jax.Array) -> jax.Array:
    """A device's shard of the sum over mesh axes, scattered along what the spec splits over them.

    These axes are the last that split a dimension, or a shard would be another part of it.
    """
    whole = list(axes)
    for dim, part in enumerate(spec):
        scattered = tuple(name for name in parts_of(part) if name in axes)
        if not scattered:
            continue
        assert parts_of(part)[-len(scattered) :] == scattered, (spec, axes)
        x = jax.lax.psum_scatter(x, scattered, scatter_dimension=dim, tiled=True)
        whole = [name for name in whole if name not in scattered]
    return jax.lax.psum(x, tuple(whole)) if whole else x
