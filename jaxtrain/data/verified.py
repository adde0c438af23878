"""Verified memory-mapped tokens: each block is checked by CRC-32 before its first use."""

import zlib
from pathlib import Path

import numpy as np

from jaxtrain.config.errors import UserError

# A row of 8 kB at a random place reads 8 times its size once; 100 GB have 6 MB of checksums.
BLOCK_BYTES = 1 << 16


class Verified:
    """Tokens that are read by slices; a block that was read before is not compared again.

    Args:
      file: mapped, tokens from its first byte on.
      dtype: of the tokens.
      count: how many there are, at least one.
      checksums: of each block of BLOCK_BYTES, as `block_checksums` gives them.
    """

    def __init__(self, file: Path, dtype: np.dtype, count: int, checksums: np.ndarray) -> None:
        self._file, self._checksums = file, checksums
        self._mapped = np.memmap(file, dtype, "r", shape=(count,))
        self._bytes = self._mapped.view(np.uint8)
        self._seen = np.zeros(len(checksums), bool)
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self._mapped)

    def __getitem__(self, wanted: slice | np.ndarray) -> np.ndarray:
        """A slice without a step, or the tokens at some positions.

        Raises:
          UserError: the file is damaged there.
        """
        if isinstance(wanted, slice):
            begin, end, _ = wanted.indices(len(self))
            starts, sizes = np.array([begin]), np.array([max(end - begin, 0)])
        else:
            starts = np.asarray(wanted)
            sizes = np.ones_like(starts)
        return self.verify(starts, sizes)[wanted]

    def verify(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return all tokens, after the blocks of these slices have been verified.

        Args:
          starts: the first token of each slice.
          sizes: tokens of each.

        Raises:
          UserError: a block is damaged.
        """
        item = self.dtype.itemsize
        firsts = starts * item // BLOCK_BYTES
        lasts = (np.maximum(starts + sizes, 1) * item - 1) // BLOCK_BYTES
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            for block in range(first, last + 1):
                if not self._seen[block]:
                    self._compare(block)
        return self._mapped

    def _compare(self, block: int) -> None:
        begin = block * BLOCK_BYTES
        content = self._bytes[begin : begin + BLOCK_BYTES]
        if zlib.crc32(content.data) != self._checksums[block]:
            raise UserError(
                f"{self._file} is damaged: its bytes {begin:,} to {begin + len(content):,} are not "
                "those that were prepared; prepare the text anew"
            )
        self._seen[block] = True


def block_checksums(file: Path) -> np.ndarray:
    """Return the CRC-32 of each block of a file, little-endian uint32 [blocks]."""
    with file.open("rb") as stream:
        blocks = iter(lambda: stream.read(BLOCK_BYTES), b"")
        return np.fromiter(map(zlib.crc32, blocks), "<u4")
