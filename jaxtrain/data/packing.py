"""Documents laid end to end and cut into rows, with the marks that keep them apart."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxtrain.data.batch import Batch

# Counting a slice at a time: bincount makes an int64 copy of what it counts.
COUNT_SLICE = 1 << 22


@dataclasses.dataclass(frozen=True)
class PackedText:
    """Rows of `sequence_length` tokens over concatenated documents; implements Examples.

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
        length = self.sequence_length
        start = index * length
        real = min(length, len(self.tokens) - 1 - start)
        window = np.zeros(length + 1, np.int32)
        window[: real + 1] = self.tokens[start : start + real + 1]

        if not self.separate:
            mask = (np.arange(length) < real).astype(np.float32)
            targets = window[1:].copy()
            window[real:] = 0
            return Batch(window[:-1], targets, mask, None, np.arange(length, dtype=np.int32))

        # Only the documents that this row touches, however many the corpus has.
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets, start + real, side="left"))
        bounds = np.clip(self.offsets[first : last + 1] - start, 0, real)
        counts = np.diff(bounds)
        segment_ids = np.zeros(length, np.int32)
        segment_ids[:real] = np.repeat(np.arange(1, len(counts) + 1), counts)
        positions = np.zeros(length, np.int32)
        positions[:real] = np.arange(real) - np.repeat(bounds[:-1], counts)

        loss_mask = np.zeros(length, np.float32)
        loss_mask[:real] = 1.0
        # The token before a document's first has that foreign token as its target.
        begins = self.offsets[first + 1 : last + 1] - start
        loss_mask[begins[(begins >= 1) & (begins <= real)] - 1] = 0.0
        targets = window[1:].copy()
        window[real:] = 0  # the last row's final target is no input
        return Batch(window[:-1], targets, loss_mask, segment_ids, positions)


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
