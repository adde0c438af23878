"""What models are made of: named parameters, stacked layers, contractions, norms and RoPE.

Letters: B batch, T length, D embed, N query and K kv heads, H head_dim, F mlp, V vocab, L layers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.attention import Mask, attention
from jaxtrain.config import configurable
from jaxtrain.errors import UserError, nearest_divisor, refuse_below
from jaxtrain.gathering import GradientSlice, Groups, gather
from jaxtrain.narrow import products_in
from jaxtrain.products import as_matrix, product
from jaxtrain.remat import RESIDUAL, remat
from jaxtrain.sharding import (
    Layout,
    activation_spec,
    current_layout,
    is_variable,
    logical_axes,
    on_each_device,
    parts_of,
    shard,
    without,
)

Initializer = Callable[..., jax.Array]


class Statistic(nnx.Variable):
    """A running statistic of the data (batch norm's mean and variance): state, not a parameter."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """How the loop over layers is compiled; the mathematics is the same.

    Attributes:
      layers_per_iteration: 1 scans (compile time independent of depth), k unrolls k layers in each
        iteration (the blocked form), 0 unrolls all of them (no loop).
    """

    layers_per_iteration: int = 1

    def __post_init__(self) -> None:
        refuse_below(0, self, "layers_per_iteration")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model's mathematics is run: kernel, loop over layers, remat, the layers' products."""

    kernel: str = "xla"
    context_parallel: str = "ring"
    remat: str = "none"
    layers_per_iteration: int = 1
    matmul: str = "compute"

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        """Attention with this run's kernel; shapes as in `jaxtrain.attention.attention`."""
        mask = dataclasses.replace(
            mask,
            segment_ids_BT=_rows_inside(mask.segment_ids_BT),
            segment_ids_BS=_rows_inside(mask.segment_ids_BS),
        )
        return attention(q, k, v, mask, kernel=self.kernel, context_parallel=self.context_parallel)

    def over_layers(
        self, layer_fn: Callable[..., Any], x: jax.Array, layers: Any, per_layer: Any = None
    ) -> tuple[jax.Array, Any]:
        """Runs `x, out = layer_fn(layer, x, extra)` through all stacked layers.

        Args:
          layer_fn: one layer: its module, the activations and its part of `per_layer`, to the new
            activations and whatever is stacked into the second result.
          x: the activations that go in.
          layers: a module from `stack`.
          per_layer: a pytree with a leading layers dimension (a key-value cache), or None.

        Returns:
          The activations that come out, and the stacked outputs.
        """
        count = jax.tree.leaves(layers)[0].shape[0]
        block = self.layers_per_iteration or count
        if count % block:
            raise UserError(
                f"Scan.layers_per_iteration={block} does not divide num_layers={count}; "
                f"use {nearest_divisor(count, block)} (or 0 to unroll all)"
            )

        def named(layer: Any, x: jax.Array, extra: Any) -> Any:
            with products_in(self.matmul):
                return layer_fn(layer, checkpoint_name(x, RESIDUAL), extra)

        # Without a loop around it only prevent_cse keeps XLA from undoing the recomputation.
        run = remat(named, self.remat, prevent_cse=block == count)

        def run_block(x: jax.Array, xs: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            if block == 1:
                return run(xs[0], x, xs[1])
            outs = []
            for i in range(block):
                layer, extra = jax.tree.map(lambda leaf, i=i: leaf[i], xs)
                x, out = run(layer, x, extra)
                outs.append(out)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

        if block == count:
            if count == 1:
                layers, per_layer = jax.tree.map(lambda leaf: leaf[0], (layers, per_layer))
                x, out = run(layers, x, per_layer)
                return x, jax.tree.map(lambda leaf: leaf[None], out)
            return run_block(x, (layers, per_layer))
        xs = (layers, per_layer)
        if block > 1:
            xs = jax.tree.map(lambda a: a.reshape(count // block, block, *a.shape[1:]), xs)
        x, outs = jax.lax.scan(run_block, x, xs)
        if block > 1:
            outs = jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), outs)
        return x, outs


def _rows_inside(x_BT: jax.Array | None) -> jax.Array | None:
    """Per-token numbers where the rows of queries and keys are."""
    return None if x_BT is None else shard(x_BT, ("inner_batch", "length"))


def param(
    key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], init: Initializer
) -> nnx.Param:
    """A float32 parameter that knows what each of its dimensions means."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} has {len(shape)} dims but {len(axes)} axis names: {axes}")
    return nnx.Param(init(key, shape, jnp.float32), axes=axes)


def normal(stddev: float) -> Initializer:
    """The initializer N(0, stddev^2)."""
    return jax.nn.initializers.normal(stddev)


def constant(value: float) -> Initializer:
    """The initializer that is `value` everywhere."""
    return jax.nn.initializers.constant(value)


def stack(make: Callable[[jax.Array], Any], num_layers: int, key: jax.Array) -> Any:
    """num_layers copies of make(key) in one module, stacked on a leading "layers" dimension."""
    layers = jax.vmap(make)(jax.random.split(key, num_layers))

    def name_new_axis(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(axes=("layers", *logical_axes(variable)))

    return jax.tree.map(name_new_axis, layers, is_leaf=is_variable)


def contract(
    equation: str, x: jax.Array, weight: nnx.Param, out: tuple[str, ...] | None = None
) -> jax.Array:
    """einsum of an activation and a weight, the weight gathered over fsdp and cast to x's dtype.

    Args:
      equation: an einsum equation over (x, weight), in the letters of the legend.
      x: the activation.
      weight: the parameter.
      out: the logical axes of the result. Needed where the contraction runs over a sharded
        dimension, since there the result can be laid out in more than one way.
    """
    layout, value = current_layout(), weight.get_value()
    shape = (value.weight if isinstance(value, GradientSlice) else value).shape
    groups = _as_matrix(equation, logical_axes(weight)[-len(shape) :], layout)
    x, value, spec = operands(equation, x, weight, out, groups)
    return product(equation, x, value, groups, shape, spec)


def _as_matrix(equation: str, axes: tuple[str, ...], layout: Layout | None) -> Groups | None:
    """The groups of a weight's dimensions for `products.product`; None: as it is."""
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
    """An activation and a weight laid out for their product, and the spec of the product.

    Arguments are those of `contract` and `gather`. The weight is gathered and of x's dtype; the
    spec is None where it follows from those of the two.
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
    """How often each kv head is computed: more than once where they do not divide over `tensor`.

    K heads over t devices become lcm(K, t): each device has as many, and the ones that its query
    heads attend to. Their weights are replicated over `tensor`.
    """
    layout = current_layout()
    if layout is None:
        return 1
    devices = layout.size(layout.activation(("kv_heads",))[0])
    return math.lcm(num_kv_heads, devices) // num_kv_heads


def _repeat_heads(weight: jax.Array, axes: tuple[str, ...], layout: Layout) -> jax.Array:
    """The weight with its kv heads repeated and split; other weights as they are."""
    if "kv_heads" not in axes or "kv_heads" not in layout.whole:
        return weight
    dim = axes.index("kv_heads")
    # The weight, not the keys that it makes: each device computes its own head alone.
    repeated = jnp.repeat(weight, copies_of_kv_heads(weight.shape[dim]), axis=dim)
    split = dataclasses.replace(layout, whole=frozenset())
    return jax.sharding.reshard(repeated, split.weight(axes))


# What the letters of an equation mean; B is the inner batch beside one of _INNER.
_MEANING = {
    "B": "batch", "T": "length", "D": "embed", "F": "mlp", "N": "heads", "K": "kv_heads",
    "H": "head_dim", "V": "vocab", "P": "qkv",
}  # fmt: skip
_INNER = frozenset("FNK")


def _meaning(letters: str) -> tuple[str, ...]:
    names = {**_MEANING, "B": "inner_batch"} if _INNER & set(letters) else _MEANING
    return tuple(names[letter] for letter in letters)


def _meet(
    equation: str,
    x: jax.Array,
    weight_spec: P,
    out: tuple[str, ...] | None,
    layout: Layout,
) -> tuple[jax.Array, P]:
    """The activation as its product with a weight wants it, and the spec of the product.

    Along the contracted dimension x is split as the weight is: gathered where the weight is whole,
    so that no sum is left, or kept where it is split, so that partial sums are reduce-scattered
    into the result. Along its other dimensions x is gathered over the axes that split the weight.
    """
    operands, result = equation.split("->")
    left, right = operands.split(",")
    of_weight = dict(zip(right, weight_spec, strict=True))
    taken = {name for part in weight_spec for name in parts_of(part)}
    own = layout.activation(_meaning(left))
    parts = [
        of_weight[letter] if letter in of_weight else without(part, taken)
        for letter, part in zip(left, own, strict=True)
    ]
    spec = layout.activation(_meaning(result) if out is None else out)
    return jax.sharding.reshard(x, P(*parts)), spec


def add_bias(x: jax.Array, bias: nnx.Param) -> jax.Array:
    """x + bias over the last dimensions, in x's dtype."""
    return x + gather(bias).astype(x.dtype)


def embed(tokens_BT: jax.Array, table: nnx.Param) -> jax.Array:
    """Rows of a [V, D] table, laid out as the residual stream [B, T, D].

    Vocabulary-parallel as in Megatron (arXiv 1909.08053): each device looks up the rows that it
    holds, and one sum over the vocabulary's mesh axes puts them together. The table is gathered
    along embed before the lookup.
    """
    table_VD, layout = gather(table), current_layout()
    if layout is None:
        return table_VD[tokens_BT]
    table_spec = layout.weight(logical_axes(table))
    tokens_spec = layout.activation(("batch", "length"))
    spec = P(*tokens_spec, None)
    axes = parts_of(table_spec[0])

    def places(tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which of the device's rows each token has, and whether it is the device's at all."""
        V = table_VD.shape[0] // layout.size(axes)
        place_BT = tokens_BT - (jax.lax.axis_index(axes) * V if axes else 0)
        here_BT = (place_BT >= 0) & (place_BT < V)
        return jnp.where(here_BT, place_BT, 0), here_BT[..., None]

    def lookup(tokens_BT: jax.Array, rows_VD: jax.Array) -> jax.Array:
        place_BT, here_BT1 = places(tokens_BT)
        return _sum_over(axes, jnp.where(here_BT1, rows_VD[place_BT], 0))

    def add_rows(tokens_BT: jax.Array, gradient_BTD: jax.Array) -> jax.Array:
        place_BT, here_BT1 = places(tokens_BT)
        shape = (table_VD.shape[0] // layout.size(axes), gradient_BTD.shape[-1])
        rows_VD = jnp.zeros(shape, gradient_BTD.dtype)
        rows_VD = rows_VD.at[place_BT].add(jnp.where(here_BT1, gradient_BTD, 0))
        return _sum_over(tuple(n for part in tokens_spec for n in parts_of(part)), rows_VD)

    @jax.custom_vjp
    def embedded(table_VD: jax.Array) -> jax.Array:
        return on_each_device(lookup, (tokens_spec, table_spec), spec)(tokens_BT, table_VD)

    def forward(table_VD: jax.Array) -> tuple[jax.Array, None]:
        return embedded(table_VD), None

    def backward(_: None, gradient_BTD: jax.Array) -> tuple[jax.Array]:
        # By hand: the transpose of the sum would be another one, and the compiler's own scatter-add
        # gathers every device's activations where those are fewer bytes than the table.
        return (on_each_device(add_rows, (tokens_spec, spec), table_spec)(tokens_BT, gradient_BTD),)

    embedded.defvjp(forward, backward)
    return shard(embedded(table_VD), ("batch", "length", "embed"))


def _sum_over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


@jax.named_scope("norm")
def layer_norm(x: jax.Array, scale: nnx.Param, bias: nnx.Param, *, epsilon: float) -> jax.Array:
    """Layer normalisation (arXiv 1607.06450) over the last dimension, in float32."""
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    # Two passes: mean(x^2) - mean(x)^2 cancels where the mean is large.
    variance = jnp.square(x32 - mean).mean(-1, keepdims=True)
    normed = (x32 - mean) * jax.lax.rsqrt(variance + epsilon)
    return (normed * gather(scale) + gather(bias)).astype(x.dtype)


@jax.named_scope("norm")
def rms_norm(x: jax.Array, scale: nnx.Param, *, epsilon: float) -> jax.Array:
    """Root-mean-square normalisation (arXiv 1910.07467) over the last dimension, in float32."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + epsilon)
    return (x32 * inverse * gather(scale)).astype(x.dtype)


def rotate(x_BTNH: jax.Array, positions_BT: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864), the halves of H paired, angles in float32.

    Args:
      x_BTNH: queries or keys.
      positions_BT: int32 places of the tokens in their documents.
      frequencies: float32 [H/2], radians a place.
    """
    positions_BT = shard(positions_BT, ("inner_batch", "length"))
    angle_BTH = positions_BT[:, :, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle_BTH)[:, :, None, :], jnp.sin(angle_BTH)[:, :, None, :]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What the layers remember of the tokens so far, for generation.

    Attributes:
      layers: arrays with a leading layers dimension. Of attention keys and values, both
        [L, B, S, K, H], S the longest sequence that fits; of a recurrent layer its state.
      length: int32 scalar, how many tokens there were.
    """

    layers: tuple[jax.Array, jax.Array]
    length: jax.Array


def extend_cache(
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    layer_cache: tuple[jax.Array, jax.Array],
    start: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
    """One layer's cached keys and values with the new ones written from place `start` on."""
    keys, values = layer_cache
    return (
        jax.lax.dynamic_update_slice_in_dim(keys, k_BTKH.astype(keys.dtype), start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(values, v_BTKH.astype(values.dtype), start, axis=1),
    )
