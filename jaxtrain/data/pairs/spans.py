"""`SpanData`: span corruption, T5's pre-training, and its sentinel tokens.

Source: Raffel et al. 2019 (arXiv 1910.10683), section 3.1.4 and appendix; which tokens are masked
is drawn as the authors' code draws it. Letters: S source length, T target length.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.pairs.source import of_pairs, pair
from jaxtrain.data.source import Dataset, Examples, digest_of
from jaxtrain.data.text.source import TextData
from jaxtrain.data.tokenization.tokenizer import Border, TextPiece, Tokenizer

NAME = "<extra_id_{}>"  # numbered from 0, as T5's tokenizer names them
_WRITTEN = re.compile(re.escape(NAME).replace(r"\{\}", r"(\d+)"))


class WithSentinels:
    """Tokenizer with sentinel tokens after its vocabulary, the first with the highest id,
    as T5's.
    """

    def __init__(self, text: Tokenizer, count: int) -> None:
        """Wrap a tokenizer; no text is tokenized yet.

        Args:
          text: the tokenizer of all other text.
          count: sentinels.
        """
        self.text, self.count = text, count
        self.vocab_size, self.end_of_text = text.vocab_size + count, text.end_of_text
        self.before, self.after = text.before, text.after
        self.digest = hashlib.sha256(f"{text.digest} {count} sentinels".encode()).hexdigest()
        self.file_digest = self.digest
        self.dtype = np.min_scalar_type(self.vocab_size - 1)

    def sentinel(self, number: int) -> int:
        """Return the sentinel id of span `number` in a row, counted from 0."""
        return self.vocab_size - 1 - number

    def encode(self, text: str) -> list[int]:
        """Return the token ids; the names of sentinels in the text become their ids."""
        return self.encode_with_offsets(text)[0]

    def encode_inside(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text, as in `Tokenizer`."""
        return self.encode(text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids and the character offset of each, as in `Tokenizer`."""
        ids, positions, begin = list[int](), list[int](), 0
        for found in [*self._name(text), None]:
            end = len(text) if found is None else found.start()
            more, of_more = self.text.encode_with_offsets(text[begin:end])
            ids += more
            positions += [begin + position for position in of_more]
            if found is not None:
                ids.append(self.sentinel(int(found[1])))
                positions.append(found.start())
                begin = found.end()
        return ids, positions

    def _name(self, text: str) -> Iterator[re.Match[str]]:
        return (found for found in _WRITTEN.finditer(text) if int(found[1]) < self.count)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, with the names of sentinels."""
        parts, text = list[str](), list[int]()
        for one in map(int, ids):
            if one < self.text.vocab_size:
                text.append(one)
                continue
            parts += [self.text.decode(text), NAME.format(self.vocab_size - 1 - one)]
            text = []
        return "".join([*parts, self.text.decode(text)])

    def token(self, setting: str, name: str) -> int:
        """Return the id of a special token by its name, sentinels included, as in `Tokenizer`."""
        found = _WRITTEN.fullmatch(name)
        if found is not None and int(found[1]) < self.count:
            return self.sentinel(int(found[1]))
        return self.text.token(setting, name)

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of each text, as in `Tokenizer`."""
        for text in texts:
            yield np.asarray(self.encode(text), self.dtype)

    def encode_pieces(self, pieces: Iterable[TextPiece]) -> Iterator[np.ndarray]:
        """Yield the tokens of whole texts, as in `Tokenizer`: sentinels leave no safe border to cut
        at.
        """
        return self.encode_documents(piece.text for piece in pieces)

    def border(self, left: str, right: str) -> Border | None:
        """Return None, as no border is known to be safe to cut at; see `Tokenizer`."""
        del left, right
        return None


EVALUATION_SEED = 0  # held-out rows have the same masked spans in every evaluation of every run
SYNTHETIC_END = 0  # end of rows of random tokens, which have no tokenizer


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanData:
    """Span corruption (T5): a sentinel replaces each removed span, and the target has each sentinel
    followed by its span. Both end with the end-of-text token.

    Attributes:
      text: `@TextData()`, the rows; the documents of a row are one text.
      corrupted: share of a row's tokens that are masked.
      mean_length: mean length of a span, in tokens.
      sentinels: names of the tokenizer's own tokens for the first span, the second and so on, with
        `{}` for the number from 0, such as T5's `'<extra_id_{}>'`; None: tokens after the
        tokenizer's vocabulary, in descending order.
      begin: the id of the decoder's start token (T5's is its padding's, 0).
    """

    text: TextData
    corrupted: float = 0.15
    mean_length: float = 3.0
    sentinels: str | None = None
    begin: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.corrupted < 1:
            raise UserError(
                f"SpanData.corrupted={self.corrupted}: the masked fraction is between 0 and "
                "1, such as 0.15"
            )
        if not self.mean_length >= 1:
            raise UserError(f"SpanData.mean_length={self.mean_length}; use at least 1")
        if self.begin < 0:
            raise UserError(f"SpanData.begin={self.begin}; use 0 or more, a token's id")
        if self.sentinels is not None and self.sentinels.count("{}") != 1:
            raise UserError(
                f"SpanData.sentinels={self.sentinels!r}: write {{}} for the number, such "
                "as '<extra_id_{}>'"
            )
        if self.text.sequence_length < 2:
            raise UserError(
                f"TextData.sequence_length={self.text.sequence_length}: a row that loses a span "
                "and keeps something has at least 2 tokens"
            )
        if self.text.packing == "padded":
            raise UserError(
                "SpanData.text: rows of pairs have one length, and TextData.packing = 'padded' "
                "gives several; use 'stream' or 'best_fit'"
            )
        if self.text.fill_in_middle is not None:
            raise UserError(
                "TextData.fill_in_middle is for models that predict the next token, and SpanData "
                "masks spans; use None"
            )

    @property
    def source_length(self) -> int:
        """Tokens of the source made of a whole row, with a sentinel per span and the end."""
        lost, spans = self._sizes
        return self.text.sequence_length - lost + spans + 1

    @property
    def target_length(self) -> int:
        """Tokens of the target made of a whole row, with a sentinel per span and the end."""
        return sum(self._sizes) + 1

    @property
    def _sizes(self) -> tuple[int, int]:
        return span_sizes(self.text.sequence_length, self.corrupted, self.mean_length)

    @property
    def source(self) -> str:
        """Source of the text."""
        return self.text.source

    @property
    def tokenizer(self) -> str:
        """Tokenizer of the text."""
        return self.text.tokenizer

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, sentinels included: all ids are below it."""
        own = 0 if self.sentinels is not None else self._sizes[1]
        return max(self.text.vocab_size + own, self.begin + 1)

    def open_tokenizer(self) -> Tokenizer:
        """Return the text's tokenizer, with the sentinels.

        Raises:
          UserError: as for the text, or it has no token that ends a text.
        """
        tokenizer = self.text.open_tokenizer()
        if tokenizer.end_of_text is None:
            raise UserError(
                f"TextData.tokenizer = {self.text.tokenizer!r} has no known end-of-text token, "
                "and a target needs one; name it in TextData.end_of_text"
            )
        if self.sentinels is not None:
            return tokenizer
        return WithSentinels(tokenizer, self._sizes[1])

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data."""
        return of_pairs(global_batch_size, self.source_length, self.target_length)

    def open(self, *, seed: int) -> Dataset:
        """Open the text.

        Raises:
          UserError: as for the text, or the tokenizer has no such sentinels.
        """
        text, spans = self.text.open(seed=seed), self._sizes[1]
        tokenizer, end = None, SYNTHETIC_END
        if text.tokenizer is not None:
            tokenizer = self.open_tokenizer()
            assert tokenizer.end_of_text is not None, "rejected before"
            end = tokenizer.end_of_text
        if self.sentinels is None:
            last = self.text.vocab_size + spans - 1
            ids = [last - number for number in range(spans)]
        elif tokenizer is None:
            raise UserError(
                f"SpanData.sentinels={self.sentinels!r}: TextData.source = 'synthetic' has no "
                "tokenizer with named tokens; use None"
            )
        else:
            names = [self.sentinels.replace("{}", str(number)) for number in range(spans)]
            ids = [tokenizer.token("SpanData.sentinels", name) for name in names]
        corruption = Corruption(
            self.corrupted, self.mean_length, tuple(ids), end, self.begin,
            (self.source_length, self.target_length),
        )  # fmt: skip
        entropy, vocab_size = "unigram_entropy", self.vocab_size
        facts = {name: value for name, value in text.facts.items() if name != entropy}
        facts |= {
            "vocab_size": vocab_size, "spans": spans,
            "source_length": self.source_length, "target_length": self.target_length,
        }  # fmt: skip
        header = {"kind": "spans", **dataclasses.asdict(corruption)}
        return dataclasses.replace(
            text,
            train=Corrupted(text.train, corruption),
            heldout=Corrupted(text.heldout, corruption),
            digest=digest_of(header, [text.digest]),
            facts=facts,
            tokenizer=tokenizer,
            unit="pairs",
        )


@dataclasses.dataclass(frozen=True)
class Corruption:
    """Parameters of span corruption of a row.

    Attributes:
      share, mean_length: as in `SpanData`.
      sentinels: ids, in the order of spans.
      end: the id that ends a source and a target.
      begin: the id before a target.
      lengths: of the rows [S] and [T].
    """

    share: float
    mean_length: float
    sentinels: tuple[int, ...]
    end: int
    begin: int
    lengths: tuple[int, int]

    def of(self, tokens: np.ndarray, rng: np.random.Generator) -> Batch:
        """Split a text into a source, with sentinels, and a target, the masked spans.

        Args:
          tokens: the text.
          rng: the random generator.
        """
        lost = span_mask(len(tokens), self.share, self.mean_length, rng)
        source = insert_sentinels(tokens, lost, self.sentinels)
        # The complement: unmasked text precedes each span, so that as many sentinels are
        # inserted, each before its span.
        target = insert_sentinels(tokens, ~lost, self.sentinels) if lost.any() else tokens[:0]
        ended = [np.append(one, self.end) for one in (source, target)]
        return pair(ended[0], ended[1], self.lengths, self.begin)


@dataclasses.dataclass(frozen=True)
class Corrupted:
    """Rows of text with span corruption; implements Examples."""

    rows: Examples
    corruption: Corruption

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return row `index`; its masked spans depend on the seed and the position in the stream of
        rows.
        """
        if rng is None:
            rng = np.random.default_rng((EVALUATION_SEED, index))
        row = self.rows.example(index, None)
        # Rows of one text mark padding in their loss mask.
        real: Any = row.loss_mask if row.segment_ids is None else row.segment_ids
        return self.corruption.of(row.inputs[real > 0], rng)


def span_sizes(length: int, corrupted: float, mean_length: float) -> tuple[int, int]:
    """Return the number of masked tokens and of masked spans of a text; none under 2 tokens."""
    if length < 2:
        return 0, 0
    lost = min(max(round(length * corrupted), 1), length - 1)
    return lost, min(max(round(lost / mean_length), 1), length - lost)


def span_mask(
    length: int, corrupted: float, mean_length: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw which tokens of a text are masked, bool [length]: kept and masked spans alternate.

    Both are cut uniformly at random into equally many parts; the first
    part is kept, the last one masked.
    """
    lost, spans = span_sizes(length, corrupted, mean_length)
    if not lost:
        return np.zeros(length, bool)
    parts = [_parts(length - lost, spans, rng), _parts(lost, spans, rng)]
    return np.repeat(np.tile([False, True], spans), np.stack(parts, 1).ravel())


def _parts(items: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Return the sizes of `parts` random parts of `items` items, none of them empty."""
    cuts = np.sort(rng.permutation(items - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [items]]))


def insert_sentinels(
    tokens: np.ndarray, gone: np.ndarray, sentinels: tuple[int, ...]
) -> np.ndarray:
    """Return a text with a sentinel instead of each run of masked tokens."""
    first = gone & ~np.concatenate([[False], gone[:-1]])
    number = np.maximum(np.cumsum(first) - 1, 0)
    return np.where(first, np.asarray(sentinels)[number], tokens)[first | ~gone]
