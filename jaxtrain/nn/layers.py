"""Embedding lookup, biases, rotation by RoPE, pooling of texts, fully connected layers.

Letters: B batch, T length, D embed, N heads, H head_dim, V vocab, F features.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.parameters import GLOROT, Initializer, Role, constant, normal, param
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


# -- fully connected layers and activation functions -----------------------------------------------
# Letters: B batch, I inputs, O outputs.

Activation = Literal["sigmoid", "tanh", "relu", "gelu", "silu"]

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "tanh": jax.numpy.tanh,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}

# A dimension that is not a multiple of this is replicated: 3 channels, 10 classes.
SHARED = 8


def fan_in(size: int) -> str:
    """Return the logical axis for `size` inputs of a layer."""
    return "narrow" if size % SHARED else "fan_in"


def fan_out(size: int) -> str:
    """Return the logical axis for `size` outputs of a layer."""
    return "narrow" if size % SHARED else "fan_out"


def validate_widths(model: object, widths: tuple[int, ...]) -> None:
    """Raise UserError for fewer than two widths, or a width of 0."""
    written = f"{type(model).__name__}.widths={widths}"
    if len(widths) < 2:
        raise UserError(f"{written}; use at least two: (inputs, outputs)")
    if min(widths) < 1:
        raise UserError(f"{written}; use widths of at least 1")


def multiply_adds(widths: tuple[int, ...]) -> int:
    """Multiply-adds of the layers between these widths, for one vector."""
    return sum(i * o for i, o in itertools.pairwise(widths))


class Dense(nnx.Module):
    """x W + b: vectors [B, I] to [B, O], the outputs split over `tensor` if they are sharded."""

    def __init__(
        self,
        key: jax.Array,
        inputs: int,
        outputs: int,
        init: Initializer = GLOROT,
        *,
        role: Role | None = None,
    ) -> None:
        axes = fan_in(inputs), fan_out(outputs)
        self.weight = param(key, (inputs, outputs), axes, init, role=role)
        self.bias = param(key, (outputs,), axes[1:], constant(0.0))

    def __call__(self, x_BI: jax.Array, execution: Execution) -> jax.Array:
        """Return the outputs, in x's dtype."""
        # Gathered along I from the devices that computed its shards in the previous layer.
        x_BI = shard(x_BI, ("batch", "fan_in"))
        return add_bias(execution.contract("BI,IO->BO", x_BI, self.weight), self.bias)
