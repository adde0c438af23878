"""`PairData`: pairs of texts from a file, sums of numbers, or random tokens.

Letters: B rows, S source length, T target length.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.pairs import files
from jaxtrain.data.source import (
    Dataset,
    check_heldout_fraction,
    digest,
    existing_path,
    heldout_facts,
    hold_out,
    is_heldout,
)
from jaxtrain.data.tokenization.tokenizer import Tokenizer, open_tokenizer, with_special_tokens

WORDS = ("addition", "synthetic")
SYNTHETIC_PAIRS = 4096
SEED = 0  # of the sums: the same in every run
Tokens = tuple[np.ndarray, list[np.ndarray]]  # of a source, and of its targets


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PairData:
    """Sequence-to-sequence data: pairs of a source and a target, one per row.

    Attributes:
      source: a file of JSON lines (`.jsonl`), or of columns with a line of names (`.tsv`, `.csv`),
        each of them perhaps `.gz` or `.zst`; `'addition'`, sums such as `014+250` and `0264`;
        or `'synthetic'`, random tokens.
      source_field, target_field: names of the two texts in a record, or of their columns. A
        record's target may be a list of texts, each of which is a right answer.
      source_length: tokens of the longest source.
      target_length: tokens of the longest target, its end included. Targets, and
        pairs with none that fits, are skipped and counted.
      tokenizer: `'byte'`, or the path of a Hugging Face `tokenizer.json`.
      end_of_text: the token that ends a target; None takes the tokenizer's own.
      add_special_tokens: whether the special tokens that the tokenizer puts around a text, such as
        T5's end, are put around sources; None: as it does by default.
      begin: the id of the decoder's start token (T5's is its padding's, 0).
      heldout_fraction: share of the pairs that is held out, evenly spaced over their order.
      addition_digits: digits of the two numbers that `'addition'` adds; their sums have one more.
      addition_pairs: number of different sums.
      synthetic_vocab_size: the vocabulary that `'synthetic'` draws from.
    """

    source: Annotated[str, PathOr(WORDS)] = "addition"
    source_field: str = "source"
    target_field: str = "target"
    source_length: int = 16
    target_length: int = 16
    tokenizer: Annotated[str, PathOr(("byte",))] = "byte"
    end_of_text: str | None = None
    add_special_tokens: bool | None = None
    begin: int = 0
    heldout_fraction: float = 0.05
    addition_digits: int = 3
    addition_pairs: int = 20_000
    synthetic_vocab_size: int = 256

    def __post_init__(self) -> None:
        require_at_least(1, self, "source_length", "addition_digits")
        require_at_least(2, self, "target_length", "addition_pairs", "synthetic_vocab_size")
        require_at_least(0, self, "begin")
        check_heldout_fraction("PairData.heldout_fraction", self.heldout_fraction)
        possible = 10 ** (2 * self.addition_digits)
        if self.addition_pairs > possible // 2:
            raise UserError(
                f"PairData.addition_pairs={self.addition_pairs}: of {self.addition_digits} digits "
                f"there are {possible} sums; use at most {possible // 2}, or more digits"
            )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: all ids are below it."""
        if self.source == "synthetic":
            return self.synthetic_vocab_size
        return max(self.open_tokenizer().vocab_size, self.begin + 1)

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, without reading any pair.

        Raises:
          UserError: no such file, it is not a tokenizer.json, has no token that ends a text, or the
            tokens are random.
        """
        if self.source == "synthetic":
            raise UserError(
                "PairData.source = 'synthetic' has no tokenizer: random tokens are not text; "
                "bind PairData.source to text, and PairData.tokenizer to what the model reads"
            )
        path = None
        if self.tokenizer != "byte":
            path = existing_path("PairData.tokenizer", self.tokenizer, words=("byte",))
        tokenizer = open_tokenizer(
            self.tokenizer, end_of_text=self.end_of_text, path=path, section="PairData",
            add_special_tokens=self.add_special_tokens,
        )  # fmt: skip
        if tokenizer.end_of_text is None:
            raise UserError(
                f"PairData.tokenizer = {self.tokenizer!r} has no known end-of-text token, and a "
                "target needs one; name it in PairData.end_of_text"
            )
        return tokenizer

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data."""
        return of_pairs(global_batch_size, self.source_length, self.target_length)

    def open(self, *, seed: int) -> Dataset:
        """Read, tokenize and split the pairs; only `'synthetic'` depends on `seed`.

        Raises:
          UserError: no such source, or too few pairs that fit for one in each split.
        """
        tokenizer = None
        if self.source == "synthetic":
            pairs, count = self._synthetic(seed), SYNTHETIC_PAIRS
        else:
            tokenizer = self.open_tokenizer()
            pairs, count = self._fitting(self._texts(), tokenizer)
        held = hold_out(len(pairs), self.heldout_fraction)
        if held.all() or not held.any():
            raise UserError(
                f"PairData.source = {self.source!r}: of its {count} pairs {len(pairs)} fit into "
                f"PairData.source_length={self.source_length} and PairData.target_length="
                f"{self.target_length}, of which {held.sum()} would be held out; use more, or "
                f"another PairData.heldout_fraction (now {self.heldout_fraction})"
            )
        most = max(len(targets) for _, targets in pairs)
        train, heldout = (self._split(pairs, np.flatnonzero(part), most) for part in (~held, held))
        facts: dict[str, float | int | str] = {
            "source": self.source,
            "vocab_size": self.vocab_size,
            "train_pairs": len(train),
            "heldout_pairs": len(heldout),
            "train_tokens": int(train.targets[0].offsets[-1]),
        }
        if most > 1:
            facts["answers"] = sum(len(targets) for _, targets in pairs)
        if not is_heldout(len(pairs), self.heldout_fraction).any():
            setting = "PairData.heldout_fraction"
            facts |= heldout_facts(setting, self.heldout_fraction, len(pairs), "pair")
        if count > len(pairs):
            facts["pairs_left_out"] = count - len(pairs)
        header = {
            "kind": "pairs", "tokenizer": None if tokenizer is None else tokenizer.digest,
            "lengths": [self.source_length, self.target_length], "begin": self.begin,
        }  # fmt: skip
        sequences = (train.sources, *train.targets, heldout.sources, *heldout.targets)
        parts = [array for one in sequences for array in (one.tokens, one.offsets)]
        return Dataset(train, heldout, digest(header, parts), facts, tokenizer, "pairs")

    def _split(self, pairs: list[Tokens], indices: np.ndarray, most: int) -> "Pairs":
        """Return the pairs at these indices; those with fewer than `most` targets get
        empty ones.
        """
        nothing = np.zeros(0, np.int32)
        return Pairs(
            _join([pairs[index][0] for index in indices]),
            tuple(
                _join([[*pairs[index][1], *[nothing] * most][k] for index in indices])
                for k in range(most)
            ),
            (self.source_length, self.target_length),
            self.begin,
        )

    def _texts(self) -> Iterable[files.Answered]:
        if self.source == "addition":
            return _sums(self.addition_digits, self.addition_pairs)
        path = existing_path("PairData.source", self.source, words=WORDS)
        return files.read_answered(path, "PairData.source", self.source_field, self.target_field)

    def _fitting(
        self, texts: Iterable[files.Answered], tokenizer: Tokenizer
    ) -> tuple[list[Tokens], int]:
        """Return the tokens of the pairs that fit, each target with its end, and the number of all
        pairs.
        """
        found, count, end = [], 0, tokenizer.end_of_text
        for source, targets in texts:
            count += 1
            tokens = with_special_tokens(tokenizer, tokenizer.encode(source))
            encoded = ([*tokenizer.encode(target), end] for target in targets)
            fit = [np.array(one, np.int32) for one in encoded if len(one) <= self.target_length]
            if source and len(tokens) <= self.source_length and fit:
                found.append((np.array(tokens, np.int32), fit))
        return found, count

    def _synthetic(self, seed: int) -> list[Tokens]:
        rng, most = np.random.default_rng(seed), (self.source_length, self.target_length)
        lengths = [rng.integers((length + 1) // 2, length + 1, SYNTHETIC_PAIRS) for length in most]

        def draw(length: int) -> np.ndarray:
            return rng.integers(0, self.synthetic_vocab_size, length).astype(np.int32)

        return [(draw(s), [draw(t)]) for s, t in zip(*lengths, strict=True)]


def _sums(digits: int, count: int) -> Iterable[files.Answered]:
    """Yield distinct sums of numbers, in random order."""
    rng, most = np.random.default_rng(SEED), 10**digits
    found = np.unique(rng.integers(0, most * most, 2 * count))
    while len(found) < count:
        found = np.union1d(found, rng.integers(0, most * most, count))
    for both in rng.permutation(found)[:count].tolist():
        first, second = divmod(both, most)
        yield f"{first:0{digits}}+{second:0{digits}}", (f"{first + second:0{digits + 1}}",)


def of_pairs(rows: int, source_length: int, target_length: int) -> Batch:
    """Return the shapes and dtypes of a batch of pairs."""

    def shape(length: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, length), dtype)

    target, source = shape(target_length, np.int32), shape(source_length, np.int32)
    return Batch(
        target, target, shape(target_length, np.float32), target,
        source=source, source_segment_ids=source,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Concatenated rows of tokens of any length.

    Attributes:
      tokens: int32, of all of them.
      offsets: int64, start of each, and the end of the last.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def _join(rows: Sequence[np.ndarray]) -> Sequences:
    lengths = np.array([0, *map(len, rows)], np.int64)
    return Sequences(np.concatenate(rows), np.cumsum(lengths))


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sources and targets in memory; implements Examples.

    Attributes:
      sources: their tokens.
      targets: the first, second, ... of each, with the token that ends it; where a pair has fewer,
        nothing.
      lengths: of a row of sources, and of a row of targets.
      begin: the token before a target.
    """

    sources: Sequences
    targets: tuple[Sequences, ...]
    lengths: tuple[int, int]
    begin: int

    def __len__(self) -> int:
        return len(self.sources)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return pair `index`: rows [S] and [T], padded at the end.

        Args:
          index: its number.
          rng: selects one of its targets; None: the first, with the others as `answers`.
        """
        source, found = self.sources[index], [one[index] for one in self.targets]
        if rng is not None:
            real = sum(len(one) > 0 for one in found)
            target = found[int(rng.integers(real)) if real > 1 else 0]
            return pair(source, target, self.lengths, self.begin)
        first, *others = (pair(source, one, self.lengths, self.begin) for one in found)
        if not others:
            return first
        bare = {"source": None, "source_segment_ids": None}
        answers = tuple(dataclasses.replace(one, **bare) for one in others)
        return dataclasses.replace(first, answers=answers)


def pair(source: np.ndarray, target: np.ndarray, lengths: tuple[int, int], begin: int) -> Batch:
    """Return one pair: each token of the target is predicted from those before it and the source.

    Args:
      source, target: their tokens; an empty target is padding.
      lengths: of the rows [S] and [T], padded at their ends.
      begin: the token before the target.
    """
    is_target = np.arange(lengths[1]) < len(target)
    return Batch(
        inputs=_pad(np.concatenate([[begin], target[:-1]]), lengths[1]),
        targets=_pad(target, lengths[1]),
        loss_mask=is_target.astype(np.float32),
        segment_ids=is_target.astype(np.int32),
        source=_pad(source, lengths[0]),
        source_segment_ids=(np.arange(lengths[0]) < len(source)).astype(np.int32),
    )


def _pad(tokens: np.ndarray, length: int) -> np.ndarray:
    return np.pad(tokens, (0, length - len(tokens))).astype(np.int32)
