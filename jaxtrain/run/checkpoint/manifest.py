"""Checkpoint manifest: the digest (CRC-32, BLAKE2b, MD5) of each file, fingerprints of arrays.

TensorStore has checksums for its indices but none for the arrays' own bytes: a flipped bit on the
disk would come back as a wrong parameter. `manifest.json` is written last and atomically, so that a
folder with one is a finished checkpoint and anything else is a leftover of a kill. It includes its
own digest. All names in it are untrusted: none of them may lead out of the checkpoint.

New digests are CRC-32. They guard against accidents, a failing disk or a truncated copy: whoever
alters a file on purpose can recompute any digest. For two contents of one size CRC-32
detects all differences within four consecutive bytes, all of two bits less than 512 MiB apart (its
polynomial is primitive), and of the others all but one in 2**32 (W. W. Peterson and D. T. Brown,
Cyclic codes for error detection, 1961). Arrays have fingerprints too, a different checksum: a
change of a parameter would have to escape both. CRC-32 takes a fifth of the time of BLAKE2b (0.3
and 1.7 s per GB on one core).
"""

import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.buckets import AnyPath, BucketPath, Stored
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import sync, write_atomically
from jaxtrain.config.untrusted import parse_json
from jaxtrain.parallel.gathering import is_pinned

# Prefix of a digest. MD5 is what buckets compute of what they store.
CRC32, MD5 = "crc32:", "md5:"


class _Crc32:
    """CRC-32 (IEEE 802.3), as gzip and zip store it, with the methods of hashlib's objects."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, content: bytes | memoryview) -> None:
        self._value = zlib.crc32(content, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_ALGORITHMS: dict[str, Any] = {CRC32: _Crc32, MD5: hashlib.md5}


def kind(digest: str) -> str:
    """Return the kind of a digest, its prefix; ValueError if it is unknown."""
    prefix = digest[: digest.find(":") + 1]
    if prefix not in _ALGORITHMS:
        raise ValueError(f"the digest {digest[:40]!r} is of an unknown kind")
    return prefix


def digest(file: AnyPath, prefix: str) -> tuple[int, str]:
    """Return size and digest of the readable part of a file.

    Args:
      file: on a disk, read in parts of 256 KiB, or in a bucket.
      prefix: CRC32 or MD5, the prefix of the digest.
    """
    algorithm = _ALGORITHMS[prefix]
    if isinstance(file, BucketPath):
        found, content = algorithm(), file.read_bytes()
        found.update(content)
        return len(content), prefix + found.hexdigest()
    with file.open("rb") as stream:
        text = hashlib.file_digest(stream, algorithm).hexdigest()
        return stream.tell(), prefix + text


FILE = "manifest.json"
FORMAT = 4  # of a checkpoint: the manifest, the files it names, and the metadata of the state
# Reading and digesting release the interpreter lock. More threads than cores would compete with
# those that read the arrays meanwhile.
_THREADS = min(8, os.cpu_count() or 1)

# Errors of Orbax and TensorStore for files that are missing, truncated or altered; TensorStore's
# statuses (DATA_LOSS, NOT_FOUND, ...) arrive as ValueError. Errors of devices, such as out of
# memory (jax.errors.JaxRuntimeError), are not among them.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of JSON
# System errors for a missing file or a failing disk. Others (no
# permission, no free descriptor, an unavailable server) do not mean that the file is damaged.
_BROKEN = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EBADMSG,
    errno.EUCLEAN if hasattr(errno, "EUCLEAN") else errno.EIO,
}  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or its files cannot be read or differ from what was
    written."""


class UnreadError(CheckpointError):
    """A checkpoint cannot be read now because of a system error; its files may be intact."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array in a manifest.

    Attributes:
      fingerprint: of its elements, from `fingerprints`.
      shape: global shape.
      dtype: its name.
    """

    fingerprint: int
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a sealed checkpoint.

    Attributes:
      format: of the checkpoint, 4.
      step: the checkpoint's step.
      files: size in bytes and digest of each file, by its path in the folder.
      leaves: the arrays by name.
    """

    format: int
    step: int
    files: dict[str, tuple[int, str]]
    leaves: dict[str, Leaf]


class Reading:
    """Turn errors of reading a checkpoint into CheckpointError, within the context.

    A context manager, because Orbax raises a bare Exception for an array that it cannot read.
    """

    def __init__(self, folder: AnyPath, step: int) -> None:
        self._folder, self._step = folder, step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if type(error) is Exception or isinstance(error, _DAMAGE):
            cause = error.__cause__ or error
            detail = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise damage_error(self._folder, self._step, detail[:300]) from error


def is_sealed(folder: AnyPath) -> bool:
    """Whether a checkpoint's folder is finished, as far as its files' names tell."""
    return (folder / FILE).is_file()


def seal(folder: AnyPath, step: int, leaves: dict[str, Leaf]) -> Manifest:
    """Digest every file in `folder` and write its manifest, whole or not at all.

    The files are flushed to disk before their manifest, so that a power failure
    never leaves a sealed checkpoint without its content: the previous one may be deleted at once.

    Raises:
      OSError: a file cannot be read or the manifest not be written.
    """
    if isinstance(folder, BucketPath):
        rows = {name: row for name, row in _list_objects(folder).items() if name != FILE}
        found = _in_threads(lambda name: _digest_in_bucket(folder, rows[name]), rows)
        manifest = Manifest(FORMAT, step, dict(zip(rows, found, strict=True)), leaves)
        write_atomically(folder / FILE, _envelope(dataclasses.asdict(manifest)))
        return manifest
    names = sorted(path.relative_to(folder).as_posix() for path in _walk(folder) if path.is_file())
    names = [name for name in names if name != FILE]
    found = _in_threads(lambda name: _digest_on_disk(folder / name), names)
    for path in (*_walk(folder), folder, folder.parent):
        if path.is_dir():
            sync(path)
    manifest = Manifest(FORMAT, step, dict(zip(names, found, strict=True)), leaves)
    write_atomically(folder / FILE, _envelope(dataclasses.asdict(manifest)))
    sync(folder)  # the new name, too, has to reach the disk
    return manifest


def read(folder: AnyPath, step: int) -> Manifest:
    """Return the manifest of the sealed checkpoint in `folder`.

    Raises:
      CheckpointError: it is damaged, of another step, or leads out of the folder.
      UserError: a newer jaxtrain wrote it.
    """
    _validate_ways_out(folder, step)
    try:
        manifest = _from_bytes((folder / FILE).read_bytes())
    except FileNotFoundError as error:
        raise damage_error(folder, step, f"{FILE} is missing: it was never sealed") from error
    except UserError:
        raise
    except OSError as error:
        raise _of_system(folder, step, FILE, error) from error
    except _MALFORMED as error:
        raise damage_error(folder, step, f"{FILE}: {_first_line(error)}") from error
    if manifest.step != step:
        raise damage_error(folder, step, f"{FILE} is that of step {manifest.step}")
    return manifest


def own_digest(folder: AnyPath, step: int) -> str:
    """Return the digest of the manifest in `folder`, which covers all files that it names; errors
    as of `read`."""
    read(folder, step)
    with Reading(folder, step):
        return "blake2b:" + json.loads((folder / FILE).read_bytes())["blake2b"]


def check(folder: AnyPath, manifest: Manifest, names: Iterable[str]) -> None:
    """Read the named files and compare them with the manifest.

    Raises:
      CheckpointError: a file is missing, of another size, or of another content.
      UnreadError: one cannot be read because of a system error.
    """
    names = list(names)
    stored = _list_objects(folder) if isinstance(folder, BucketPath) else None

    def difference(name: str) -> str | None:
        try:
            return _difference(folder, name, manifest.files[name], stored)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            raise _of_system(folder, manifest.step, name, error) from error

    found = _in_threads(difference, names)
    for name, difference in zip(names, found, strict=True):
        if difference:
            raise damage_error(folder, manifest.step, f"{name} {difference}")


def damage_error(folder: AnyPath, step: int, detail: str) -> CheckpointError:
    """The error that names the checkpoint and what is wrong with it."""
    return CheckpointError(f"the checkpoint of step {step} in {folder} cannot be read ({detail})")


def unread(folder: AnyPath, step: int, detail: str) -> UnreadError:
    """Return the error with a checkpoint and the system's error message."""
    return UnreadError(
        f"the checkpoint of step {step} in {folder} cannot be read now ({detail}); nothing was "
        "changed; make it readable and run the same command again"
    )


def _of_system(folder: AnyPath, step: int, name: str, error: OSError) -> CheckpointError:
    make = damage_error if error.errno in _BROKEN else unread
    return make(folder, step, f"{name} cannot be read: {_first_line(error)}")


# -- the file -------------------------------------------------------------------------------------


def _envelope(content: dict[str, Any]) -> bytes:
    """Return the file's bytes; later formats keep this form, to be distinguished from broken
    files."""
    text = json.dumps(content, sort_keys=True, indent=1)
    digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    return f'{{"blake2b": "{digest}",\n"manifest": {text}}}\n'.encode()


def _from_bytes(content: bytes) -> Manifest:
    found = parse_json(content)["manifest"]
    # Byte for byte: a bit flip in white space is harmless, but means that the disk is failing.
    if _envelope(found) != content:
        raise ValueError("its bytes changed")
    if found["format"] > FORMAT:
        raise UserError(
            f"the checkpoint of step {found['step']} is of format {found['format']}, written by a "
            f"newer jaxtrain; this one reads formats up to {FORMAT}: update jaxtrain"
        )
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']} is none that a release has written")
    files = {name: (int(size), str(written)) for name, (size, written) in found["files"].items()}
    for name, (_, written) in files.items():
        kind(written)  # ValueError where it is unknown
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
            raise ValueError(f"it names {name!r}, which is not a file inside the checkpoint")
    leaves = {
        name: Leaf(int(leaf["fingerprint"]), tuple(leaf["shape"]), leaf["dtype"])
        for name, leaf in found["leaves"].items()
    }
    return Manifest(found["format"], found["step"], files, leaves)


# -- files ----------------------------------------------------------------------------------------


def _walk(folder: Path) -> Iterable[Path]:
    """Yield everything below a folder; links are listed, not followed."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in folders + files)


def _validate_ways_out(folder: AnyPath, step: int) -> None:
    """Raise CheckpointError if the folder or something in it is a link to elsewhere."""
    if isinstance(folder, BucketPath):
        return  # names that lead out are rejected where they are listed
    root = folder.parent.resolve()
    for path in (folder, *_walk(folder)):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise damage_error(folder, step, f"{path} is a link that leads out of {root}")


def _list_objects(folder: BucketPath) -> dict[str, Stored]:
    """Return a bucket's metadata of each object below a folder, by its name there."""
    return {row.name: row for row in folder.list_objects()}


def _md5(row: Stored) -> str | None:
    """Return the digest that the bucket computed, or None."""
    return row.md5 and MD5 + row.md5


def _digest_in_bucket(folder: BucketPath, row: Stored) -> tuple[int, str]:
    """Return size and digest: the MD5 that the bucket has, or the CRC-32 of what is read back."""
    md5 = _md5(row)
    return (row.bytes, md5) if md5 else digest(folder / row.name, CRC32)


def _digest_on_disk(file: Path) -> tuple[int, str]:
    sync(file)
    return digest(file, CRC32)


def _difference(
    folder: AnyPath, name: str, expected: tuple[int, str], stored: dict[str, Stored] | None
) -> str | None:
    """Return how a file differs from its size and digest; None if it does not.

    Args:
      folder: of the checkpoint.
      name: the file's, in the folder.
      expected: size and digest.
      stored: a bucket's metadata of all objects in the folder; None on a disk.
    """
    size, written = expected
    path, row = folder / name, stored.get(name) if stored is not None else None
    if isinstance(path, Path):
        found = path.stat().st_size
    elif row is not None:
        found = row.bytes
    else:
        return "is missing"
    if found != size:
        return f"has {found} bytes instead of {size}"
    known = _md5(row) if row is not None and kind(written) == MD5 else None
    if (known or digest(path, kind(written))[1]) != written:
        return "does not match its digest"
    return None


def _in_threads(function: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as threads:
        return list(threads.map(function, names))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# -- fingerprints of arrays ------------------------------------------------------------------------
# A fingerprint is a checksum of an array's elements that is the same on every mesh.

# 2**32 / golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
_FACTOR = 2654435769
_SUM_THREADS = min(8, os.cpu_count() or 1)  # numpy sums release the interpreter lock
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
    threads = concurrent.futures.ThreadPoolExecutor(_SUM_THREADS, thread_name_prefix="fingerprint")
    counted |= {name: threads.submit(_fingerprint_in_memory, x) for name, x in here.items()}
    threads.shutdown(wait=False)  # they end when they are done
    return counted


def await_fingerprints(counted: Mapping[str, jax.Array | Future[int]]) -> dict[str, int]:
    """Return the fingerprints that `start_fingerprints` computes."""
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
