"""Leaves of a state: names, shapes, dtypes, differences from a checkpoint's, and fingerprints.

A fingerprint is a checksum of an array's elements that is the same on every mesh.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, nearest
from jaxtrain.parallel.gathering import is_pinned
from jaxtrain.parallel.sharding import name_of

_MAX_SHOWN = 8
_MOST_AT_ONCE = 1 << 28  # bytes


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One array of a checkpoint, from its metadata.

    Attributes:
      shape: global shape.
      dtype: the dtype it was saved with.
      mesh: axis sizes of the mesh it was saved from; None for an array on a single device.
      spec: its PartitionSpec's entries on that mesh; None for an array on a single device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    mesh: dict[str, int] | None = None
    spec: tuple[Any, ...] | None = None


class OtherLeavesError(UserError):
    """The requested arrays differ from the stored ones.

    Attributes:
      headline: the message without the list of differences.
    """

    def __init__(self, headline: str, lines: Iterable[str]) -> None:
        super().__init__("\n".join([headline, *lines]))
        self.headline = headline


def require_same_leaves(
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    stored: Mapping[str, StoredLeaf],
    *,
    partial: bool,
    folder: AnyPath,
) -> None:
    """Raise OtherLeavesError, at most one screen, if the requested arrays differ from the stored
    ones.

    Args:
      wanted: by name.
      stored: all arrays of the checkpoint, by name.
      partial: ignore stored arrays that are not requested.
      folder: the checkpoint's, `workdir/checkpoints/<step>`.
    """
    found = list(_differences(wanted, stored, partial=partial))
    if not found:
        return
    rest = len(found) - _MAX_SHOWN
    lines = [f"  {line}" for line in found[:_MAX_SHOWN]]
    lines += [f"  and {rest} more"] if rest > 0 else []
    raise OtherLeavesError(
        f"the checkpoint of step {folder.name} in {folder.parent} was written by a different "
        f"model or optimizer than this configuration's ({len(found)} of its leaves differ); use "
        f"{folder.parent.parent / 'config.gin'}, which wrote it, or another workdir:",
        lines,
    )


def _differences(
    wanted: Mapping[str, jax.ShapeDtypeStruct], stored: Mapping[str, StoredLeaf], *, partial: bool
) -> Iterable[str]:
    """Yield a clause for each leaf that is missing, unexpected, or of another shape or dtype."""
    for name, leaf in wanted.items():
        if name not in stored:
            close = nearest(name, stored.keys() - wanted.keys())
            hint = f" (it has {close})" if close else ""
            yield f"{name}: not in the checkpoint{hint}"
        elif (tuple(leaf.shape), leaf.dtype) != (stored[name].shape, stored[name].dtype):
            yield (
                f"{name}: {_form(stored[name])} in the checkpoint, {_form(leaf)} in this "
                "configuration"
            )
    if not partial:
        for name in stored.keys() - wanted.keys():
            yield f"{name}: {_form(stored[name])} in the checkpoint, absent from this configuration"


def _form(leaf: jax.ShapeDtypeStruct | StoredLeaf) -> str:
    return f"{np.dtype(leaf.dtype).name}[{', '.join(map(str, leaf.shape))}]"


def groups(stored: Mapping[str, StoredLeaf]) -> Iterator[dict[str, StoredLeaf]]:
    """Yield the arrays in groups of at most 256 MiB, or of one array, that are read at once."""
    part: dict[str, StoredLeaf] = {}
    size = 0
    for name, leaf in stored.items():
        size += math.prod(leaf.shape) * leaf.dtype.itemsize
        if part and size > _MOST_AT_ONCE:
            yield part
            part, size = {}, math.prod(leaf.shape) * leaf.dtype.itemsize
        part[name] = leaf
    if part:
        yield part


def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return names, leaves and structure of a pytree; a name joins the keys with "/"."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [name_of(path) for path, _ in paths]
    assert len(set(names)) == len(names), "two leaves of the state have one name"
    return names, [leaf for _, leaf in paths], treedef


def stored_leaf(leaf: Any) -> StoredLeaf:
    """Return the leaf that Orbax's metadata describe."""
    sharding = leaf.sharding
    mesh = spec = None
    if hasattr(sharding, "partition_spec"):
        mesh = dict(zip(sharding.axis_names, map(int, sharding.shape), strict=True))
        spec = tuple(sharding.partition_spec)
    return StoredLeaf(tuple(leaf.shape), np.dtype(leaf.dtype), mesh, spec)


# 2**32 / golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
_FACTOR = 2654435769
_THREADS = min(8, os.cpu_count() or 1)  # numpy sums release the interpreter lock
_ROW, _ROWS = 1024, 64  # elements of a row, rows of a block: one stays in a core's cache


Arrays = Mapping[str, Any]  # jax.Array or offload.files.FileArray


def fingerprints(arrays: Arrays) -> dict[str, int]:
    """Return a number below 2**32 for each array: the same on every mesh, another if any element
    changes.

    Args:
      arrays: of any shapes; each element of at most 4 bytes.
    """
    return await_fingerprints(start_fingerprints(arrays))


def start_fingerprints(arrays: Arrays) -> dict[str, jax.Array | Future[int]]:
    """Start the computation; `await_fingerprints` waits for the result."""
    in_files = {name: x for name, x in arrays.items() if not isinstance(x, jax.Array)}
    arrays = {name: x for name, x in arrays.items() if name not in in_files}
    here = {name: x for name, x in arrays.items() if _is_in_memory(x)}
    of_hosts = [name for name, x in arrays.items() if name not in here and is_pinned(x.sharding)]
    there = {name: x for name, x in arrays.items() if name not in here and name not in of_hosts}
    # One program for all arrays: separate programs in flight starve simulated devices' threads
    # until their reductions wait for one another indefinitely.
    counted: dict[str, jax.Array | Future[int]] = dict(_fingerprint_all(there)) if there else {}
    # Offloaded arrays are moved to the devices one by one, and freed.
    counted |= {name: _fetch(arrays[name]) for name in of_hosts}
    counted |= {name: _fetch(x.read()) for name, x in in_files.items()}
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fingerprint")
    counted |= {name: threads.submit(_fingerprint_in_memory, x) for name, x in here.items()}
    threads.shutdown(wait=False)  # they end when they are done
    return counted


def await_fingerprints(counted: Mapping[str, jax.Array | Future[int]]) -> dict[str, int]:
    """Return the fingerprints that `dispatch` has started to compute."""
    here = {name: x.result() for name, x in counted.items() if isinstance(x, Future)}
    there = {name: x for name, x in counted.items() if name not in here}
    return here | {name: int(x) for name, x in jax.device_get(there).items()}


@jax.jit
def _fingerprint_all(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _fingerprint(x) for name, x in arrays.items()}


def _fetch(x: jax.Array) -> jax.Array:
    (found,) = _fingerprint_all(
        {"": jax.device_put(x, x.sharding.with_memory_kind("device"))}
    ).values()
    return jax.block_until_ready(found)


def _fingerprint(x: jax.Array) -> jax.Array:
    """Return the elements' bits times an odd number drawn from each one's position, summed modulo
    2**32.

    Sums of integers do not depend on their order, so the layout does not matter; an odd factor has
    an inverse modulo 2**32, so any change of a single element is detected.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    flat_index = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        index = jnp.arange(size, dtype=jnp.uint32)
        flat_index = flat_index * jnp.uint32(size) + jnp.expand_dims(
            index, range(1, bits.ndim - axis)
        )
    return jnp.sum(bits * (flat_index * jnp.uint32(_FACTOR) | jnp.uint32(1)), dtype=jnp.uint32)


def _is_in_memory(x: jax.Array) -> bool:
    """Whether numpy can look at the array where it is, whole."""
    devices = x.sharding.device_set
    return len(devices) == 1 and x.is_fully_addressable and next(iter(devices)).platform == "cpu"


def _fingerprint_in_memory(x: jax.Array) -> int:
    """Return the same number, three times as fast: XLA does not vectorise such a sum on processors.

    Row r and column k of rows of K elements, K even, are element r K + k, which is even where k is,
    and so is its product with the odd factor. So the sum is that of the factor times (K times the
    rows' sums times r, and the columns' sums times k), and of the even columns.
    """
    flat = np.asarray(x).reshape(-1)
    bits = flat.view(f"uint{8 * min(flat.itemsize, 4)}")
    by_row, columns = 0, np.zeros(_ROW, np.uint32)
    for first in range(0, bits.size, _ROWS * _ROW):
        block = bits[first : first + _ROWS * _ROW]
        if block.size % _ROW:
            block = np.pad(block, (0, -block.size % _ROW))
        block = block.reshape(-1, _ROW)
        rows = block.sum(axis=1, dtype=np.uint32)
        by_row += int(rows @ np.arange(first // _ROW, first // _ROW + len(rows), dtype=np.uint32))
        columns += block.sum(axis=0, dtype=np.uint32)
    by_column = int(columns @ np.arange(_ROW, dtype=np.uint32))
    return (_FACTOR * (_ROW * by_row + by_column) + int(columns[::2].sum(dtype=np.uint32))) % 2**32
