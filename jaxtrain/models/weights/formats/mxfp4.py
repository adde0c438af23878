"""Dequantization of MXFP4 weights (GPT-OSS) to bfloat16.

MXFP4 (OCP Microscaling Formats 1.0, sections 5.2 and 6.3): 32 elements of a row, two in a byte, the
lower half of it first, share the scale 2^(s - 127). Each element has a sign, two bits of exponent
and one of mantissa. bfloat16 represents them exactly.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.formats.safetensors import Tensor

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], np.float32)
_IN_A_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """Matrices in 4 bits, each stored transposed in the file.

    Attributes:
      blocks: [E, columns, blocks, bytes of a block].
      scales: [E, columns, blocks].
    """

    blocks: Tensor
    scales: Tensor

    @property
    def dtype(self) -> str:
        """Dtype of the tensor, as in safetensors."""
        return "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, rows, columns]."""
        matrices, columns, blocks = self.scales.shape
        return matrices, blocks * _IN_A_BLOCK, columns

    def open(self) -> np.ndarray:
        """Return the matrices in bfloat16."""
        out = np.empty((*self.scales.shape, _IN_A_BLOCK), jnp.bfloat16)
        blocks, scales = (
            np.memmap(one.file, np.uint8, "r", one.begin, one.shape)
            for one in (self.blocks, self.scales)
        )
        # One matrix at a time: the intermediate float32 values are four times as large.
        for numbers, halves, exponents in zip(out, blocks, scales, strict=True):
            scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)[..., None]
            numbers[..., 0::2] = _NUMBERS[halves & 15] * scale
            numbers[..., 1::2] = _NUMBERS[halves >> 4] * scale
        return out.reshape(*out.shape[:2], -1).swapaxes(1, 2)


def merge(stored: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor | Mxfp4Tensor]:
    """Merge blocks with their scales.

    Raises:
      UserError: blocks without scales, or of other shapes.
    """
    found: dict[str, Tensor | Mxfp4Tensor] = dict(stored)
    for name in [name for name in stored if name.endswith(_BLOCKS)]:
        whole = name.removesuffix(_BLOCKS)
        blocks, scales = found.pop(name), found.pop(whole + _SCALES, None)
        assert isinstance(blocks, Tensor), "stored so"
        if not isinstance(scales, Tensor):
            raise UserError(f"{where}: {name} has no {whole}{_SCALES} next to it; fetch it again")
        is_four_bits = blocks.dtype == scales.dtype == "U8" and len(scales.shape) == 3
        if not is_four_bits or blocks.shape != (*scales.shape, _IN_A_BLOCK // 2):
            raise UserError(
                f"{where}: {name} {list(blocks.shape)} of {blocks.dtype} with scales "
                f"{list(scales.shape)} of {scales.dtype} is not MXFP4; it must be U8 [E, columns, "
                f"blocks, {_IN_A_BLOCK // 2}] with U8 [E, columns, blocks]"
            )
        found[whole] = Mxfp4Tensor(blocks, scales)
    return found
