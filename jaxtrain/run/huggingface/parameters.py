"""Conversion between published tensors and sharded parameters.

Running statistics, which batch norms have in addition to their parameters, are among both.

Each device's part of a parameter is read from the files separately, a few layers at a time: this
machine has at most 256 MiB of it in memory, or one layer's part if that is more, and the file pages
of one tensor.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import Model
from jaxtrain.models.weights.family import Name, join
from jaxtrain.models.weights.folder import Published, StoredTensor, match
from jaxtrain.nn.parameters import Statistic
from jaxtrain.parallel.sharding import flatten
from jaxtrain.training.finetune.tuning import partition
from jaxtrain.training.setup import Setup
from jaxtrain.training.step import train_all

MOST_AT_ONCE = 1 << 28  # bytes


def shapes_of(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter and running statistic by name, its layers in the model's
    order and number."""
    names, leaves, _ = flatten(weight_shapes(setup.build))
    return {name: tuple(leaf.shape) for name, leaf in zip(names, leaves, strict=True)}


def weight_shapes(build: Callable[[jax.Array], nnx.Module]) -> nnx.State:
    """Return the parameters and running statistics that a model would have; no array is made."""
    return nnx.state(nnx.eval_shape(lambda: build(jax.random.key(0))), (nnx.Param, Statistic))


def read_parameters(
    folder: Published, setup: Setup, model: Model, unread: Collection[str] = ()
) -> nnx.State:
    """Return the parameters and running statistics of a folder, all of them, in the program's
    layout, dtypes and order of layers.

    Args:
      folder: of the published model.
      setup: their target.
      model: its sizes.
      unread: names of parameters that are left out.

    Raises:
      UserError: of another architecture, or tensors that do not fit.
    """
    family, _ = folder.family_and_model
    if not isinstance(model, family.model):
        raise UserError(
            f"{folder.path} holds a {family.architecture}, which is Train.model = "
            f"@{family.model.__name__}(), not @{type(model).__name__}()"
        )
    shapes = shapes_of(setup)
    stored = match(family, model, shapes, folder.tensors(), where=str(folder.path), unread=unread)
    of = {name.ours: name for name in family.names(model)}
    state = train_all(setup).abstract_state()
    weights = nnx.merge_state(state.params, state.statistics)
    wanted = partition(weights, lambda name, _: name not in unread)[0]
    names, leaves, treedef = flatten(wanted)
    arrays = []
    for ours, leaf in zip(names, leaves, strict=True):
        order = setup.layer_order if _is_stacked(of[ours]) else None
        read = _Reader(of[ours], shapes[ours], stored, order, leaf.dtype)
        slices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        # Device by device: `jax.make_array_from_callback` would hold all their parts.
        parts = [
            _assemble_shard(read, index, leaf.shape, device) for device, index in slices.items()
        ]
        arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts))
    return jax.tree.unflatten(treedef, arrays)


def _assemble_shard(
    read: "_Reader", index: tuple[slice, ...], shape: tuple[int, ...], device: jax.Device
) -> jax.Array:
    """Return the part of a parameter at this index, put together on its device out of a few
    layers'."""
    rows = range(*index[0].indices(shape[0]))
    row_bytes = read.row_bytes(index)
    step = max(1, MOST_AT_ONCE // max(row_bytes, 1))
    pieces = []
    for first in rows[::step]:
        some = slice(first, min(first + step, rows.stop))
        piece = jax.device_put(read((some, *index[1:])), device)
        pieces.append(piece.block_until_ready())
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _is_stacked(name: Name) -> bool:
    return name.named.startswith("L")


class _Reader:
    """Reader of the part of a parameter on one device."""

    def __init__(
        self,
        name: Name,
        shape: tuple[int, ...],
        stored: Mapping[str, StoredTensor],
        order: list[int] | None,
        dtype: Any,
    ) -> None:
        """For a parameter of this shape; `order` is the layer at each index, None the model's."""
        self._name, self._shape, self._dtype = name, shape, dtype
        self._order = order
        self._at = {index: stored[there] for index, there in name.tensors(shape)}

    def row_bytes(self, index: tuple[slice, ...]) -> int:
        """Bytes of one slice along the first dimension, of the part at this index."""
        rest = zip(index[1:], self._shape[1:], strict=True)
        size = math.prod(len(range(*part.indices(n))) for part, n in rest)
        return size * np.dtype(self._dtype).itemsize

    def __call__(self, index: tuple[slice, ...]) -> np.ndarray:
        named = len(self._name.named)
        sizes = (len(self._order), *self._shape[1:]) if self._order is not None else self._shape
        ranges = [range(*part.indices(size)) for part, size in zip(index, sizes, strict=True)]
        out = np.zeros([len(one) for one in ranges], self._dtype)
        for here in np.ndindex(out.shape[:named]):
            stored_index = tuple(one[at] for one, at in zip(ranges, here, strict=False))
            if self._order is not None:
                stored_index = (self._order[stored_index[0]], *stored_index[1:])
            if stored_index[:1] == (-1,):
                continue  # an empty slot of a stage
            whole = self._name.to_ours(self._at[stored_index].open(), self._shape)
            # Copied in file order, then transposed: three times as fast as both at once.
            out[here] = np.array(whole[index[named:]], order="K")
        return out


def their_tensors(
    names: tuple[Name, ...], params: Any, order: list[int] | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor there and its name, made of a state's parameters one at a time.

    Args:
      names: the family's map.
      params: a tree of parameters and statistics, all on devices of this process.
      order: the layer at each index of stacked arrays, -1 for none; None: the model's.
    """
    found = dict(zip(*flatten(params)[:2], strict=True))
    for _, lines in itertools.groupby(names, key=lambda name: name.theirs):
        # More than one: parameters that are concatenated to one tensor there.
        together = list(lines)
        shape = found[together[0].ours].shape
        stacked = order is not None and _is_stacked(together[0])
        if order is not None and stacked:
            shape = (sum(layer >= 0 for layer in order), *shape[1:])
        for index, there in together[0].tensors(shape):
            here = (order.index(index[0]), *index[1:]) if order is not None and stacked else index
            parts = [name.to_theirs(_part(found[name.ours], here)) for name in together]
            yield there, join(together, parts)


def _part(leaf: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Return the slice at an index of the leading dimensions, gathered from the devices' shards."""
    out = np.empty(leaf.shape[len(index) :], leaf.dtype)
    for shard in leaf.addressable_shards:
        ranges = [range(*part.indices(n)) for part, n in zip(shard.index, leaf.shape, strict=True)]
        if shard.replica_id == 0 and all(n in one for n, one in zip(index, ranges, strict=False)):
            local = tuple(one.index(n) for n, one in zip(index, ranges, strict=False))
            out[shard.index[len(index) :]] = np.asarray(shard.data[local])
    return out
