"""Einsum without implicit dtype promotion, in operand layouts that compilers handle well.

Letters: R rows (the positions of the whole batch), K contracted, M output.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.axis_rules import MeshAxes
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.gathering import Groups
from jaxtrain.parallel.sharding import current_layout, parts_of, reshape, without

# einsum(equation, x, weight, spec) of an activation and a weight of one dtype, in some precision.
# Every letter of one operand is in the other or in the result; the spec is the result's, None if
# it follows from those of the operands.
Einsum = Callable[[str, jax.Array, jax.Array, P | None], jax.Array]


def einsum(equation: str, x: jax.Array, weight: jax.Array, spec: P | None = None) -> jax.Array:
    """`Einsum` in the dtype of its operands."""
    return jnp.einsum(equation, x, weight, out_sharding=spec)


def einsum_of(matmul: str) -> Einsum:
    """Return the einsum of a value of Precision.matmul, imported at its first use."""
    if matmul == "float8":
        from jaxtrain.nn.matmul.eight_bit import float8_einsum

        return float8_einsum
    if matmul == "int8":
        from jaxtrain.nn.matmul.eight_bit import int8_einsum

        return int8_einsum
    return einsum


def sides(equation: str) -> list[str]:
    """Return the letters of both operands and of the result of an einsum equation."""
    return equation.replace("->", ",").split(",")


def spec_of(x: jax.Array) -> P | None:
    """Return the spec of an array that is being traced; None without a mesh."""
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
      spec: of the result, if it does not follow from those of the operands.
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


def as_matrix(equation: str, *specs: P) -> Groups | None:
    """Return the groups of dimensions that make a weight with heads a matrix [K, M], for `gather`.

    Heads and head_dim as separate dimensions get a layout of the compiler's choice, on
    CPUs and GPUs with the rows last: then activations are copied transposed before and after, and
    saved activations once more. A TPU's compiler chooses well, and copies a little more
    without a choice: but where head_dim is split (see `dividing.in_tiles`), heads that fill
    no tile would keep it from scattering the gradient, and steps with matrices are faster too.

    Args:
      equation: of the product, over (activation, weight).
      specs: the weight's, its gradient's too; none without a mesh.

    Returns:
      None if the weight is better, or has to be, multiplied unchanged.
    """
    left, right, result = sides(equation)
    if len(right) == 2:
        return None
    split = {i for spec in specs for i, part in enumerate(spec) if part is not None}
    summed = [right.index(letter) for letter in left if letter in right]
    made = [right.index(letter) for letter in result if letter in right]
    if _platform() == "tpu" and not split & {group[-1] for group in (summed, made) if group[1:]}:
        return None
    # A split dimension is the first of its group.
    for group in (summed, made):
        group.sort(key=lambda i: i not in split)
    if split & {*summed[1:], *made[1:]}:
        return None
    return tuple(summed), tuple(made)


def product(
    equation: str,
    x: jax.Array,
    weight: jax.Array,
    groups: Groups | None = None,
    shape: tuple[int, ...] = (),
    spec: P | None = None,
    *,
    by: Einsum = einsum,
) -> jax.Array:
    """einsum(equation, x, weight), as a matrix multiplication if possible.

    Batch and length become one dimension where they are x's first two: with two dimensions to sum
    over, XLA's CPU backend copies activations transposed for the gradient of the weight, and
    forward and backward of an MLP take twice the time.

    Args:
      equation: over (x, weight), the contracted letters last in x.
      x: the activation.
      weight: the weight, grouped by `groups`.
      groups: from `as_matrix`.
      shape: the weight's before it became a matrix.
      spec: of the result, if it does not follow from those of x and the weight.
      by: the einsum.
    """
    left, right, result = sides(equation)
    kept = "".join(letter for letter in left if letter not in right)
    parts = dict(zip(left, jax.typeof(x).sharding.spec, strict=True))
    wanted = {} if spec is None else dict(zip(result, spec, strict=True))
    given = spec is not None
    rows = left[:2] if _joins_rows(left, result, [parts, wanted], x.shape[0]) else ""
    if groups is None and not rows:
        return by(equation, x, weight, spec)
    sizes, made = dict(zip(left, x.shape, strict=True)), ""
    of_x, of_weight, of_result = left, right, result
    if groups is not None:
        summed, made = ("".join(right[i] for i in group) for group in groups)
        of_x, of_weight, of_result = f"{kept}k", "km", f"{kept}m"
        sizes |= {letter: shape[i] for i, letter in enumerate(right)}
        sizes["k"] = math.prod(sizes[letter] for letter in summed)
        parts["k"], wanted["m"] = parts[summed[0]], wanted.get(made[0])
        x = x.transpose([left.index(letter) for letter in kept + summed])
    if rows:
        of_x, of_result = of_x.replace(rows, "r"), of_result.replace(rows, "r")
        sizes["r"], parts["r"] = sizes[rows[0]] * sizes[rows[1]], _join(parts, rows)
        wanted["r"] = _join(wanted, rows)
    x = reshape(x, [sizes[letter] for letter in of_x], [parts[letter] for letter in of_x])
    y = _product(
        f"{of_x},{of_weight}->{of_result}",
        x,
        weight,
        None if spec is None else P(*(wanted[letter] for letter in of_result)),
        by,
    )
    # Back to the dimensions of the equation: heads keep the split of their group.
    of_rows = [(wanted if given else parts).get(letter) for letter in rows]
    dims, parts = "", []
    for letter, part in zip(of_result, jax.typeof(y).sharding.spec, strict=True):
        letters = {"r": rows, "m": made}.get(letter, letter)
        split = of_rows if letter == "r" else [part, *[None] * (len(letters) - 1)]
        dims, parts = dims + letters, [*parts, *split]
    sizes |= {letter: size for letter, size in zip(of_result, y.shape, strict=True)}
    y = reshape(y, [sizes[letter] for letter in dims], parts)
    return y.transpose([dims.index(letter) for letter in result])


def _joins_rows(left: str, result: str, parts: list[dict], batch: int) -> bool:
    """Whether merging batch and length is possible, and faster."""
    rows = left[:2]
    if rows not in ("BT", "TB") or rows not in result:
        return False
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return True
    if layout.sequence_parallel:
        # The gradient is scattered along the length. A TPU's compiler does not scatter with a
        # dimension of size 1 before it: it all-reduces, at twice the bytes.
        return rows == "BT" and batch == layout.size(parts[0]["B"])
    return _platform() != "tpu" and all(of.get(rows[1]) is None for of in parts)


def _join(parts: dict, rows: str) -> MeshAxes:
    """Return the spec of two merged dimensions."""
    first, second = (parts_of(parts.get(letter)) for letter in rows)
    return without((*first, *second), ())


def _product(
    equation: str, x: jax.Array, weight: jax.Array, spec: P | None, by: Einsum
) -> jax.Array:
    left, right, result = sides(equation)
    alone = jax.sharding.get_abstract_mesh().size <= 1
    is_matrix = len(left) == len(right) == 2 and left[1] == right[0]
    narrow = is_matrix and weight.shape[0] > weight.shape[1]
    if narrow and alone and _platform() == "cpu" and by is einsum:
        return _of_narrow(x, weight)
    return by(equation, x, weight, spec)


def _platform() -> str:
    return platform_of(jax.sharding.get_abstract_mesh())


@jax.custom_vjp
def _of_narrow(x_RK: jax.Array, weight_KM: jax.Array) -> jax.Array:
    """x @ weight for K > M, where a CPU computes the weight's [K, M] gradient slowly."""
    return x_RK @ weight_KM


def _forward(x_RK: jax.Array, weight_KM: jax.Array) -> tuple[jax.Array, tuple]:
    return x_RK @ weight_KM, (x_RK, weight_KM)


def _backward(kept: tuple, gradient_RM: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_RK, weight_KM = kept
    of_weight_MK = lax.dot_general(gradient_RM, x_RK, (((0,), (0,)), ((), ())))
    # The barrier keeps XLA from fusing the transpose into the matmul.
    return gradient_RM @ weight_KM.T, lax.optimization_barrier(of_weight_MK).T


_of_narrow.defvjp(_forward, _backward)
