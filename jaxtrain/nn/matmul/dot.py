"""Einsum without implicit dtype promotion."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

# einsum(equation, x, weight, spec) of an activation and a weight of one dtype, in some precision.
# Every letter of one operand is in the other or in the result; the spec is the result's, None where
# it follows from those of the operands.
Einsum = Callable[[str, jax.Array, jax.Array, P | None], jax.Array]


def einsum(equation: str, x: jax.Array, weight: jax.Array, spec: P | None = None) -> jax.Array:
    """The `Einsum` in the dtype of its operands."""
    return jnp.einsum(equation, x, weight, out_sharding=spec)


def einsum_of(matmul: str) -> Einsum:
    """What a value of Precision.matmul multiplies with, imported with its first use."""
    if matmul == "float8":
        from jaxtrain.nn.matmul.float8 import float8_einsum

        return float8_einsum
    if matmul == "int8":
        from jaxtrain.nn.matmul.int8 import int8_einsum

        return int8_einsum
    return einsum


def sides(equation: str) -> list[str]:
    """The letters of both operands and of the result of an einsum equation."""
    return equation.replace("->", ",").split(",")


def spec_of(x: jax.Array) -> P | None:
    """The spec of an array that is being traced; None without a mesh."""
    sharding = jax.typeof(x).sharding
    return None if sharding.mesh.empty else sharding.spec


def contraction(
    equation: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype, spec: P | None = None
) -> jax.Array:
    """einsum without batch dimensions: operands keep their dtypes, the result is of this one.

    Args:
      equation: over (a, b).
      a: the first operand.
      b: the second operand.
      dtype: of the result.
      spec: of the result, where it does not follow from those of the operands.
    """
    left, right, result = sides(equation)
    summed = [letter for letter in left if letter in right]
    assert not set(summed) & set(result), "a batch dimension"
    of_a, of_b = ([side.index(letter) for letter in summed] for side in (left, right))
    free = "".join(letter for letter in left + right if letter not in summed)
    order = [free.index(letter) for letter in result]
    if spec is not None:
        spec = P(*(spec[result.index(letter)] for letter in free))
    y = jax.lax.dot_general(
        a, b, ((of_a, of_b), ((), ())), preferred_element_type=dtype, out_sharding=spec
    )
    return jnp.transpose(y, order)
