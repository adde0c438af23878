"""Gradient accumulation: split a batch into microbatches, number its rows."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import shard


def numbered(batch: Batch) -> Batch:
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
