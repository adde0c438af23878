"""KV cache and recurrent states for generation.

Letters: B batch, T length, S longest sequence, L layers, K kv heads, H head_dim.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.nn.matmul.contract import copies_of_kv_heads
from jaxtrain.nn.parameters import unstack
from jaxtrain.parallel.sharding import shard

# The arrays of one layer: its part of `Cache.layers`.
LayerCache = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached:
    """An array that a layer caches in generation.

    Attributes:
      shape: for one row; for one token if every token has its own.
      axes: logical axes of these dimensions.
      every_token: whether every token has its own (keys, values), or all share one (a
        state).
      dtype: its dtype; None is the compute dtype.
      leading: number of leading layers that keep it, before the scanned ones.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    every_token: bool
    dtype: str | None = None
    leading: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """KV cache and recurrent states of the layers.

    Attributes:
      layers: arrays with a leading layers dimension, one for each `Cached` of the model: of
        attention keys and values, both [L, B, S, K, H]; of a recurrent layer its state. Of
        unstacked layers a list with an entry per layer.
      length: int32 scalar, number of cached tokens.
    """

    layers: Any
    length: jax.Array

    def unstack(self) -> "Cache":
        """Return the same with separate arrays per layer, which XLA updates in place."""
        return dataclasses.replace(self, layers=unstack(self.layers))

    def restack(self) -> "Cache":
        """Return the same with a leading layers dimension: the inverse of `unstack`."""
        arrays = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *self.layers)
        return dataclasses.replace(self, layers=arrays)


def empty_cache(
    cached: Sequence[Cached], *, layers: int, rows: int, room: int, dtype: jnp.dtype
) -> Cache:
    """Return an empty cache of zeros.

    Args:
      cached: the arrays of each layer.
      layers: number of scanned layers.
      rows: texts that are generated at once.
      room: slots per row.
      dtype: the compute dtype.
    """
    arrays = tuple(_zeros(one, layers, rows, room, dtype) for one in cached)
    return Cache(arrays, jnp.zeros((), jnp.int32))


def _zeros(one: Cached, layers: int, rows: int, room: int, dtype: jnp.dtype) -> jax.Array:
    shape = [
        size * copies_of_kv_heads(size) if axis == "kv_heads" else size
        for axis, size in zip(one.axes, one.shape, strict=True)
    ]
    room_shape, room_axes = ((room,), ("length",)) if one.every_token else ((), ())
    zeros = jnp.zeros((one.leading + layers, rows, *room_shape, *shape), one.dtype or dtype)
    return shard(zeros, ("layers", "inner_batch", *room_axes, *one.axes))


def extend_cache(
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    layer_cache: tuple[jax.Array, ...],
    start: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
    """One layer's cached keys and values with the new ones written from position `start` on."""
    keys, values = layer_cache
    return (
        jax.lax.dynamic_update_slice_in_dim(keys, k_BTKH.astype(keys.dtype), start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(values, v_BTKH.astype(values.dtype), start, axis=1),
    )
