"""Tokens of a file in a bucket, read by ranged requests."""

import threading
from collections import OrderedDict

import numpy as np

from jaxtrain.config.buckets import BucketPath, in_threads
from jaxtrain.config.errors import UserError

KEPT_BYTES = 1 << 26  # of the slices read last: held-out ones are asked for at each evaluation


class Ranged:
    """Tokens that are read by slices, from several threads if need be.

    Args:
      file: whole, tokens from its first byte on.
      dtype: of the tokens.
      count: how many there are.
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
        """A slice without a step, or the tokens at some places.

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
                f"{self._count:,}; prepare the text anew"
            )
        found = np.frombuffer(content, self.dtype)
        with self._lock:
            self._kept_bytes += found.nbytes if bounds not in self._kept else 0
            self._kept[bounds] = found
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return found
