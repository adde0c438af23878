"""Fill-in-the-middle transformation of documents.

Source: Bavarian et al. 2022 (arXiv 2207.14255): in each row some documents, or what the row has of
them, are cut at two characters anywhere, and become PRE prefix SUF suffix MID middle (PSM) or PRE
SUF suffix MID prefix middle (SPM). Letter: T row length.
"""

import dataclasses

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, Examples, HasDocuments, digest_of
from jaxtrain.data.tokenization.tokenizer import Tokenizer, closing


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """Fill-in-the-middle transformation of training documents: how many, in which order, and the
    special tokens.

    Attributes:
      rate: share of the documents, drawn again in each epoch.
      spm: share of those in the order suffix, prefix, middle; the others have prefix, suffix,
        middle.
      prefix, suffix, middle: the tokens before each part; for the byte tokenizer a character of one
        byte that does not occur in the text, such as '\\x01'.
    """

    rate: float = 0.5
    spm: float = 0.5
    prefix: str = "<|fim_prefix|>"
    suffix: str = "<|fim_suffix|>"
    middle: str = "<|fim_middle|>"

    def __post_init__(self) -> None:
        for name, share in (("rate", self.rate), ("spm", self.spm)):
            if not 0 <= share <= 1:
                raise UserError(f"FillInMiddle.{name} = {share}: use a fraction from 0 to 1")
        if len({self.prefix, self.suffix, self.middle}) < 3:
            raise UserError(
                f"FillInMiddle: {self.prefix!r}, {self.suffix!r} and {self.middle!r} must be three "
                "different tokens"
            )


def fill_in_middle(dataset: Dataset, settings: FillInMiddle) -> Dataset:
    """Return a text dataset with transformed training rows; held-out rows are unchanged.

    Raises:
      UserError: there is no tokenizer, or it has no such tokens.
    """
    tokenizer = dataset.tokenizer
    if tokenizer is None:
        raise UserError(
            "TextData.fill_in_middle: TextData.source = 'synthetic' has no text to fill in; "
            "use None"
        )
    sentinels = tuple(
        tokenizer.token(f"FillInMiddle.{name}", getattr(settings, name))
        for name in ("prefix", "suffix", "middle")
    )
    assert isinstance(dataset.train, HasDocuments), "text"
    train = FilledRows(dataset.train, settings.rate, settings.spm, tokenizer, sentinels)
    header = {"kind": "fill in the middle", **dataclasses.asdict(settings)}
    return dataclasses.replace(dataset, train=train, digest=digest_of(header, [dataset.digest]))


@dataclasses.dataclass(frozen=True)
class FilledRows:
    """Rows of text with some documents reordered for fill-in-the-middle; implements Examples.

    A document grows by three tokens, and by tokens of cut words: the end of a row without
    room is truncated, after its padding.

    Attributes:
      rows: with segment ids.
      rate, spm: as in `FillInMiddle`.
      tokenizer: of the tokens.
      sentinels: the ids before prefix, suffix and middle.
    """

    rows: Examples
    rate: float
    spm: float
    tokenizer: Tokenizer
    sentinels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def document_lengths(self) -> np.ndarray:
        """Return the lengths of the original documents."""
        assert isinstance(self.rows, HasDocuments), "text"
        return self.rows.document_lengths()

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return row `index`: tokens [T]; `rng` None returns it unchanged."""
        row = self.rows.example(index, None)
        if rng is None:
            return row
        length, offset = len(row.inputs), 0
        inputs, targets, segment_ids, positions = (np.zeros(length, np.int32) for _ in range(4))
        for number, tokens in enumerate(_documents(row), 1):
            if rng.random() < self.rate:
                tokens = self._move(tokens, rng)
            size = min(len(tokens) - 1, length - offset)
            here = slice(offset, offset + size)
            inputs[here], targets[here] = tokens[:size], tokens[1 : size + 1]
            segment_ids[here], positions[here] = number, np.arange(size)
            offset += size
        return Batch(inputs, targets, (segment_ids > 0).astype(np.float32), segment_ids, positions)

    def _move(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return a document with its middle at the end, between the special tokens around it."""
        begin, end = self._special(tokens)
        own = tokens[begin : len(tokens) - end].tolist()
        text = self.tokenizer.decode(own)
        # A row's part of a document may begin or end within a character: then cut at tokens.
        whole: str | list[int] = text if self.tokenizer.encode(text) == own else own
        first, second = sorted(rng.integers(len(whole) + 1, size=2).tolist())
        parts = whole[:first], whole[first:second], whole[second:]
        prefix, middle, suffix = (
            (self.tokenizer.encode_inside if number else self.tokenizer.encode)(part)
            if isinstance(part, str)
            else part
            for number, part in enumerate(parts)
        )
        before_prefix, before_suffix, before_middle = self.sentinels
        if rng.random() < self.spm:
            moved = [before_prefix, before_suffix, *suffix, before_middle, *prefix, *middle]
        else:
            moved = [before_prefix, *prefix, before_suffix, *suffix, before_middle, *middle]
        last = tokens[len(tokens) - end :]
        return np.concatenate([tokens[:begin], np.asarray(moved, tokens.dtype), last])

    def _special(self, tokens: np.ndarray) -> tuple[int, int]:
        """Return the number of special tokens at the start and the end of a document or its part in
        a row.
        """
        begin, end = self.tokenizer.before, closing(self.tokenizer)
        begins = tuple(tokens[: len(begin)].tolist()) == begin
        ends = len(end) > 0 and tuple(tokens[-len(end) :].tolist()) == end
        return len(begin) if begins else 0, len(end) if ends else 0


def _documents(row: Batch) -> list[np.ndarray]:
    """Return the tokens of each document in a row: its inputs and, where it counts, the last
    target.
    """
    assert row.segment_ids is not None, "documents apart"
    found = []
    for number in range(1, int(row.segment_ids.max()) + 1):
        (indices,) = np.nonzero(row.segment_ids == number)
        last = indices[-1]
        behind = row.targets[last : last + 1] if row.loss_mask[last] else row.targets[:0]
        found.append(np.concatenate([row.inputs[indices], behind]))
    return found
