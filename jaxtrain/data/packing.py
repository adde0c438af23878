"""Documents laid end to end and cut into rows, with the marks that keep them apart."""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np

from jaxtrain.data.batch import Batch

# Counting a slice at a time: bincount makes an int64 copy of what it counts.
COUNT_SLICE = 1 << 22


@dataclasses.dataclass(frozen=True)
class PackedText:
    """Rows of `sequence_length` tokens over concatenated documents; implements WholeBatches.

    Row i reads the tokens [i * T, i * T + T] of the stream: T inputs and, one further, T targets.
    The last row is filled up with padding (segment 0, loss_mask 0), so every token but the first of
    its document is a counted target exactly once per epoch.

    Attributes:
      tokens: unsigned [total]; every document with its end-of-text token, if the tokenizer has one.
      offsets: int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]].
      sequence_length: T, in tokens.
      separate: keep documents apart; otherwise a row is one text: no segment ids, positions that
        run through, and every token's successor as its target.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    sequence_length: int
    separate: bool = True

    def __len__(self) -> int:
        return max(0, -(-(len(self.tokens) - 1) // self.sequence_length))

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Row `index`: tokens [T], without a batch dimension; the row is the same for any `rng`."""
        batch = self.examples(np.array([index]))
        return jax.tree.map(lambda leaf: leaf[0], batch)

    def examples(self, indices: np.ndarray) -> Batch:
        """The rows `indices`, one under the other: tokens [len(indices), T]."""
        length, rows = self.sequence_length, len(indices)
        starts = np.asarray(indices, np.int64) * length
        reals = np.minimum(length, len(self.tokens) - 1 - starts)
        whole = len(self.tokens) // length
        if indices.max() < whole:  # one gather of rows
            inputs = self.tokens[: whole * length].reshape(whole, length)[indices].astype(np.int32)
        else:
            inputs = np.zeros((rows, length), np.int32)
            for row, start in enumerate(starts.tolist()):
                there = self.tokens[start : start + length]
                inputs[row, : len(there)] = there
        targets = np.empty((rows, length), np.int32)
        targets[:, :-1] = inputs[:, 1:]
        targets[:, -1] = self.tokens[starts + reals]
        loss_mask = np.ones((rows, length), np.float32)
        short = np.flatnonzero(reals < length).tolist()
        for row in short:
            inputs[row, reals[row] :] = 0  # the last row's final target is no input
            targets[row, reals[row] :] = 0
            loss_mask[row, reals[row] :] = 0.0
        if not self.separate:
            positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
            return Batch(inputs, targets, loss_mask, None, positions)

        # Only the documents that these rows touch, however many the corpus has: row r holds parts
        # of `firsts[r]` to `lasts[r] - 1`, and behind them, as one more part, its padding.
        firsts = np.searchsorted(self.offsets, starts, side="right") - 1
        lasts = np.searchsorted(self.offsets, starts + reals, side="left")
        counts = lasts - firsts + 1
        row = np.repeat(np.arange(rows), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = self.offsets[firsts[row] + number] - starts[row]
        is_padding = number == counts[row] - 1
        begins = np.where(is_padding, reals[row], np.clip(offsets, 0, None))
        # A part ends where the next one begins; the last part of a row, its padding, at the end.
        ends = np.where(is_padding, length, np.append(begins[1:], 0))
        sizes = ends - begins
        of_part = np.where(is_padding, 0, number + 1).astype(np.int32)
        segment_ids = np.repeat(of_part, sizes).reshape(rows, length)
        positions = np.arange(rows * length, dtype=np.int32)
        positions -= np.repeat((row * length + begins).astype(np.int32), sizes)
        positions = positions.reshape(rows, length)
        for r in short:
            positions[r, reals[r] :] = 0
        # The token before a document's first has that foreign token as its target.
        foreign = (number > 0) & (offsets <= reals[row])
        loss_mask[row[foreign], offsets[foreign] - 1] = 0.0
        return Batch(inputs, targets, loss_mask, segment_ids, positions)


def pack(
    documents: Iterable[np.ndarray],
    sequence_length: int,
    dtype: np.dtype,
    *,
    separate: bool = True,
) -> PackedText:
    """The documents, none of them empty, in one stream."""
    arrays = list(documents)
    lengths = np.fromiter((len(array) for array in arrays), np.int64, len(arrays))
    assert not len(arrays) or lengths.min() > 0, "an empty document has no place in the stream"
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    return PackedText(tokens.astype(dtype, copy=False), offsets, sequence_length, separate)


def token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 [vocab_size]: how often each token occurs."""
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(tokens), COUNT_SLICE):
        counts += np.bincount(tokens[begin : begin + COUNT_SLICE], minlength=vocab_size)
    return counts


def unigram_entropy(train: PackedText, heldout: PackedText, vocab_size: int) -> float:
    """Nats per held-out target for a model that knows the corpus's token frequencies and no more.

    The cross entropy -sum_v q(v) log p(v): q over the targets of `heldout` that count, p over every
    token of both splits. A model that has learned anything of context is under it.
    """
    corpus = token_counts(train.tokens, vocab_size) + token_counts(heldout.tokens, vocab_size)
    firsts = heldout.tokens[heldout.offsets[:-1]]
    targets = token_counts(heldout.tokens, vocab_size) - token_counts(firsts, vocab_size)
    seen = targets > 0
    log_p = np.log(corpus[seen] / corpus.sum())
    return float(-(targets[seen] * log_p).sum() / targets.sum())
