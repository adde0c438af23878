"""Buffers of a pipeline rank."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import layout as in_memory
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import on_each_device


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of this shape, dtype and sharding."""
    return _zeros(shape, ())


def buffer(shape: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
    """Return slots for `slots` arrays of this shape, at least one."""
    return _zeros(shape, (max(slots, 1),))


def _zeros(shape: jax.ShapeDtypeStruct, leading: tuple[int, ...]) -> jax.Array:
    spec = None if shape.sharding is None else P(*[None] * len(leading), *shape.sharding.spec)
    return jnp.zeros((*leading, *shape.shape), shape.dtype, out_sharding=spec)


def take(buffers: Sequence[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """What lies at a place of each."""
    return [jax.lax.dynamic_index_in_dim(b, slot, keepdims=False) for b in buffers]


def put(
    buffers: Sequence[jax.Array], slot: jax.Array, values: Sequence[jax.Array]
) -> list[jax.Array]:
    """The buffers with these values at a place."""
    return [
        jax.lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), slot, 0)
        for b, v in zip(buffers, values, strict=True)
    ]


def by_rows(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Values with rows after rows in memory, as in their buffers: else XLA's TPU compiler gives a
    buffer the layout that one is used in, and copies all its places from one to the other.

    Each device says so of its shard: of a whole array XLA would gather it first.
    """
    specs = [jax.typeof(x).sharding.spec for x in values]

    def on_one(shards: list[jax.Array]) -> list[jax.Array]:
        return [
            in_memory.with_layout_constraint(x, in_memory.Layout(tuple(range(x.ndim))))
            for x in shards
        ]

    return on_each_device(on_one, (specs,), specs)(list(values))
