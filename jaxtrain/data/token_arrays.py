"""Token arrays read by slices: concatenated, in a bucket, verified on read."""

import threading
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np

from jaxtrain.config.buckets import BucketPath, in_threads
from jaxtrain.config.errors import UserError

KEPT_BYTES = 1 << 26  # of the latest slices: held-out ones are read at each evaluation
# A row of 8 kB at a random offset reads 8 times its size once; 100 GB have 6 MB of checksums.
BLOCK_BYTES = 1 << 16


class Joined:
    """Concatenated arrays of one dtype; copies only what is requested.

    Args:
      parts: at least one.
    """

    def __init__(self, parts: list[np.ndarray]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, wanted: slice | np.ndarray) -> np.ndarray:
        """Return a slice without a step, or the tokens at some positions."""
        if isinstance(wanted, slice):
            begin, end, step = wanted.indices(len(self))
            assert step == 1, "slices without a step"
            return self._between(begin, max(begin, end))
        return np.array([self._between(one, one + 1)[0] for one in wanted.tolist()], self.dtype)

    def _between(self, begin: int, end: int) -> np.ndarray:
        number = int(np.searchsorted(self._ends, begin, side="right"))
        found = []
        while begin < end:
            before = int(self._ends[number]) - len(self._parts[number])
            found.append(self._parts[number][begin - before : end - before])
            begin, number = int(self._ends[number]), number + 1
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros(0, self.dtype)


class Ranged:
    """Token array read by slices, from several threads if needed.

    Args:
      file: tokens from its first byte on.
      dtype: of the tokens.
      count: number for tokens.
    """

    def __init__(self, file: BucketPath, dtype: np.dtype, count: int) -> None:
        self._file, self._count = file, count
        self.dtype = dtype
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, wanted: slice | np.ndarray) -> np.ndarray:
        """Return a slice without a step, or the tokens at some positions.

        Raises:
          UserError: the file is shorter than it was.
          BucketError: the bucket does not answer.
        """
        if isinstance(wanted, slice):
            begin, end, step = wanted.indices(self._count)
            assert step == 1, "slices without a step"
            return self._between((begin, max(begin, end)))
        return np.concatenate([np.zeros(0, self.dtype), *self.windows(wanted, wanted * 0 + 1)])

    def windows(self, starts: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        """Return the slices of `sizes` tokens from `starts` on, requested concurrently."""
        bounds = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        return in_threads(self._between, bounds)

    def _between(self, bounds: tuple[int, int]) -> np.ndarray:
        with self._lock:
            if bounds in self._kept:
                self._kept.move_to_end(bounds)
                return self._kept[bounds]
        begin, end = bounds
        if begin == end:
            return np.zeros(0, self.dtype)
        size = self.dtype.itemsize
        content = self._file.read_range(begin * size, end * size)
        if len(content) != (end - begin) * size:
            raise UserError(
                f"{self._file} was changed: it ends within its tokens {begin:,} to {end:,} of "
                f"{self._count:,}; prepare the text again"
            )
        found = np.frombuffer(content, self.dtype)
        with self._lock:
            self._kept_bytes += found.nbytes if bounds not in self._kept else 0
            self._kept[bounds] = found
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return found


class Verified:
    """Token array whose blocks are verified at their first read.

    Args:
      file: mapped, tokens from its first byte on.
      dtype: of the tokens.
      count: number of tokens, at least one.
      checksums: of each block of BLOCK_BYTES, from `block_checksums`.
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
        """Return a slice without a step, or the tokens at some positions.

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
                "those that were prepared; prepare the text again"
            )
        self._seen[block] = True


def block_checksums(file: Path) -> np.ndarray:
    """Return the CRC-32 of each block of a file, little-endian uint32 [blocks]."""
    with file.open("rb") as stream:
        blocks = iter(lambda: stream.read(BLOCK_BYTES), b"")
        return np.fromiter(map(zlib.crc32, blocks), "<u4")


Tokens = np.ndarray | Joined | Ranged | Verified


def windows(tokens: Tokens, starts: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Return `sizes` tokens from each of `starts` on; one request each if they are remote."""
    if isinstance(tokens, Ranged):
        return tokens.windows(starts, sizes)
    bounds = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    return [tokens[begin:end] for begin, end in bounds]
