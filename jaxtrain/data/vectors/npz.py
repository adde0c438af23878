"""Safe reading of untrusted .npz files: sizes are checked before decompression."""

import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterable

import numpy as np

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.untrusted import MalformedError, open_regular

# An array is decompressed to more than this only if the file has at least a 200th of it: a zip
# "bomb" of 1 MB becomes 1 GB.
_SMALL_BYTES, _MOST_TIMES = 64 << 20, 200
_ENCRYPTED = 1  # a bit of a member's flags
_DAMAGE = (
    ValueError, TypeError, OverflowError, EOFError, NotImplementedError, RuntimeError, OSError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


def read_npz(
    path: AnyPath, names: Iterable[str], *, optional: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """Return some arrays of a file by name.

    Args:
      path: the file.
      names: of arrays that it must have.
      optional: of arrays that it may have.

    Raises:
      MalformedError: it is not such a file, lacks an array, or has one of Python objects or of
        another size than it claims.
      UserError: see `untrusted.open_regular`.
    """
    stream = io.BytesIO(path.read_bytes()) if isinstance(path, BucketPath) else open_regular(path)
    with stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                wanted = [*names, *(name for name in optional if name in there)]
                missing = [name for name in wanted if name not in there]
                if missing:
                    raise MalformedError(f"no array {missing[0]!r} among {', '.join(there)}")
                return {name: _array(archive, there[name]) for name in wanted}
        except MalformedError:
            raise
        except _DAMAGE as error:
            raise MalformedError(str(error) or type(error).__name__) from error


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    if info.flag_bits & _ENCRYPTED:
        raise MalformedError(f"{info.filename} is encrypted")
    if info.file_size > max(_SMALL_BYTES, _MOST_TIMES * info.compress_size):
        raise MalformedError(
            f"{info.filename} unpacks from {info.compress_size:,} to {info.file_size:,} bytes, "
            f"more than {_MOST_TIMES} times as many; write it with numpy.savez"
        )
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in ((1, 0), (2, 0)):
            raise MalformedError(f"{info.filename} has version {version} of the format")
        read = (np.lib.format.read_array_header_1_0 if version == (1, 0)
                else np.lib.format.read_array_header_2_0)  # fmt: skip
        shape, _, dtype = read(member)
        if dtype.hasobject:
            raise MalformedError(f"{info.filename} holds Python objects, which run code")
        # NumPy allocates the header's size before it reads.
        rest = info.file_size - member.tell()
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != rest:
            raise MalformedError(f"{info.filename} has {rest:,} bytes, which are no {list(shape)}")
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)
