"""Best-fit packing: documents kept whole where they fit into a row.

Source: Ding et al. 2024 (arXiv 2404.10830), Fewer Truncations Improve Language Modeling: best-fit
decreasing. What is longer than a row is cut into whole rows and a rest. Letter: T row length.
"""

import dataclasses
import functools

import numpy as np

from jaxtrain.data.batch import Batch
from jaxtrain.data.source import WholeBatches
from jaxtrain.data.token_arrays import Tokens, windows


@dataclasses.dataclass(frozen=True)
class BestFit(WholeBatches):
    """Rows of `sequence_length` tokens, each of whole documents or parts.

    A document of n tokens is n - 1 inputs, each with its successor as its target: every token but
    the first of its document is a target exactly once an epoch, and what a row has left is padding
    (segment 0, loss_mask 0).

    Attributes:
      tokens: integers [total]; every document with its end-of-text token, if there is one.
      offsets: int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]].
      sequence_length: T, in tokens.
    """

    tokens: Tokens
    offsets: np.ndarray
    sequence_length: int

    def __len__(self) -> int:
        return len(self._rows.bounds) - 1

    @property
    def padding(self) -> float:
        """The share of all rows that is padding."""
        return 1.0 - int(self._rows.sizes.sum()) / (len(self) * self.sequence_length)

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def examples(self, indices: np.ndarray) -> Batch:
        """The rows `indices`, one under the other: tokens [len(indices), T]."""
        shape, rows = (len(indices), self.sequence_length), self._rows
        inputs, targets, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
        parts = [np.arange(rows.bounds[index], rows.bounds[index + 1]) for index in indices]
        found = iter(self._windows(np.concatenate(parts)))
        for row, of_row in enumerate(parts):
            place = 0
            for number in range(1, len(of_row) + 1):
                window = next(found)
                size = len(window) - 1
                here = slice(place, place + size)
                inputs[row, here], targets[row, here] = window[:-1], window[1:]
                segment_ids[row, here], positions[row, here] = number, np.arange(size)
                place += size
        return Batch(inputs, targets, (segment_ids > 0).astype(np.float32), segment_ids, positions)

    def _windows(self, parts: np.ndarray) -> list[np.ndarray]:
        return windows(self.tokens, self._rows.starts[parts], self._rows.sizes[parts] + 1)

    @functools.cached_property
    def _rows(self) -> "_Rows":
        return _pack(self.offsets, self.sequence_length)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Which parts of documents stand in which row.

    Attributes:
      bounds: int64 [rows + 1]; row r has the parts bounds[r] to bounds[r + 1] - 1.
      starts: each part's first token in the stream.
      sizes: its inputs.
    """

    bounds: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


def _pack(offsets: np.ndarray, length: int) -> _Rows:
    """Best-fit decreasing: a document's rest, the longest first, into the fullest row it fits."""
    inputs = np.maximum(np.diff(offsets) - 1, 0)
    # Whole rows of long documents, then the rests.
    wholes, rests = inputs // length, inputs % length
    document = np.repeat(np.arange(len(inputs)), wholes)
    number = np.arange(len(document)) - np.repeat(np.cumsum(wholes) - wholes, wholes)
    whole_starts = offsets[document] + number * length
    (short,) = np.nonzero(rests)
    short = short[np.argsort(-rests[short], kind="stable")]
    row_of = np.empty(len(short), np.int64)
    # The rows with so much room, and one bit of a number for each size that some row has.
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms, rows = 0, 0
    for place, size in enumerate(rests[short].tolist()):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row, rows = length, rows, rows + 1
        row_of[place] = row
        if room > size:
            by_room[room - size].append(row)
            rooms |= 1 << (room - size)
    order = np.argsort(row_of, kind="stable")
    starts = np.concatenate([whole_starts, (offsets[:-1] + wholes * length)[short[order]]])
    sizes = np.concatenate([np.full(len(whole_starts), length), rests[short[order]]])
    counts = np.concatenate(
        [np.ones(len(whole_starts), np.int64), np.bincount(row_of, minlength=rows)]
    )
    return _Rows(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), starts, sizes)
