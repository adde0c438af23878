"""Memory-mapped arrays of the train state, sharded by process.

A file is mapped only while a part of it is copied, so that a process holds only the requested
pages. Its contents are invalid once the process has ended: an update may be half written
then, and a run resumes from its checkpoint.
"""

import contextlib
import functools
import math
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config.files import remove_tree, writing

FOLDER = "offload"  # in a run's folder


class Scratch:
    """Scratch folder of this process, created at first use; older contents are deleted.

    It is removed with its last reference, or with the process.

    Attributes:
      workdir: the run's folder on a disk; None: a temporary folder (TMPDIR).
    """

    def __init__(self, workdir: Path | None) -> None:
        self.workdir = workdir

    @functools.cached_property
    def folder(self) -> Path:
        """Path of the folder, created empty at first use."""
        if self.workdir is None:
            made = Path(tempfile.mkdtemp(prefix="jaxtrain-offload-"))
        else:
            made = self.workdir / FOLDER / f"process-{jax.process_index()}"
            if (earlier := _REMOVALS.get(made.resolve())) is not None:
                earlier.detach()  # its owner may be collected later, and the folder is now ours
            if made.exists():
                remove_tree(made)
            made.mkdir(parents=True)
        _REMOVALS[made.resolve()] = weakref.finalize(
            self, _remove, made, in_run=self.workdir is not None
        )
        return made


# What removes each folder of this process. Two runs after each other have the same one.
_REMOVALS: dict[Path, weakref.finalize] = {}


def _remove(folder: Path, *, in_run: bool) -> None:
    remove_tree(folder)
    if in_run:
        with contextlib.suppress(OSError):  # others' files still exist
            folder.parent.rmdir()


class FileArray:
    """Array in files: a leaf of a state that programs receive piece by piece.

    Attributes:
      shape: of the whole array.
      dtype: of its elements.
      sharding: which part is in the files of which device's process; a stack of layers is not split
        along its first dimension.
    """

    def __init__(self, scratch: Scratch, name: str, like: jax.ShapeDtypeStruct) -> None:
        """Create the files, filled with zeros.

        Args:
          scratch: the folder; it exists as long as the array.
          name: of the array, used in file names.
          like: shape, dtype and sharding.

        Raises:
          FullDiskError: the file system has no room for them.
        """
        self.shape, self.dtype = tuple(like.shape), np.dtype(like.dtype)
        self.sharding: Any = like.sharding
        self._part = tuple(self.sharding.shard_shape(self.shape))
        self._scratch = scratch
        files: dict[Any, Path] = {}
        self._files: dict[jax.Device, Path] = {}  # devices with the same part share one
        here: Any = self.sharding.addressable_devices_indices_map(self.shape)
        for device, index in here.items():
            bounds = tuple((one.start, one.stop) for one in index)
            path = scratch.folder / f"{name}.{len(files)}"
            self._files[device] = files.setdefault(bounds, path)
        size = math.prod(self._part) * self.dtype.itemsize
        for path in files.values():
            with writing(path), path.open("wb") as file:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    # Allocate now: a mapped page without room later crashes the process.
                    os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the whole array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, layer: int | None = None) -> jax.Array:
        """Return the array on the devices, or one layer of it, [1, ...]; a copy."""
        shape, part, offset = self._extent(layer)
        copies: dict[Path, np.ndarray] = {}
        for path in self._files.values():
            if path not in copies:
                copies[path] = np.array(np.memmap(path, self.dtype, "r", offset, part))
        pieces = [jax.device_put(copies[path], device) for device, path in self._files.items()]
        return jax.make_array_from_single_device_arrays(shape, self.sharding, pieces)

    def write(self, x: jax.Array, layer: int | None = None) -> None:
        """Overwrite the array with another of its shape, or one layer; waits until the values are
        computed.

        Args:
          x: with the sharding `sharding`.
          layer: None: all of it.
        """
        _, part, offset = self._extent(layer)
        written = set()
        for shard in x.addressable_shards:
            path = self._files[shard.device]
            if path not in written:
                written.add(path)
                np.memmap(path, self.dtype, "r+", offset, part)[...] = np.asarray(shard.data)

    def _extent(self, layer: int | None) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the shape of the whole array, that of a device's part, and the part's offset in
        its file, in bytes.
        """
        if layer is None:
            return self.shape, self._part, 0
        assert self._part[0] == self.shape[0], "a stack of layers is not split by layers"
        part = (1, *self._part[1:])
        return (1, *self.shape[1:]), part, layer * math.prod(part) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole array, if this process has it."""
        del copy  # always a JAX array
        return np.asarray(self.read(), dtype)

    def __repr__(self) -> str:
        return f"FileArray({self.dtype.name}{list(self.shape)})"
