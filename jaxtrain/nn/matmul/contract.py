"""Matmul of an activation and a weight: gather over fsdp, cast, multiply, shard the result.

Letters: B batch, T length, D embed, N query and K kv heads, H head_dim, F mlp, V vocab, C latent.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.matmul.einsum import Einsum, as_matrix, einsum, product, sides, spec_of
from jaxtrain.parallel.gathering import GradientSlice, Groups, gather
from jaxtrain.parallel.sharding import (
    Layout,
    activation_spec,
    current_layout,
    logical_axes,
    parts_of,
    without,
)


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
