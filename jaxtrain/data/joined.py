"""Concatenated token arrays, read by slices."""

import numpy as np

from jaxtrain.data.ranged import Ranged
from jaxtrain.data.verified import Verified


class Joined:
    """Arrays of one dtype concatenated; nothing is copied but what is requested.

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
        """A slice without a step, or the tokens at some places."""
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


Tokens = np.ndarray | Joined | Ranged | Verified


def windows(tokens: Tokens, starts: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Return `sizes` tokens from each of `starts` on; one request each if they are remote."""
    if isinstance(tokens, Ranged):
        return tokens.windows(starts, sizes)
    bounds = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    return [tokens[begin:end] for begin, end in bounds]
