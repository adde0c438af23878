"""Parameter trees cut into equal fragments, sharded on every device.

Letters: k replicas, S numbers of a fragment in an array, over all devices.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import is_variable, logical_axes, on_each_device, parts_of

Arrays = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Every `count`-th layer, from the fragment's own on (strided, as arXiv 2501.18512 has it).

    If an array has no layers, or a number that `count` does not divide, its first dimension that
    divides on a device is split instead: rows of a table, features of a vector. If there is none,
    its flattened elements are: fragments then depend on the mesh. Elementwise update rules do not
    mind, and every fragment has the same size.

    Attributes:
      count: of fragments.
    """

    count: int

    def cut(self, tree: Any, place: jax.Array) -> Arrays:
        """A fragment of each named array: [S], or [k, S] of replicas' arrays.

        Args:
          tree: of named arrays.
          place: which fragment, an int32 scalar from 0.
        """
        wholes, parts = _specs(tree)

        def on_one(arrays: Arrays, place: jax.Array) -> Arrays:
            return [
                jax.lax.dynamic_index_in_dim(self._dealt(x), place, 1, keepdims=False).reshape(
                    (-1,) if len(part) == 1 else (1, -1)
                )
                for x, part in zip(arrays, parts, strict=True)
            ]

        return on_each_device(on_one, (wholes, P()), parts)(jax.tree.leaves(tree), place)

    def paste(self, tree: Any, fragment: Arrays, place: jax.Array) -> Any:
        """The tree with a fragment in place of what `cut` takes from it."""
        wholes, parts = _specs(tree)

        def on_one(arrays: Arrays, fragment: Arrays, place: jax.Array) -> Arrays:
            pasted: Arrays = []
            for x, part in zip(arrays, fragment, strict=True):
                dealt = self._dealt(x)
                part = part.reshape(dealt.shape[0], dealt.shape[2])
                dealt = jax.lax.dynamic_update_index_in_dim(dealt, part, place, 1)
                pasted.append(dealt.reshape(-1)[: x.size].reshape(x.shape))
            return pasted

        leaves, structure = jax.tree.flatten(tree)
        run = on_each_device(on_one, (wholes, parts, P()), wholes)
        return structure.unflatten(run(leaves, fragment, place))

    def _dealt(self, x: jax.Array) -> jax.Array:
        """A device's shard with its fragments along the second dimension: [A, count, M]."""
        for dim, size in enumerate(x.shape):
            if size % self.count == 0:
                before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
                return x.reshape(before * size // self.count, self.count, after)
        return jnp.pad(x.reshape(-1), (0, -x.size % self.count)).reshape(1, self.count, -1)


def _specs(tree: Any) -> tuple[list[P], list[P]]:
    """How each array lies, and a fragment of it: as many devices have different parts of it."""
    wholes, parts = [], []
    for variable in jax.tree.leaves(tree, is_leaf=is_variable):
        spec = jax.typeof(variable.get_value()).sharding.spec
        lead = int(logical_axes(variable)[0] == "replica")
        split = tuple(axis for part in spec[lead:] for axis in parts_of(part))
        wholes.append(spec)
        parts.append(P(*spec[:lead], split or None))
    return wholes, parts
