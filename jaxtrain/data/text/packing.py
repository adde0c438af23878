"""Packing of documents into rows: concatenated and cut, best fit, or one per row and padded.

Best fit: Ding et al. 2024 (arXiv 2404.10830), Fewer Truncations Improve Language Modeling: best-fit
decreasing; longer documents are cut into whole rows and a rest. Padding extends a row to one of a
few lengths (length buckets): the cost of attention and position tables then depends on a document's
own length, and the step is compiled for each of these lengths. Letter: T row length.
"""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from jaxtrain.data.batch import Batch
from jaxtrain.data.source import WholeBatches
from jaxtrain.data.token_arrays import Tokens, Verified, windows

# Count in slices: bincount makes an int64 copy of its input.
COUNT_SLICE = 1 << 22


@dataclasses.dataclass(frozen=True)
class PackedText(WholeBatches):
    """Rows of `sequence_length` tokens over concatenated documents.

    Row i reads the tokens [i * T, i * T + T] of the stream: T inputs and, one further, T targets.
    The last row is filled up with padding (segment 0, loss_mask 0), so every token but the first of
    its document is a counted target exactly once per epoch.

    Attributes:
      tokens: integers [total], perhaps of several files or in a bucket; every document with its
        end-of-text token, if the tokenizer has one.
      offsets: int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]].
      sequence_length: T, in tokens.
      separate: mask documents from each other; otherwise a row is one text: no segment ids,
        positions that run on, and every token's successor as its target.
    """

    tokens: Tokens
    offsets: np.ndarray
    sequence_length: int
    separate: bool = True

    def __len__(self) -> int:
        return max(0, -(-(len(self.tokens) - 1) // self.sequence_length))

    def document_lengths(self) -> np.ndarray:
        """Return the length in tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the rows `indices`, stacked: tokens [len(indices), T]."""
        length, rows = self.sequence_length, len(indices)
        starts = np.asarray(indices, np.int64) * length
        whole = (len(self.tokens) - 1) // length
        reals = np.minimum(length, len(self.tokens) - 1 - starts)
        short: list[int] = []
        inputs = np.empty((rows, length), np.int32)
        tokens = self.tokens
        if isinstance(tokens, Verified):
            tokens = tokens.verify(starts, reals + 1)
        if isinstance(tokens, np.ndarray) and indices.max() < whole:  # one gather of rows
            inputs[...] = tokens[: whole * length].reshape(whole, length)[indices]
            lasts = tokens[starts + reals]
        else:
            short = np.flatnonzero(reals < length).tolist()
            found = windows(tokens, starts, reals + 1)
            for row, window in enumerate(found):
                inputs[row, : len(window) - 1] = window[:-1]
            lasts = [window[-1] for window in found]
        targets = np.empty_like(inputs)
        targets[:, :-1] = inputs[:, 1:]
        targets[:, -1] = lasts
        loss_mask = np.empty((rows, length), np.float32)
        loss_mask.fill(1.0)
        positions, segment_ids = np.arange(length, dtype=np.int32), None
        if self.separate:
            segment_ids, positions, foreign = self._parts(starts, reals)
            loss_mask.reshape(-1)[foreign] = 0.0
        else:
            positions = np.tile(positions, (rows, 1))
        for row in short:  # the last row's final target is not an input: padding begins there
            real = reals[row]
            targets[row, real - 1] = targets[row, -1]
            for leaf in (inputs, targets, loss_mask):
                leaf[row, real:] = 0
            if segment_ids is not None:
                segment_ids[row, real:] = positions[row, real:] = 0
        return Batch(inputs, targets, loss_mask, segment_ids, positions)

    def _parts(
        self, starts: np.ndarray, reals: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return segment ids and positions of rows, and positions whose target is in another
        document.

        Only the documents of these rows are read, however many the corpus has.

        Args:
          starts: each row's first token in the stream, [rows].
          reals: number of targets that are not padding, [rows].

        Returns:
          Segment ids and positions, int32 [rows, T], the last document of a row extending into its
          padding; and the indices in the flattened rows before the first token of each document.
        """
        length, rows = self.sequence_length, len(starts)
        # A row has the rest of the document it begins in and those that begin in it: `nexts[r]` to
        # `ends[r] - 1`, the last of them perhaps only as the row's last target.
        nexts = np.searchsorted(self.offsets, starts, side="right")
        ends = np.searchsorted(self.offsets, starts + reals, side="right")
        counts = ends - nexts + 1
        row = np.repeat(np.arange(rows), counts)
        number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
        begins = self.offsets[nexts[row] + number - 1] - starts[row]
        np.maximum(begins, 0, out=begins)
        token_positions = begins + row * length
        sizes = np.empty_like(token_positions)
        np.subtract(token_positions[1:], token_positions[:-1], out=sizes[:-1])
        sizes[-1] = rows * length - token_positions[-1]
        segment_ids = np.repeat((number + 1).astype(np.int32), sizes).reshape(rows, length)
        positions = np.repeat(begins.astype(np.int32), sizes).reshape(rows, length)
        np.subtract(np.arange(length, dtype=np.int32), positions, out=positions)
        return segment_ids, positions, token_positions[number > 0] - 1


def pack(
    documents: Iterable[np.ndarray],
    sequence_length: int,
    dtype: np.dtype,
    *,
    separate: bool = True,
) -> PackedText:
    """Concatenate documents, none of them empty, into one stream."""
    arrays = list(documents)
    lengths = np.fromiter((len(array) for array in arrays), np.int64, len(arrays))
    assert not len(arrays) or lengths.min() > 0, "an empty document has no place in the stream"
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    return PackedText(tokens.astype(dtype, copy=False), offsets, sequence_length, separate)


def token_counts(tokens: Tokens, vocab_size: int) -> np.ndarray:
    """Return how often each token occurs, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(tokens), COUNT_SLICE):
        counts += np.bincount(tokens[begin : begin + COUNT_SLICE], minlength=vocab_size)
    return counts


def unigram_entropy(train: PackedText, heldout: PackedText, vocab_size: int) -> float:
    """Return nats per held-out target for a model that only knows the corpus's token frequencies.

    The cross entropy -sum_v q(v) log p(v): q over the targets of `heldout` that count, p over every
    token of both splits. A model that uses any context is below it.
    """
    corpus = token_counts(train.tokens, vocab_size) + token_counts(heldout.tokens, vocab_size)
    firsts = heldout.tokens[heldout.offsets[:-1]]
    targets = token_counts(heldout.tokens, vocab_size) - token_counts(firsts, vocab_size)
    seen = targets > 0
    log_p = np.log(corpus[seen] / corpus.sum())
    return float(-(targets[seen] * log_p).sum() / targets.sum())


@dataclasses.dataclass(frozen=True)
class BestFit(WholeBatches):
    """Rows of `sequence_length` tokens, packed best-fit with whole documents or parts of them.

    A document of n tokens is n - 1 inputs, each with its successor as its target: every token but
    the first of its document is a target exactly once per epoch, and the rest of a row is padding
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
        """Fraction of all rows that is padding."""
        return 1.0 - int(self._rows.sizes.sum()) / (len(self) * self.sequence_length)

    def document_lengths(self) -> np.ndarray:
        """Return the length in tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the rows `indices`, stacked: tokens [len(indices), T]."""
        shape, rows = (len(indices), self.sequence_length), self._rows
        inputs, targets, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
        parts = [np.arange(rows.bounds[index], rows.bounds[index + 1]) for index in indices]
        found = iter(self._windows(np.concatenate(parts)))
        for row, of_row in enumerate(parts):
            offset = 0
            for number in range(1, len(of_row) + 1):
                window = next(found)
                size = len(window) - 1
                here = slice(offset, offset + size)
                inputs[row, here], targets[row, here] = window[:-1], window[1:]
                segment_ids[row, here], positions[row, here] = number, np.arange(size)
                offset += size
        return Batch(inputs, targets, (segment_ids > 0).astype(np.float32), segment_ids, positions)

    def _windows(self, parts: np.ndarray) -> list[np.ndarray]:
        return windows(self.tokens, self._rows.starts[parts], self._rows.sizes[parts] + 1)

    @functools.cached_property
    def _rows(self) -> "_Rows":
        return _pack(self.offsets, self.sequence_length)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Assignment of parts of documents to rows.

    Attributes:
      bounds: int64 [rows + 1]; row r has the parts bounds[r] to bounds[r + 1] - 1.
      starts: each part's first token in the stream.
      sizes: its inputs.
    """

    bounds: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


def _pack(offsets: np.ndarray, length: int) -> _Rows:
    """Pack best-fit decreasing: each document's rest, longest first, into the fullest row that it
    fits.
    """
    inputs = np.maximum(np.diff(offsets) - 1, 0)
    # Whole rows of long documents, then the rests.
    wholes, rests = inputs // length, inputs % length
    document = np.repeat(np.arange(len(inputs)), wholes)
    number = np.arange(len(document)) - np.repeat(np.cumsum(wholes) - wholes, wholes)
    whole_starts = offsets[document] + number * length
    (short,) = np.nonzero(rests)
    short = short[np.argsort(-rests[short], kind="stable")]
    row_of = np.empty(len(short), np.int64)
    # Rows by remaining room, and a bit set of the sizes that occur.
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms, rows = 0, 0
    for index, size in enumerate(rests[short].tolist()):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row, rows = length, rows, rows + 1
        row_of[index] = row
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


@dataclasses.dataclass(frozen=True)
class PaddedText(WholeBatches):
    """Rows of one document each, padded to one of several lengths and grouped by length.

    A document of n tokens is n - 1 inputs, each with its successor as its target; a document longer
    than the longest row is cut into such rows and a rest. Others end with padding (segment 0,
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
        """Number of rows of each length."""
        return tuple(np.diff(self._parts[2]).tolist())

    @property
    def padding(self) -> float:
        """Fraction of all rows that is padding."""
        room = sum(count * length for count, length in zip(self.rows, self.lengths, strict=True))
        return 1.0 - int(self._parts[1].sum()) / room

    def document_lengths(self) -> np.ndarray:
        """Return the length in tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the rows `indices`, all of one length: tokens [len(indices), T]."""
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
        """Return each row's first token and its inputs; start and end of the rows of each
        length."""
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
