"""What models are made of: named parameters, stacked layers, contractions, norms and RoPE.

Letters: B batch, T length, D embed, N query heads, K kv heads, H head_dim, F mlp, V vocab,
L layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.attention import Mask, attention
from jaxtrain.config import configurable
from jaxtrain.errors import UserError, nearest_divisor
from jaxtrain.remat import RESIDUAL, remat
from jaxtrain.sharding import (
    activation_spec,
    current_layout,
    gather,
    is_variable,
    logical_axes,
    on_each_device,
    parts_of,
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


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model's mathematics is run: the attention kernel, the loop over layers, remat."""

    kernel: str = "xla"
    context_parallel: str = "ring"
    remat: str = "none"
    layers_per_iteration: int = 1

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        """Attention with this run's kernel; shapes as in `jaxtrain.attention.attention`."""
        return attention(
            q, k, v, mask, kernel=self.kernel, context_parallel=self.context_parallel
        )

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
    spec = None if out is None else activation_spec(out)
    return jnp.einsum(equation, x, gather(weight).astype(x.dtype), out_sharding=spec)


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
    spec = layout.activation(("batch", "length", "embed"))
    table_spec = layout.weight(logical_axes(table))
    tokens_spec = layout.activation(("batch", "length"))
    axes = parts_of(table_spec[0])

    def lookup(tokens_BT: jax.Array, rows_VD: jax.Array) -> jax.Array:
        if not axes:
            return rows_VD[tokens_BT]
        V = rows_VD.shape[0]
        place_BT = tokens_BT - jax.lax.axis_index(axes) * V
        here_BT = (place_BT >= 0) & (place_BT < V)
        found_BTD = rows_VD[jnp.where(here_BT, place_BT, 0)]
        return jax.lax.psum(jnp.where(here_BT[..., None], found_BTD, 0), axes)

    @jax.custom_vjp
    def embedded(table_VD: jax.Array) -> jax.Array:
        return on_each_device(lookup, (tokens_spec, table_spec), spec)(tokens_BT, table_VD)

    def forward(table_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return embedded(table_VD), table_VD

    def backward(table_VD: jax.Array, gradient_BTD: jax.Array) -> tuple[jax.Array]:
        # The transpose of the sum would be another one; a scatter-add of the rows is all it takes.
        def plain(table_VD: jax.Array) -> jax.Array:
            return table_VD.at[tokens_BT].get(out_sharding=spec)

        return jax.linear_transpose(plain, table_VD)(gradient_BTD)

    embedded.defvjp(forward, backward)
    return embedded(table_VD)


def layer_norm(x: jax.Array, scale: nnx.Param, bias: nnx.Param, *, epsilon: float) -> jax.Array:
    """Layer normalisation (arXiv 1607.06450) over the last dimension, in float32."""
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    # Two passes: mean(x^2) - mean(x)^2 cancels where the mean is large.
    variance = jnp.square(x32 - mean).mean(-1, keepdims=True)
    normed = (x32 - mean) * jax.lax.rsqrt(variance + epsilon)
    return (normed * gather(scale) + gather(bias)).astype(x.dtype)


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
    angle_BTH = positions_BT[:, :, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle_BTH)[:, :, None, :], jnp.sin(angle_BTH)[:, :, None, :]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far, for generation.

    Attributes:
      keys_LBSKH, values_LBSKH: one row a layer; S is the longest sequence that fits.
      length: int32 scalar, how many of the S places are filled.
    """

    keys_LBSKH: jax.Array
    values_LBSKH: jax.Array
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
