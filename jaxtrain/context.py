"""Context parallelism: each device holds a part of every sequence."""

import jax

from jaxtrain.sharding import shard


def along_context(x_BT: jax.Array) -> jax.Array:
    """Per-token numbers of whole sequences, laid out over the mesh as activations are."""
    return shard(x_BT, ("batch", "length"))
