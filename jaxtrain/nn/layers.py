"""Norms, embedding, biases and rotary positions: what models are made of beside products.

Letters: B batch, T length, D embed, N heads, H head_dim, V vocab.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import current_layout, logical_axes, on_each_device, parts_of, shard


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
