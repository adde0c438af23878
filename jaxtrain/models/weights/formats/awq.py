"""AutoAWQ's layout of linear layers (version `gemm`): pack and unpack int4 codes.

A layer [out, in] is three tensors there: `qweight` int32 [in, out / 8], `qzeros` int32
[in / group, out / 8] and `scales` float16 [in / group, out]; its weight is (code - zero) scale. An
int32 has the codes of 8 neighbors along out, from the lowest bits those of numbers 0, 2, 4, 6, 1,
3, 5 and 7.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.formats.safetensors import Tensor

METHOD = "awq"
CODES, ZEROS, SCALES = "qweight", "qzeros", "scales"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_codes(codes_IO: np.ndarray) -> np.ndarray:
    """Codes of 4 bits as int32 [in, out / 8]."""
    eight = codes_IO.reshape(len(codes_IO), -1, len(ORDER)).astype(np.uint32)
    found = np.zeros(eight.shape[:2], np.uint32)
    for index, number in enumerate(ORDER):
        found |= eight[:, :, number] << np.uint32(4 * index)
    return found.view(np.int32)


def unpack_codes(packed_IP: np.ndarray) -> np.ndarray:
    """Return the codes uint8 [in, out] of int32 [in, out / 8]."""
    found = np.empty((*packed_IP.shape, len(ORDER)), np.uint8)
    words = np.ascontiguousarray(packed_IP).view(np.uint32)
    for index, number in enumerate(ORDER):
        found[..., number] = (words >> np.uint32(4 * index)) & 15
    return found.reshape(len(packed_IP), -1)


@dataclasses.dataclass(frozen=True)
class AwqTensor:
    """The weight of a linear layer.

    Attributes:
      codes, zeros, scales: its three tensors.
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def dtype(self) -> str:
        """Dtype of the tensor, as in safetensors."""
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.scales.shape[1], self.codes.shape[0]

    def open(self) -> np.ndarray:
        """Return the dequantized values, float32 [out, in]."""
        scales_GO = np.asarray(self.scales.open()).astype(np.float32)
        group = self.codes.shape[0] // len(scales_GO)
        codes_GSO = unpack_codes(self.codes.open()).reshape(len(scales_GO), group, -1)
        # int8: a code less its zero is between -15 and 15.
        unpacked_GSO = (
            codes_GSO.astype(np.int8) - unpack_codes(self.zeros.open()).astype(np.int8)[:, None]
        )
        return (unpacked_GSO * scales_GO[:, None]).reshape(self.codes.shape[0], -1).T


def merge(stored: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor | AwqTensor]:
    """Merge codes, zeros and scales into one tensor, called `weight`.

    Raises:
      UserError: codes without zeros or scales, or of inconsistent shapes.
    """
    found: dict[str, Tensor | AwqTensor] = dict(stored)
    for name in [name for name in stored if name.endswith(f".{CODES}")]:
        stem = name.removesuffix(CODES)
        parts = [found.pop(stem + part, None) for part in (CODES, ZEROS, SCALES)]
        three = [one for one in parts if isinstance(one, Tensor)]
        if len(three) < len(parts):
            raise UserError(
                f"{where}: {name} has no {stem}{ZEROS} and {stem}{SCALES} next to it; "
                "fetch it again"
            )
        if not _fit(*three):
            shapes = ", ".join(f"{list(one.shape)} of {one.dtype}" for one in three)
            raise UserError(
                f"{where}: {name} with its zeros and scales is {shapes}; in AutoAWQ's layout it is "
                f"[in, out / {len(ORDER)}] of I32, [in / group, out / {len(ORDER)}] of I32 and "
                "[in / group, out] of F16"
            )
        found[f"{stem}weight"] = AwqTensor(*three)
    return found


def _fit(codes: Tensor, zeros: Tensor, scales: Tensor) -> bool:
    if not (codes.dtype == zeros.dtype == "I32" and scales.dtype == "F16"):
        return False
    if not len(codes.shape) == len(zeros.shape) == len(scales.shape) == 2 or 0 in scales.shape:
        return False
    (inside, columns), (groups, outside) = codes.shape, scales.shape
    fits = zeros.shape == (groups, columns) and outside == columns * len(ORDER)
    return fits and inside % groups == 0
