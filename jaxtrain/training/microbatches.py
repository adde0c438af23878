"""Gradient accumulation: split a batch into microbatches, number its rows, sum gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import shard
from jaxtrain.training.objectives.losses import Sums


def with_row_ids(batch: Batch) -> Batch:
    """The batch with the numbers of its rows, counted here unless that was done before."""
    if batch.rows is not None:
        return batch
    return dataclasses.replace(batch, rows=shard(jnp.arange(len(batch.targets)), ("batch",)))


def split_microbatches(batch: Batch, count: int) -> Batch:
    """A leading microbatch dimension; row r goes to microbatch r mod count.

    Rows that lie on one device stay there: splitting into runs of rows would move them.
    """

    def one(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(one, batch)


def accumulate(
    of_one: Callable[..., tuple[nnx.State, Sums, nnx.State]],
    added: Callable[[nnx.State, nnx.State], nnx.State],
    micros: Batch,
    statistics: nnx.State,
    *,
    like: nnx.State,
    dtype: str,
) -> tuple[nnx.State, Sums, nnx.State]:
    """Sums of gradients and metrics over microbatches, one after the other, and new statistics.

    Args:
      of_one: (statistics, microbatch) -> gradients, sums and statistics.
      added: the sum of gradients with one microbatch's more.
      micros: the microbatches, a leading dimension of them.
      statistics: the running statistics.
      like: a tree like the gradients, in whose memory their sums are.
      dtype: of these sums.
    """

    def add(carry: Any, micro: Batch) -> tuple[Any, None]:
        grads, sums, statistics = carry
        more_grads, more_sums, statistics = of_one(statistics, micro)
        sums = jax.tree.map(jnp.add, sums, more_sums)
        return (added(grads, more_grads), sums, statistics), None

    first = jax.tree.map(lambda x: x[0], micros)
    grads, sums, _ = jax.eval_shape(of_one, statistics, first)
    grads = jax.tree.map(lambda g: g.update(dtype=jnp.dtype(dtype)), grads)
    none, no_sums = jax.tree.map(_zeros, (grads, sums))
    none = jax.tree.map(lambda x, to: jax.device_put(x, jax.typeof(to).memory_space), none, like)
    (grads, sums, statistics), _ = jax.lax.scan(add, (none, no_sums, statistics), micros)
    return grads, sums, statistics


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype, out_sharding=shape.sharding)
