"""Layer norm and RMSNorm, embedding lookup, biases, rotary embeddings (RoPE), pooling of texts.

Letters: B batch, T length, D embed, N heads, H head_dim, V vocab, F features.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.parameters import Weights, constant, normal, param
from jaxtrain.parallel.axis_rules import MeshAxes
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import (
    current_layout,
    logical_axes,
    on_each_device,
    parts_of,
    reduce_scatter_tokens,
    shard,
    without,
)


def add_bias(x: jax.Array, bias: nnx.Param) -> jax.Array:
    """x + bias over the last dimensions, in x's dtype."""
    return x + gather(bias).astype(x.dtype)


def map_of_vectors(key: jax.Array, features: int, embed_dim: int) -> nnx.Param:
    """Return a linear map that replaces the embedding table for vector inputs; `embed` takes both.

    It preserves unit variance, like a table with normal(1).
    """
    spread = normal(1 / math.sqrt(features))
    return param(key, (features, embed_dim), ("narrow", "vocab_embed"), spread, role="embedding")


def embed(
    inputs: jax.Array,
    table: nnx.Param,
    out: tuple[str, ...] = ("batch", "length", "embed"),
    learned: tuple[jax.Array, nnx.Param] | None = None,
) -> jax.Array:
    """Rows of a [V, D] table for tokens [B, T]: a stream [B, T, D].

    Vectors [B, T, F] use a table [F, D] as a linear map: a token's row is the image of its
    one-hot vector.

    Args:
      inputs: tokens or vectors.
      table: the table, or the map.
      out: logical axes of the stream.
      learned: positions [B, T] and the table whose rows are added for them.
    """
    lookups = [] if learned is None else [learned]
    if jnp.issubdtype(inputs.dtype, jnp.integer):
        return _rows([(inputs, table), *lookups], out)
    x_BTD = contract("BTF,FD->BTD", inputs, table, out)
    return x_BTD + _rows(lookups, out) if lookups else x_BTD


def _rows(lookups: Sequence[tuple[jax.Array, nnx.Param]], out: tuple[str, ...]) -> jax.Array:
    """Return the sum of rows of [V, D] tables for tokens [B, T], sharded by `out`.

    Vocabulary-parallel as in Megatron (arXiv 1909.08053): each device looks up the rows that it
    has, and one all-reduce over the vocabulary's mesh axes combines them; along axes that split
    the stream's positions in addition to the tokens' (arXiv 2205.05198) each device gets the sums
    of its own positions alone. A table is gathered along embed before the lookup.
    """
    layout = current_layout()
    tokens, tables = [one for one, _ in lookups], [gather(table) for _, table in lookups]
    if layout is None:
        return functools.reduce(jnp.add, [V[one] for one, V in zip(tokens, tables, strict=True)])
    of_tokens, of_stream = layout.activation(("batch", "length")), layout.activation(out)
    before, after = parts_of(of_tokens[1]), parts_of(of_stream[1])
    more = after[len(before) :] if after[: len(before)] == before else ()
    splits = []
    for (_, table), table_VD in zip(lookups, tables, strict=True):
        part = layout.weight(logical_axes(table))[0]
        if "vocab" in layout.whole:  # padded to be split in the computation
            part = jax.typeof(table_VD).sharding.spec[0]
        splits.append(_Split(of_tokens, part, table_VD.shape[0] // layout.size(part), more))
    if not all(split.fits for split in splits):
        splits = [dataclasses.replace(split, scattered=()) for split in splits]
    return shard(_embed(tuple(splits), tokens, tables), out)


@dataclasses.dataclass(frozen=True)
class _Split:
    """How a lookup is sharded over the devices.

    Attributes:
      tokens: of the tokens [B, T].
      vocabulary: the mesh axes that split the table's rows.
      rows: of the table, on one device.
      scattered: mesh axes that split the positions of the result, in addition to the tokens' own.
    """

    tokens: P
    vocabulary: MeshAxes
    rows: int
    scattered: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the table's rows are split over those axes, or replicated."""
        return not self.vocabulary or set(self.scattered) <= set(parts_of(self.vocabulary))

    @property
    def stream(self) -> P:
        """Spec of the result, [B, T, D]."""
        rows, positions = self.tokens
        return P(rows, (*parts_of(positions), *self.scattered) or None, None)

    @property
    def read(self) -> P:
        """Of the tokens that a device looks up: where it holds every row, only its own
        positions."""
        return self.tokens if self.vocabulary else P(*self.stream[:2])

    def local_indices(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Index of each token among the device's rows, and whether the device has it."""
        axes = parts_of(self.vocabulary)
        position_BT = tokens_BT - (jax.lax.axis_index(axes) * self.rows if axes else 0)
        here_BT = (position_BT >= 0) & (position_BT < self.rows)
        return jnp.where(here_BT, position_BT, 0), here_BT[..., None]

    def look_up(self, tokens_BT: jax.Array, rows_VD: jax.Array) -> jax.Array:
        """On each device: [B, T, D] of its positions, from its rows and the others'."""
        position_BT, here_BT1 = self.local_indices(tokens_BT)
        found_BTD = jnp.where(here_BT1, rows_VD[position_BT], 0)
        if not self.vocabulary:
            return found_BTD
        if self.scattered:
            found_BTD = reduce_scatter_tokens(found_BTD, self.scattered)
        return _sum_over([without(self.vocabulary, self.scattered)], found_BTD)

    def add_up(self, tokens_BT: jax.Array, gradient_BTD: jax.Array) -> jax.Array:
        """On each device: the gradient of its rows, from its tokens and the others'."""
        position_BT, here_BT1 = self.local_indices(tokens_BT)
        rows_VD = jnp.zeros((self.rows, gradient_BTD.shape[-1]), gradient_BTD.dtype)
        rows_VD = rows_VD.at[position_BT].add(jnp.where(here_BT1, gradient_BTD, 0))
        return _sum_over(self.tokens, rows_VD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(
    splits: tuple[_Split, ...], tokens: list[jax.Array], tables: list[jax.Array]
) -> jax.Array:
    found = []
    for split, tokens_BT, table_VD in zip(splits, tokens, tables, strict=True):
        specs = split.read, P(split.vocabulary, None)
        run = on_each_device(split.look_up, specs, split.stream)
        found.append(run(jax.sharding.reshard(tokens_BT, split.read), table_VD))
    return functools.reduce(jnp.add, found)


def _forward(
    splits: tuple[_Split, ...], tokens: list[jax.Array], tables: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    return _embed(splits, tokens, tables), tokens


def _backward(
    splits: tuple[_Split, ...], tokens: list[jax.Array], gradient_BTD: jax.Array
) -> tuple[Any, list[jax.Array]]:
    # Custom derivative: the transpose of the sum would be another one, and the compiler's own
    # scatter-add gathers every device's activations if those are fewer bytes than the table.
    whole, found = P(*splits[0].tokens, None), []
    gradient_BTD = jax.sharding.reshard(gradient_BTD, whole)  # once for all of them
    for split, tokens_BT in zip(splits, tokens, strict=True):
        run = on_each_device(split.add_up, (split.tokens, whole), P(split.vocabulary, None))
        found.append(run(tokens_BT, gradient_BTD))
    return [None] * len(tokens), found


_embed.defvjp(_forward, _backward)


def _sum_over(spec: Iterable[MeshAxes], x: jax.Array) -> jax.Array:
    """Sum over all devices that split dimensions with this sharding."""
    axes = tuple(name for part in spec for name in parts_of(part))
    return jax.lax.psum(x, axes) if axes else x


@jax.named_scope("norm")
def layer_norm(x: jax.Array, scale: nnx.Param, bias: nnx.Param, *, epsilon: float) -> jax.Array:
    """Layer normalization (arXiv 1607.06450) over the last dimension, in float32."""
    return _normalize(True, epsilon, x, gather(scale), gather(bias))


@jax.named_scope("norm")
def rms_norm(x: jax.Array, scale: nnx.Param, *, epsilon: float, offset: float = 0.0) -> jax.Array:
    """Root-mean-square normalization (arXiv 1910.07467) over the last dimension, in float32.

    The normalized x is multiplied by offset + scale.
    """
    factor = gather(scale) + offset if offset else gather(scale)
    return _normalize(False, epsilon, x, factor, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(
    centered: bool, epsilon: float, x: jax.Array, factor: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """x over its root mean square, or its standard deviation where it is centered, times factor,
    plus bias. With a custom derivative: JAX's own saves x four times, in float32."""
    return _norm_forward(centered, epsilon, x, factor, bias)[0]


def _norm_forward(
    centered: bool, epsilon: float, x: jax.Array, factor: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Any]:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True) if centered else None
    # Two passes: mean(x^2) - mean(x)^2 cancels where the mean is large.
    x_centered = x32 if mean is None else x32 - mean
    inverse = jax.lax.rsqrt(jnp.square(x_centered).mean(-1, keepdims=True) + epsilon)
    y = x_centered * inverse * factor
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, mean, inverse, factor, bias)


def _norm_backward(
    centered: bool, epsilon: float, kept: Any, d_y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    del epsilon
    x, mean, inverse, factor, bias = kept
    x32, d_y = x.astype(jnp.float32), d_y.astype(jnp.float32)
    normed = (x32 if mean is None else x32 - mean) * inverse
    d_normed = d_y * factor
    d_x = d_normed - normed * (d_normed * normed).mean(-1, keepdims=True)
    if centered:
        d_x -= d_normed.mean(-1, keepdims=True)
    before = tuple(range(x.ndim - 1))
    d_factor = (d_y * normed).sum(before).astype(factor.dtype)
    d_bias = None if bias is None else d_y.sum(before).astype(bias.dtype)
    return (d_x * inverse).astype(x.dtype), d_factor, d_bias


_normalize.defvjp(_norm_forward, _norm_backward)


def rotate(
    x_BTNH: jax.Array, positions_BT: jax.Array, frequencies: jax.Array, *, scale: float = 1.0
) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864), the halves of H paired, angles in float32.

    Args:
      x_BTNH: queries or keys.
      positions_BT: int32 positions of the tokens in their documents.
      frequencies: float32 [H/2], radians per position.
      scale: factor of the rotated x.
    """
    positions_BT = shard(positions_BT, ("inner_batch", "length"))
    angle_BTH = positions_BT[:, :, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle_BTH)[:, :, None, :], jnp.sin(angle_BTH)[:, :, None, :]
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


class Norm(Protocol):
    """Protocol of norms over the last dimension."""

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters."""
        ...

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x, in its dtype."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root-mean-square normalization with a scale.

    Attributes:
      dim: size of the normalized dimension.
      epsilon: added to the mean square.
      offset: added to the scale: with 1, a parameter of 0 is the identity scale (Gemma).
    """

    dim: int
    epsilon: float
    offset: float = 0.0

    def weights(self, key: jax.Array) -> Weights:
        """Scale of 1, including the offset."""
        one = constant(1.0 - self.offset)
        return {"scale": param(key, (self.dim,), ("vector",), one, role="norm")}

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x."""
        return rms_norm(x, own["scale"], epsilon=self.epsilon, offset=self.offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """Layer normalization with a scale and a bias."""

    dim: int
    epsilon: float

    def weights(self, key: jax.Array) -> Weights:
        """Scale of 1 and biases of 0."""
        return {
            "scale": param(key, (self.dim,), ("vector",), constant(1.0), role="norm"),
            "bias": param(key, (self.dim,), ("vector",), constant(0.0), role="norm"),
        }

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x."""
        return layer_norm(x, own["scale"], own["bias"], epsilon=self.epsilon)


Pooling = Literal["mean", "first", "max"]


def pool(
    h_BTD: jax.Array, segment_ids_BT: jax.Array, pooling: Pooling, *, normalized: bool
) -> jax.Array:
    """Embedding of each text, float32 [B, D], without padding.

    Args:
      h_BTD: final hidden states, one text per row.
      segment_ids_BT: 0 for padding, which follows the text.
      pooling: the mean of the text's tokens, its first token, or the elementwise maximum.
      normalized: whether it is divided by its norm.
    """
    h_BTD, counts_BT1 = h_BTD.astype(jnp.float32), (segment_ids_BT != 0)[..., None]
    match pooling:
        case "mean":
            # At least 1, as in sentence-transformers: a text without tokens is zeros.
            tokens_B1 = jnp.maximum(counts_BT1.sum(1), 1)
            vector_BD = jnp.where(counts_BT1, h_BTD, 0.0).sum(1) / tokens_B1
        case "first":
            vector_BD = h_BTD[:, 0]
        case "max":
            vector_BD = jnp.where(counts_BT1, h_BTD, -jnp.inf).max(1)
    if not normalized:
        return vector_BD
    length_B1 = jnp.linalg.norm(vector_BD, axis=-1, keepdims=True)
    return vector_BD / jnp.maximum(length_B1, 1e-12)
