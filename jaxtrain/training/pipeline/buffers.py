"""Places on a rank for what waits: made, read and filled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import layout as in_memory
from jax.sharding import PartitionSpec as P


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of this shape, dtype and sharding."""
    return _zeros(shape, ())


def buffer(shape: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
    """Places for so many arrays of this shape, at least one."""
    return _zeros(shape, (max(slots, 1),))


def _zeros(shape: jax.ShapeDtypeStruct, leading: tuple[int, ...]) -> jax.Array:
    spec = None if shape.sharding is None else P(*[None] * len(leading), *shape.sharding.spec)
    return jnp.zeros((*leading, *shape.shape), shape.dtype, out_sharding=spec)


def take(buffers: Sequence[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """What lies at a place of each."""
    return [_by_rows(jax.lax.dynamic_index_in_dim(b, slot, keepdims=False)) for b in buffers]


def put(
    buffers: Sequence[jax.Array], slot: jax.Array, values: Sequence[jax.Array]
) -> list[jax.Array]:
    """The buffers with these values at a place."""
    return [
        jax.lax.dynamic_update_index_in_dim(b, _by_rows(v.astype(b.dtype)), slot, 0)
        for b, v in zip(buffers, values, strict=True)
    ]


def _by_rows(x: jax.Array) -> jax.Array:
    """x with rows after rows in memory, as in its buffer: else XLA's TPU compiler gives the buffer
    the layout that x is used in, and copies all its places from one to the other."""
    return in_memory.with_layout_constraint(x, in_memory.Layout(tuple(range(x.ndim))))
