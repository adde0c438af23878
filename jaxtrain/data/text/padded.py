"""Padding: one document per row, padded to one of a few lengths (length buckets).

What attention and position tables cost is then a document's own length; each length is a shape that
the step is compiled for. Letter: T row length.
"""

import dataclasses
import functools

import numpy as np

from jaxtrain.data.batch import Batch
from jaxtrain.data.source import WholeBatches
from jaxtrain.data.token_arrays import Tokens, windows


@dataclasses.dataclass(frozen=True)
class PaddedText(WholeBatches):
    """Rows of documents, those of a length beside each other.

    A document of n tokens is n - 1 inputs, each with its successor as its target; what is longer
    than the longest row is cut into such rows and a rest. The others end with padding (segment 0,
    loss_mask 0).

    Attributes:
      tokens: integers [total]; every document with its end-of-text token, if there is one.
      offsets: int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]].
      lengths: of rows, in their order.
    """

    tokens: Tokens
    offsets: np.ndarray
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.rows)

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows there are of each length."""
        return tuple(np.diff(self._parts[2]).tolist())

    @property
    def padding(self) -> float:
        """The share of all rows that is padding."""
        room = sum(count * length for count, length in zip(self.rows, self.lengths, strict=True))
        return 1.0 - int(self._parts[1].sum()) / room

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def examples(self, indices: np.ndarray) -> Batch:
        """The rows `indices`, which have one length: tokens [len(indices), T]."""
        starts, sizes, ends = self._parts
        (length,) = set(np.searchsorted(ends, indices, side="right").tolist())
        shape = len(indices), self.lengths[length - 1]
        inputs, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        real = np.arange(shape[1]) < sizes[indices][:, None]
        found = windows(self.tokens, starts[indices], sizes[indices] + 1)
        for row, window in enumerate(found):
            size = len(window) - 1
            inputs[row, :size], targets[row, :size] = window[:-1], window[1:]
        positions = np.where(real, np.arange(shape[1], dtype=np.int32), 0)
        return Batch(inputs, targets, real.astype(np.float32), real.astype(np.int32), positions)

    @functools.cached_property
    def _parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row's first token and its inputs; where the rows of each length begin, and end."""
        longest = self.lengths[-1]
        inputs = np.maximum(np.diff(self.offsets) - 1, 0)
        counts = -(-inputs // longest)
        document = np.repeat(np.arange(len(inputs)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes = np.minimum(inputs[document] - number * longest, longest)
        starts = np.asarray(self.offsets)[document] + number * longest
        of_length = np.searchsorted(self.lengths, sizes)
        order = np.argsort(of_length, kind="stable")
        ends = np.searchsorted(of_length[order], np.arange(len(self.lengths) + 1))
        return starts[order], sizes[order], ends
