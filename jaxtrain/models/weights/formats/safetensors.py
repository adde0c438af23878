"""The safetensors format: read single tensors, write files.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape,
begin and end of its bytes after the header), and the bytes. A header is untrusted:
it is checked against the file before any data is read.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import writing
from jaxtrain.config.untrusted import MAX_JSON_BYTES, open_regular, parse_json

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
# Also: the codes of quantized weights, and counts.
_KNOWN = {**DTYPES, "I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip
_MOST_DIMENSIONS = 64  # NumPy's name


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Location of a tensor in a file.

    Attributes:
      file: the file.
      begin: its first byte, from the start of the file.
      dtype: as the format writes it, "BF16".
      shape: its shape.
    """

    file: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in the file, in bytes."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    def open(self) -> np.ndarray:
        """Return the tensor, memory-mapped: only the parts that are used are read.

        The mapping is released with its last view, so that read pages do not stay in memory.
        """
        if not math.prod(self.shape):
            return np.empty(self.shape, _KNOWN[self.dtype])
        return np.memmap(self.file, _KNOWN[self.dtype], "r", self.begin, self.shape)


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    Raises:
      UserError: it is not a safetensors file, or its header is invalid.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise _format_error(
                file, f"a header of {length} bytes does not fit into its {size} bytes"
            )
        text = stream.read(length)
    try:
        header = parse_json(text, unique_names=True)
        header.pop("__metadata__", None)
        found = {name: _tensor(file, 8 + length, row) for name, row in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _format_error(file, f"its header: {str(error) or type(error).__name__}") from error
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda one: (one[1].begin, one[1].bytes)):
        if tensor.begin != end:
            raise _format_error(file, f"{name} does not begin where the tensor before it ends")
        end += tensor.bytes
    if end != size:
        raise _format_error(file, f"its tensors end at byte {end}, the file at {size}")
    return found


def _tensor(file: Path, start: int, row: Mapping[str, Any]) -> Tensor:
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    numbers = (begin, end, *shape)
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    # Bounded before they are multiplied.
    if not all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in numbers
    ):
        raise ValueError(f"{numbers} are no offsets and sizes")
    if row["dtype"] not in _BITS:
        raise ValueError(f"the dtype {row['dtype']!r} is none of the format's")
    tensor = Tensor(file, start + begin, row["dtype"], shape)
    if end - begin != tensor.bytes:
        raise ValueError(f"{list(shape)} of {row['dtype']} are not {end - begin} bytes")
    return tensor


def _format_error(file: Path, detail: str) -> UserError:
    return UserError(f"{file} is not a safetensors file ({detail}); fetch it again")


def write(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str | Mapping[str, str],
    tensors: Iterable[np.ndarray],
) -> None:
    """Write a file, tensor by tensor.

    Args:
      file: the path, which does not exist yet.
      shapes: of each tensor, by name, in the order in which they come.
      dtype: of all of them, or of each by name; one of DTYPES, or I32, I64.
      tensors: the arrays, of any dtype of the kind; consumed one at a time.

    Raises:
      FullDiskError: there is no room; the file is removed.
    """
    dtypes = dict.fromkeys(shapes, dtype) if isinstance(dtype, str) else dtype
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * itemsize(dtypes[name])
        header[name] = {"dtype": dtypes[name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors' bytes begin at a multiple of 8
    done = False
    try:
        with writing(file), file.open("xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
                assert tensor.shape == shape, f"{tensor.shape} is not {shape}"
                stream.write(raw(tensor.astype(_KNOWN[dtypes[name]], copy=False)))
        done = True
    finally:
        if not done:
            file.unlink(missing_ok=True)


def itemsize(dtype: str) -> int:
    """Bytes per element of a dtype."""
    return _KNOWN[dtype].itemsize


def raw(tensor: np.ndarray) -> Any:
    """Return the bytes of a tensor in file order, as a buffer."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
