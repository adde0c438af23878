"""Matmul of an activation and a weight: gather over fsdp, cast, multiply, shard the result.

Letters: B batch, T length, D embed, N query and K kv heads, H head_dim, F mlp, V vocab, C latent.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.dropout import Draws
from jaxtrain.parallel.axis_rules import MeshAxes
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.gathering import GradientSlice, Groups, gather
from jaxtrain.parallel.sharding import (
    Layout,
    activation_spec,
    current_layout,
    logical_axes,
    parts_of,
    reshape,
    without,
)

# -- einsum without implicit dtype promotion, in layouts that compilers handle well ----------------
# Letters: R rows (the positions of the whole batch), K contracted, M output.

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


# -- activations and weights -----------------------------------------------------------------------


class StructuredWeight(abc.ABC):
    """Value of a parameter that is not one array: quantized, with an adapter, or captured."""

    @abc.abstractmethod
    def contract(
        self,
        equation: str,
        x: jax.Array,
        weight: nnx.Param,
        out: tuple[str, ...] | None,
        *,
        by: Einsum,
        draws: Draws | None,
        layer: jax.Array | int | None,
    ) -> jax.Array:
        """Matmul of x with the weight.

        Args:
          equation, x, out, by: as in `contract`.
          weight: the parameter with this value.
          draws: source of dropout masks; None: no dropout.
          layer: index of the layer.
        """


def contract(
    equation: str,
    x: jax.Array,
    weight: nnx.Param,
    out: tuple[str, ...] | None = None,
    *,
    by: Einsum = einsum,
) -> jax.Array:
    """einsum of an activation and a weight, the weight gathered over fsdp and cast to x's dtype.

    Args:
      equation: an einsum equation over (x, weight), in the letters of the legend.
      x: the activation.
      weight: the parameter.
      out: the logical axes of the result. Needed where the contraction runs over a sharded
        dimension, since there the result can be laid out in more than one way.
      by: the einsum: in x's dtype, or with 8-bit operands.
    """
    layout, value = current_layout(), weight.get_value()
    if out is not None and by is einsum and _in_parts(equation, weight, out, layout):
        x, value, spec = operands(equation, x, weight, out)
        assert spec is not None, "a layout gives one"
        # Imported here, as below: most layouts gather a weight before the matmul.
        from jaxtrain.nn.matmul import collective_matmul

        return collective_matmul.matmul_scatter(equation, x, value, spec)
    shape = (value.weight if isinstance(value, GradientSlice) else value).shape
    groups = _as_matrix(equation, logical_axes(weight)[-len(shape) :], layout)
    x, value, spec = operands(equation, x, weight, out, groups)
    return product(equation, x, value, groups, shape, spec, by=by)


def project(
    x: jax.Array, products: Sequence[tuple[str, nnx.Param]], *, by: Einsum = einsum
) -> list[jax.Array] | None:
    """Collective matmul of one activation with several weights.

    Args:
      x: the activation.
      products: the equation and weight of each, as in `contract`.
      by: as in `contract`.

    Returns:
      None if the sequence is not split over `tensor`, collective matmuls are off, or a
      device would compute the whole result.
    """
    layout, equations = current_layout(), [equation for equation, _ in products]
    spec, left = spec_of(x), sides(equations[0])[0]
    if layout is None or spec is None or by is not einsum or not layout.collective_matmul:
        return None
    split = all(
        _split_letters(equation, weight, layout) & set(sides(equation)[2])
        for equation, weight in products
    )
    if not split or "tensor" not in parts_of(spec[left.index("T")]):
        return None
    weights = [operands(equation, x, weight)[1] for equation, weight in products]
    specs = [layout.activation(meaning(sides(equation)[2])) for equation in equations]
    from jaxtrain.nn.matmul import collective_matmul

    return collective_matmul.gather_matmul(equations, x, weights, specs)


def _in_parts(
    equation: str, weight: nnx.Param, out: tuple[str, ...], layout: Layout | None
) -> bool:
    """Whether a matmul is reduce-scattered along the sequence over `tensor` as a collective
    matmul."""
    if layout is None or not layout.collective_matmul or "residual_length" not in out:
        return False
    scattered = "tensor" in parts_of(layout.activation(("residual_length",))[0])
    summed = _split_letters(equation, weight, layout) - set(sides(equation)[2])
    return scattered and bool(summed)


def _split_letters(equation: str, weight: nnx.Param, layout: Layout) -> set[str]:
    """Return the letters of a weight's dimensions that are split over `tensor` in the matmul."""
    letters = sides(equation)[1]
    # Kv heads that do not divide are repeated until they do.
    split = dataclasses.replace(layout, whole=layout.whole - {"kv_heads"})
    spec = split.weight(logical_axes(weight)[-len(letters) :])
    return {
        letter for letter, part in zip(letters, spec, strict=True) if "tensor" in parts_of(part)
    }


def _as_matrix(equation: str, axes: tuple[str, ...], layout: Layout | None) -> Groups | None:
    """Return the groups of a weight's dimensions for `einsum.product`; None: unchanged."""
    if layout is None:
        return as_matrix(equation)
    if layout.tensor_layout != "1d" or layout.whole & set(axes):
        return None
    specs = layout.parameter(axes), layout.gradient(axes), layout.weight(axes)
    return as_matrix(equation, *specs)


def operands(
    equation: str,
    x: jax.Array,
    weight: nnx.Param,
    out: tuple[str, ...] | None = None,
    groups: Groups | None = None,
) -> tuple[jax.Array, jax.Array, P | None]:
    """Return an activation and a weight resharded for their matmul, and the spec of the result.

    Arguments are those of `contract` and `gather`. The weight is gathered and in x's dtype; the
    spec is None if it follows from those of the two.
    """
    value, layout = gather(weight, groups).astype(x.dtype), current_layout()
    spec = None if out is None else activation_spec(out)
    if layout is not None and groups is None:
        axes = logical_axes(weight)[-value.ndim :]
        value = _repeat_heads(value, axes, layout)
        if layout.tensor_layout != "1d":
            x, spec = _meet(equation, x, layout.weight(axes), out, layout)
    return x, value, spec


def copies_of_kv_heads(num_kv_heads: int) -> int:
    """Copy of each kv head: more than one if they do not divide over `tensor`.

    K heads over t devices become lcm(K, t): each device has equally many, those that its query
    heads attend to. Their weights are replicated over `tensor`.
    """
    layout = current_layout()
    if layout is None:
        return 1
    devices = layout.size(layout.activation(("kv_heads",))[0])
    return math.lcm(num_kv_heads, devices) // num_kv_heads


def _repeat_heads(weight: jax.Array, axes: tuple[str, ...], layout: Layout) -> jax.Array:
    """Return the weight with its kv heads repeated and split; other weights unchanged."""
    if "kv_heads" not in axes or "kv_heads" not in layout.whole:
        return weight
    dim = axes.index("kv_heads")
    # Repeat the weight, not the keys: each device computes its own head alone.
    repeated = jnp.repeat(weight, copies_of_kv_heads(weight.shape[dim]), axis=dim)
    split = dataclasses.replace(layout, whole=frozenset())
    return jax.sharding.reshard(repeated, split.weight(axes))


# What the letters of an equation mean; B is the inner batch next to one of _INNER.
_MEANING = {
    "B": "batch", "T": "length", "D": "embed", "F": "mlp", "N": "heads", "K": "kv_heads",
    "H": "head_dim", "V": "vocab", "P": "qkv", "C": "latent",
}  # fmt: skip
_INNER = frozenset("FNK")


def meaning(letters: str) -> tuple[str, ...]:
    """Return the logical axes of an activation with these letters."""
    names = {**_MEANING, "B": "inner_batch"} if _INNER & set(letters) else _MEANING
    return tuple(names[letter] for letter in letters)


def _meet(
    equation: str,
    x: jax.Array,
    weight_spec: P,
    out: tuple[str, ...] | None,
    layout: Layout,
) -> tuple[jax.Array, P]:
    """Return the activation resharded for its matmul with a weight, and the spec of the result.

    Along the contracted dimension x is sharded like the weight: gathered where the weight is
    replicated, so that no partial sums arise, or kept where it is split, so that partial sums are
    reduce-scattered into the result. Along its other dimensions x is gathered over the axes that
    split the weight.
    """
    operands, result = equation.split("->")
    left, right = operands.split(",")
    of_weight = dict(zip(right, weight_spec, strict=True))
    taken = {name for part in weight_spec for name in parts_of(part)}
    own = layout.activation(meaning(left))
    parts = [
        of_weight[letter] if letter in of_weight else without(part, taken)
        for letter, part in zip(left, own, strict=True)
    ]
    spec = layout.activation(meaning(result) if out is None else out)
    return jax.sharding.reshard(x, P(*parts)), spec
