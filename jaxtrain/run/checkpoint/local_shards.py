"""Addressable shards of a train state in local files, with the digests of a persistent checkpoint.

A folder holds one step: the shards of one process, each distinct one once, concatenated in files;
`layout.json`, which lists them; `extra.json`, the metadata; and `manifest.json`, written last. No
array is gathered: what another host's devices hold is in that host's folder.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.untrusted import parse_json
from jaxtrain.run.checkpoint import manifest
from jaxtrain.run.checkpoint.manifest import Leaf, Manifest, Reading

_LAYOUT, _EXTRA = "layout.json", "extra.json"
_FILE_BYTES = 64 * 2**20  # after which another file begins: each is digested by one thread
_ALIGNMENT = 64  # bytes

Bounds = tuple[tuple[int, int], ...]  # start and stop in each dimension
Shards = dict[tuple[str, Bounds], np.ndarray]  # by the array's name and the shard's bounds


def layout_key(leaves: Mapping[str, Any], layer_order: list[int] | None) -> str:
    """Return a digest of what this process's devices hold: equal for two processes with the same
    shards, and across restarts with the same layout.

    Args:
      leaves: arrays, or shapes with shardings, by name.
      layer_order: of a pipeline.
    """
    rows = [
        [name, np.dtype(x.dtype).name, list(x.shape), sorted(_addressable_bounds(x))]
        for name, x in sorted(leaves.items())
    ]
    return hashlib.blake2b(json.dumps([layer_order, rows]).encode(), digest_size=8).hexdigest()


def _addressable_bounds(leaf: Any) -> set[Bounds]:
    indices = leaf.sharding.addressable_devices_indices_map(tuple(leaf.shape)).values()
    return {_bounds(index, leaf.shape) for index in indices}


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    assert index is not None, "the sharding covers all of this process's devices"
    spans = (one.indices(size) for one, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in spans)


def copy_to_host(arrays: Mapping[str, jax.Array]) -> Shards:
    """Return copies of this process's distinct shards, which later steps cannot change."""
    found = {
        (name, _bounds(shard.index, x.shape)): shard.data
        for name, x in arrays.items()
        for shard in reversed(x.addressable_shards)
    }
    for data in found.values():
        data.copy_to_host_async()
    return {where: _to_host(data) for where, data in found.items()}


def _to_host(data: jax.Array) -> np.ndarray:
    is_on_host = data.sharding.memory_kind not in (None, "device")
    (device,) = data.devices()
    # NumPy may share the memory of such arrays, which the next step reuses.
    return np.array(data, copy=True if is_on_host or device.platform == "cpu" else None)


def write(
    folder: Path, step: int, shards: Shards, leaves: dict[str, Leaf], extra: dict[str, Any]
) -> None:
    """Write and seal a folder.

    Args:
      folder: does not exist yet.
      step: of the state.
      shards: from `copy_to_host`.
      leaves: the manifest's entries of the global arrays.
      extra: JSON-able metadata of the state.

    Raises:
      OSError: something cannot be written; the folder has no manifest.
    """
    folder.mkdir(parents=True)
    rows, left = [], dict(shards)
    for number in range(len(shards)):
        if not left:
            break
        with (folder / f"arrays-{number}.bin").open("wb") as file:
            while left and file.tell() < _FILE_BYTES:
                (name, bounds), content = next(iter(left.items()))
                del left[name, bounds]
                file.write(bytes(-file.tell() % _ALIGNMENT))
                rows.append([name, bounds, number, file.tell()])
                file.write(np.ascontiguousarray(content).reshape(-1).view(np.uint8).data)
    (folder / _LAYOUT).write_text(json.dumps(rows))
    (folder / _EXTRA).write_text(json.dumps(extra))
    manifest.seal(folder, step, leaves)


def check(folder: Path, step: int) -> Manifest:
    """Compare all files of a folder with their digests; return the manifest.

    Raises:
      CheckpointError: a file is missing, damaged or cannot be read.
    """
    found = manifest.read(folder, step)
    manifest.check(folder, found, found.files)
    return found


def read_extra(folder: Path, step: int) -> dict[str, Any]:
    """Return the metadata; CheckpointError if they cannot be read."""
    with Reading(folder, step):
        return parse_json((folder / _EXTRA).read_bytes())


def read(
    folder: Path, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Return global arrays of the shards in a folder, which has been checked.

    Args:
      folder: of a layout with the same `layout_key`.
      step: of the state.
      wanted: each with a sharding.

    Raises:
      CheckpointError: a shard is missing or cannot be read.
    """
    with Reading(folder, step):
        positions: dict[tuple[str, Bounds], tuple[int, int]] = {
            (name, tuple((int(start), int(stop)) for start, stop in bounds)): (file, offset)
            for name, bounds, file, offset in parse_json((folder / _LAYOUT).read_bytes())
        }

        def shard(name: str, leaf: jax.ShapeDtypeStruct, bounds: Bounds) -> np.ndarray:
            file, offset = positions[name, bounds]
            shape = tuple(stop - start for start, stop in bounds)
            dtype = jnp.dtype(leaf.dtype)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            path = folder / f"arrays-{int(file)}.bin"
            content = np.fromfile(path, np.uint8, count=size, offset=offset)
            return content.view(dtype).reshape(shape)

        def array(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            once = functools.cache(functools.partial(shard, name, leaf))
            return jax.make_array_from_callback(
                leaf.shape,
                leaf.sharding,
                lambda index: once(_bounds(index, leaf.shape)),
                dtype=leaf.dtype,
            )

        return {name: array(name, leaf) for name, leaf in wanted.items()}
