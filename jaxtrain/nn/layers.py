"""Norms, embedding, biases and rotary positions: what models are made of beside products.

Letters: B batch, T length, D embed, N heads, H head_dim, V vocab, F features.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.parameters import normal, param
from jaxtrain.nn.products.contract import contract
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import (
    current_layout,
    logical_axes,
    on_each_device,
    parts_of,
    shard,
    without,
)
from jaxtrain.parallel.tables import MeshAxes


def add_bias(x: jax.Array, bias: nnx.Param) -> jax.Array:
    """x + bias over the last dimensions, in x's dtype."""
    return x + gather(bias).astype(x.dtype)


def map_of_vectors(key: jax.Array, features: int, embed_dim: int) -> nnx.Param:
    """What stands in a table's place where vectors of so many numbers are read: `embed` takes both.

    Of numbers with a variance of 1 it makes such, as a table with normal(1) is.
    """
    spread = normal(1 / math.sqrt(features))
    return param(key, (features, embed_dim), ("narrow", "vocab_embed"), spread, role="embedding")


def embed(
    inputs: jax.Array, table: nnx.Param, out: tuple[str, ...] = ("batch", "length", "embed")
) -> jax.Array:
    """Rows of a [V, D] table for tokens [B, T]: a stream [B, T, D].

    Vectors [B, T, F] go through a table [F, D] as a linear map: the row of a token is what its
    one-hot vector would give.

    Args:
      inputs: tokens or vectors.
      table: the table, or the map.
      out: logical axes of the stream.
    """
    if jnp.issubdtype(inputs.dtype, jnp.integer):
        return _rows(inputs, table, out)
    return contract("BTF,FD->BTD", inputs, table, out)


def _rows(tokens_BT: jax.Array, table: nnx.Param, out: tuple[str, ...]) -> jax.Array:
    """Rows of a [V, D] table, laid out as `out` says.

    Vocabulary-parallel as in Megatron (arXiv 1909.08053): each device looks up the rows that it
    holds, and one sum over the vocabulary's mesh axes puts them together; along axes that split
    the stream's places beside the tokens' (arXiv 2205.05198) each device gets the sums of its own
    places alone. The table is gathered along embed before the lookup.
    """
    table_VD, layout = gather(table), current_layout()
    if layout is None:
        return table_VD[tokens_BT]
    of_tokens, of_table = layout.activation(("batch", "length")), layout.weight(logical_axes(table))
    if "vocab" in layout.whole:  # padded to be split where it is computed with
        of_table = jax.typeof(table_VD).sharding.spec
    rows = table_VD.shape[0] // layout.size(of_table[0])
    split = _Split(
        of_tokens, of_table, rows, _scattered(of_tokens, of_table, layout.activation(out))
    )
    return shard(_embedded(split, tokens_BT, table_VD), out)


def _scattered(tokens: P, table: P, stream: P) -> tuple[str, ...]:
    """The mesh axes that split the table's rows and, beside the tokens', the stream's places."""
    before, after = parts_of(tokens[1]), parts_of(stream[1])
    more = after[len(before) :]
    fits = after[: len(before)] == before and set(more) <= set(parts_of(table[0]))
    return more if fits else ()


@dataclasses.dataclass(frozen=True)
class _Split:
    """How a lookup lies on the devices.

    Attributes:
      tokens: of the tokens [B, T].
      table: of the table [V, D], whole along D.
      rows: of the table, on one device.
      scattered: mesh axes of the table's rows that split the places of what is looked up.
    """

    tokens: P
    table: P
    rows: int
    scattered: tuple[str, ...]

    @property
    def stream(self) -> P:
        """Of what is looked up, [B, T, D]."""
        rows, places = self.tokens
        return P(rows, (*parts_of(places), *self.scattered) or None, None)

    def places(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which of the device's rows each token has, and whether it is the device's at all."""
        axes = parts_of(self.table[0])
        place_BT = tokens_BT - (jax.lax.axis_index(axes) * self.rows if axes else 0)
        here_BT = (place_BT >= 0) & (place_BT < self.rows)
        return jnp.where(here_BT, place_BT, 0), here_BT[..., None]

    def look_up(self, tokens_BT: jax.Array, rows_VD: jax.Array) -> jax.Array:
        """On each device: [B, T, D] of its tokens, out of its rows and the others'."""
        place_BT, here_BT1 = self.places(tokens_BT)
        found_BTD = jnp.where(here_BT1, rows_VD[place_BT], 0)
        if self.scattered:
            found_BTD = jax.lax.psum_scatter(
                found_BTD, self.scattered, scatter_dimension=1, tiled=True
            )
        return _sum_over([without(self.table[0], self.scattered)], found_BTD)

    def add_up(self, tokens_BT: jax.Array, gradient_BTD: jax.Array) -> jax.Array:
        """On each device: the gradient of its rows, out of its tokens and the others'."""
        place_BT, here_BT1 = self.places(tokens_BT)
        rows_VD = jnp.zeros((self.rows, gradient_BTD.shape[-1]), gradient_BTD.dtype)
        rows_VD = rows_VD.at[place_BT].add(jnp.where(here_BT1, gradient_BTD, 0))
        return _sum_over(self.tokens, rows_VD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embedded(split: _Split, tokens_BT: jax.Array, table_VD: jax.Array) -> jax.Array:
    run = on_each_device(split.look_up, (split.tokens, split.table), split.stream)
    return run(tokens_BT, table_VD)


def _forward(split: _Split, tokens_BT: jax.Array, table_VD: jax.Array) -> tuple[Any, jax.Array]:
    return _embedded(split, tokens_BT, table_VD), tokens_BT


def _backward(split: _Split, tokens_BT: jax.Array, gradient_BTD: jax.Array) -> tuple[Any, Any]:
    # By hand: the transpose of the sum would be another one, and the compiler's own scatter-add
    # gathers every device's activations where those are fewer bytes than the table.
    whole = P(*split.tokens, None)
    run = on_each_device(split.add_up, (split.tokens, whole), split.table)
    return None, run(tokens_BT, jax.sharding.reshard(gradient_BTD, whole))


_embedded.defvjp(_forward, _backward)


def _sum_over(spec: Iterable[MeshAxes], x: jax.Array) -> jax.Array:
    """The sum over all devices among which dimensions laid out so are split."""
    axes = tuple(name for part in spec for name in parts_of(part))
    return jax.lax.psum(x, axes) if axes else x


@jax.named_scope("norm")
def layer_norm(x: jax.Array, scale: nnx.Param, bias: nnx.Param, *, epsilon: float) -> jax.Array:
    """Layer normalisation (arXiv 1607.06450) over the last dimension, in float32."""
    return _normed(True, epsilon, x, gather(scale), gather(bias))


@jax.named_scope("norm")
def rms_norm(x: jax.Array, scale: nnx.Param, *, epsilon: float, offset: float = 0.0) -> jax.Array:
    """Root-mean-square normalisation (arXiv 1910.07467) over the last dimension, in float32.

    What is normed is multiplied by offset + scale.
    """
    factor = gather(scale) + offset if offset else gather(scale)
    return _normed(False, epsilon, x, factor, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normed(
    centred: bool, epsilon: float, x: jax.Array, factor: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """x over its root mean square, or its standard deviation where it is centred, times factor,
    plus bias. Its derivative is by hand: JAX's own keeps x four times, in float32."""
    return _norm_forward(centred, epsilon, x, factor, bias)[0]


def _norm_forward(
    centred: bool, epsilon: float, x: jax.Array, factor: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Any]:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True) if centred else None
    # Two passes: mean(x^2) - mean(x)^2 cancels where the mean is large.
    apart = x32 if mean is None else x32 - mean
    inverse = jax.lax.rsqrt(jnp.square(apart).mean(-1, keepdims=True) + epsilon)
    y = apart * inverse * factor
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, mean, inverse, factor, bias)


def _norm_backward(
    centred: bool, epsilon: float, kept: Any, d_y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    del epsilon
    x, mean, inverse, factor, bias = kept
    x32, d_y = x.astype(jnp.float32), d_y.astype(jnp.float32)
    normed = (x32 if mean is None else x32 - mean) * inverse
    d_normed = d_y * factor
    d_x = d_normed - normed * (d_normed * normed).mean(-1, keepdims=True)
    if centred:
        d_x -= d_normed.mean(-1, keepdims=True)
    before = tuple(range(x.ndim - 1))
    d_factor = (d_y * normed).sum(before).astype(factor.dtype)
    d_bias = None if bias is None else d_y.sum(before).astype(bias.dtype)
    return (d_x * inverse).astype(x.dtype), d_factor, d_bias


_normed.defvjp(_norm_forward, _norm_backward)


def rotate(
    x_BTNH: jax.Array, positions_BT: jax.Array, frequencies: jax.Array, *, scale: float = 1.0
) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864), the halves of H paired, angles in float32.

    Args:
      x_BTNH: queries or keys.
      positions_BT: int32 places of the tokens in their documents.
      frequencies: float32 [H/2], radians a place.
      scale: what the turned x is multiplied by.
    """
    positions_BT = shard(positions_BT, ("inner_batch", "length"))
    angle_BTH = positions_BT[:, :, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle_BTH)[:, :, None, :], jnp.sin(angle_BTH)[:, :, None, :]
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
