"""Products of an activation and a weight on one device, in the forms that compilers do well.

Letters: R rows (the places of the whole batch), K what is summed over, M what comes of it.
"""

import math

import jax
from jax import lax

from jaxtrain.float8 import in_float8, weight_product
from jaxtrain.kernels import platform_of


def product(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """einsum(equation, x, weight), batch and length as one dimension where they are x's first two.

    With two dimensions to sum over, XLA's CPU backend copies activations transposed for the
    gradient of the weight: forward and backward of an mlp then take twice the time.

    Args:
      equation: over (x, weight).
      x: the activation.
      weight: the weight.
    """
    inputs, result = equation.split("->")
    rows = inputs[:2]
    if rows not in ("BT", "TB") or rows not in result:
        return weight_product(equation, x, weight)
    x_R = x.reshape(-1, *x.shape[2:])
    equation, of_rows = equation.replace(rows, "R"), result.replace(rows, "R")
    y_R = _of_matrices(equation, x_R, weight)
    place = of_rows.index("R")
    return y_R.reshape(*y_R.shape[:place], *x.shape[:2], *y_R.shape[place + 1 :])


def _of_matrices(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The einsum as the product of two matrices, rows first in x.

    Heads and head_dim as dimensions of their own come out in an order of the compiler's choice, on
    CPUs and GPUs with the rows last: then activations are copied transposed before and after, and
    what is kept of all layers once more. A TPU's compiler chooses well, and copies a little more
    where it has no choice.
    """
    platform = platform_of(jax.sharding.get_abstract_mesh())
    if platform == "tpu":
        return weight_product(equation, x, weight)
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    summed = [letter for letter in left if letter in right]
    made = [letter for letter in result if letter in right]
    if len(right) == 2 and right[0] in made:
        return weight_product(equation, x, weight)  # a table of rows to multiply with
    sizes = dict(zip(right, weight.shape, strict=True))
    weight_KM = weight.transpose([right.index(letter) for letter in (*summed, *made)])
    weight_KM = weight_KM.reshape(math.prod(sizes[letter] for letter in summed), -1)
    x_RK = x.reshape(x.shape[0], -1)
    if platform == "cpu" and weight_KM.shape[0] > weight_KM.shape[1] and not in_float8():
        y_RM = _of_narrow(x_RK, weight_KM)
    else:
        y_RM = weight_product("RK,KM->RM", x_RK, weight_KM)
    y = y_RM.reshape(-1, *(sizes[letter] for letter in made))
    return y.transpose([["R", *made].index(letter) for letter in result])


@jax.custom_vjp
def _of_narrow(x_RK: jax.Array, weight_KM: jax.Array) -> jax.Array:
    """x @ weight for K > M, where a CPU is slow at the weight's gradient as a [K, M] product."""
    return x_RK @ weight_KM


def _forward(x_RK: jax.Array, weight_KM: jax.Array) -> tuple[jax.Array, tuple]:
    return x_RK @ weight_KM, (x_RK, weight_KM)


def _backward(kept: tuple, gradient_RM: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_RK, weight_KM = kept
    of_weight_MK = lax.dot_general(gradient_RM, x_RK, (((0,), (0,)), ((), ())))
    # The barrier keeps XLA from taking the transpose into the product.
    return gradient_RM @ weight_KM.T, lax.optimization_barrier(of_weight_MK).T


_of_narrow.defvjp(_forward, _backward)
