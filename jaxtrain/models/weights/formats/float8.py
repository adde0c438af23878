"""Dequantization of block-scaled float8 weights (DeepSeek-V3) to float32.

Section 3.3 of arXiv 2412.19437: a value of the file is e4m3 (arXiv 2209.05433) and represents
itself times the scale of its block of 128 rows and 128 columns; the last blocks may be smaller.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.formats.safetensors import Tensor

METHOD = "fp8"
_SCALES = "_scale_inv"
_DTYPE = "F8_E4M3"


@dataclasses.dataclass(frozen=True)
class Float8Tensor:
    """A matrix in float8.

    Attributes:
      codes: [rows, columns].
      scales: [blocks of rows, blocks of columns].
      block: rows and columns of a block.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def dtype(self) -> str:
        """Dtype of the tensor, as in safetensors."""
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns]."""
        return self.codes.shape

    def open(self) -> np.ndarray:
        """Return the matrix in float32."""
        rows, columns = self.block
        codes = np.memmap(self.codes.file, jnp.float8_e4m3fn, "r", self.codes.begin, self.shape)
        out = codes.astype(np.float32)
        # One row of blocks at a time: the scales are never expanded to a whole second matrix.
        for number, scales in enumerate(self.scales.open().astype(np.float32)):
            out[number * rows :][:rows] *= np.repeat(scales, columns)[: out.shape[1]]
        return out


def merge(
    stored: Mapping[str, Tensor], settings: Mapping[str, Any], *, where: str
) -> dict[str, Tensor | Float8Tensor]:
    """Merge matrices with their scales.

    Args:
      stored: the files' tensors.
      settings: config.json's quantization_config.
      where: the folder, for the message.

    Raises:
      UserError: another size of blocks, matrices without scales, or scales of another shape.
    """
    block = settings.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise UserError(
            f"{where}: quantization_config has weight_block_size={block!r}; use the rows and "
            "columns of a block, such as [128, 128]"
        )
    found: dict[str, Tensor | Float8Tensor] = dict(stored)
    for name in [name for name, tensor in stored.items() if tensor.dtype == _DTYPE]:
        codes, scales = stored[name], found.pop(name + _SCALES, None)
        if not isinstance(scales, Tensor):
            raise UserError(f"{where}: {name} has no {name}{_SCALES} next to it; fetch it again")
        blocks = tuple(math.ceil(n / size) for n, size in zip(codes.shape, block, strict=False))
        if len(codes.shape) != 2 or scales.shape != blocks or scales.dtype != "F32":
            raise UserError(
                f"{where}: {name} {list(codes.shape)} with scales {list(scales.shape)} of "
                f"{scales.dtype} needs one F32 for each {block[0]} x {block[1]} block; fetch it "
                "again"
            )
        found[name] = Float8Tensor(codes, scales, (block[0], block[1]))
    return found
