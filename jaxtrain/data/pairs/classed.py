"""What texts with classes have in common: one text in a row, some of whose tokens have a label.

Letter: T length.
"""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import jax
import numpy as np

from jaxtrain.config.errors import UserError, refuse_below
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, check_heldout_fraction, digest, existing_path
from jaxtrain.data.tokenizer import Tokenizer, open_tokenizer

SYNTHETIC_TEXTS = 4096

# What a source has of a text: its words or itself, and the names of its classes.
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassedText(abc.ABC, Generic[R]):
    """Texts with classes, one text in a row.

    Attributes:
      source: the file, which may be `.gz` or `.zst`; or `'synthetic'`, random tokens and labels.
      num_classes: different classes; their labels follow the order of their names.
      sequence_length: tokens of a row; of longer texts the rest is left out, and counted.
      tokenizer: `'byte'`, or the path of a Hugging Face `tokenizer.json`.
      begin: the id of a token that is put before each text, such as BERT's `[CLS]`; None: none.
      place: which token of a text, or of a word that has a class, tells it: the `'first'`, or the
        `'last'`, as a recurrent model needs it that goes one way.
      heldout_fraction: share of the texts that is held out, evenly spaced; where a text has one
        class, of each.
      synthetic_vocab_size: the vocabulary that `'synthetic'` draws from.
    """

    source: Annotated[str, PathOr(("synthetic",))] = "synthetic"
    num_classes: int = 2
    sequence_length: int = 128
    tokenizer: Annotated[str, PathOr(("byte",))] = "byte"
    begin: int | None = None
    place: Literal["first", "last"] = "first"
    heldout_fraction: float = 0.1
    synthetic_vocab_size: int = 256

    def __post_init__(self) -> None:
        refuse_below(2, self, "num_classes", "sequence_length", "synthetic_vocab_size")
        if self.begin is not None:
            refuse_below(0, self, "begin")
        check_heldout_fraction(f"{self.section}.heldout_fraction", self.heldout_fraction)

    @abc.abstractmethod
    def records(self) -> Iterable[R]:
        """The texts of the source, as they stand there.

        Raises:
          UserError: nothing there, or it holds no such texts.
        """

    @abc.abstractmethod
    def names_of(self, record: R) -> Sequence[str]:
        """The names of its classes."""

    @abc.abstractmethod
    def encoded(self, record: R, tokenizer: Tokenizer, labels: dict[str, int]) -> "Labelled":
        """The tokens of a text, and their labels."""

    @abc.abstractmethod
    def random_labels(self, rng: np.random.Generator, lengths: np.ndarray) -> list["Labels"]:
        """Of texts of random tokens."""

    @abc.abstractmethod
    def row(self, tokens: Sequence[int], label: Any = 0) -> Batch:
        """One text as a row [T]: its labels stand where they are told, and nothing else counts."""

    @abc.abstractmethod
    def held_out(self, labels: "list[Labels]") -> np.ndarray:
        """Which of the texts with these labels are held out, bool [texts]."""

    @property
    def section(self) -> str:
        """What names its settings."""
        return type(self).__name__

    @property
    def vocab_size(self) -> int:
        """Ids are under this."""
        if self.source == "synthetic":
            return self.synthetic_vocab_size
        return max(self.open_tokenizer().vocab_size, (self.begin or 0) + 1)

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer, without reading any text.

        Raises:
          UserError: no such file, it is no tokenizer.json, or the tokens are random.
        """
        if self.source == "synthetic":
            raise UserError(
                f"{self.section}.source = 'synthetic' has no tokenizer: random tokens stand for no "
                "text"
            )
        path = None
        if self.tokenizer != "byte":
            path = existing_path(f"{self.section}.tokenizer", self.tokenizer, words=("byte",))
        return open_tokenizer(self.tokenizer, end_of_text=None, path=path)

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """The shapes and dtypes of a batch, for lowering a step without data."""
        shape = (global_batch_size, self.sequence_length)
        tokens: Any = jax.ShapeDtypeStruct(shape, np.int32)
        mask: Any = jax.ShapeDtypeStruct(shape, np.float32)
        return Batch(tokens, tokens, mask, tokens, tokens)

    def class_names(self) -> list[str]:
        """The names of the classes, by label.

        Raises:
          UserError: the source is not there, or has another number of classes.
        """
        if self.source == "synthetic":
            return [str(label) for label in range(self.num_classes)]
        names = sorted({name for record in self.records() for name in self.names_of(record)})
        if len(names) != self.num_classes:
            raise UserError(
                f"{self.section}.num_classes = {self.num_classes}, but {self.section}.source = "
                f"{self.source!r} has {len(names)} ({', '.join(names[:8])}); set "
                f"{self.section}.num_classes = {len(names)}"
            )
        return names

    def begun(self, tokens: Sequence[int]) -> list[int]:
        """A text's tokens with the one before them, as many as a row holds."""
        whole = ([] if self.begin is None else [self.begin]) + list(tokens)
        return whole[: self.sequence_length]

    def laid_out(self, begun: Sequence[int], label_T: np.ndarray, told_T: np.ndarray) -> Batch:
        """A row [T] of tokens from `begun`, with these labels where some are told."""
        place_T = np.arange(self.sequence_length, dtype=np.int32)
        return Batch(
            np.pad(np.array(begun, np.int32), (0, self.sequence_length - len(begun))),
            np.where(told_T, label_T, 0).astype(np.int32),
            told_T.astype(np.float32),
            (place_T < len(begun)).astype(np.int32),
            place_T,
        )

    def open(self, *, seed: int) -> Dataset:
        """Reads, tokenizes and splits the texts; only `'synthetic'` depends on `seed`.

        Raises:
          UserError: nothing there, another number of classes, or a split that would be empty.
        """
        names, tokenizer = self.class_names(), None
        if self.source == "synthetic":
            texts = self._synthetic(seed)
        else:
            tokenizer = self.open_tokenizer()
            of_name = {name: label for label, name in enumerate(names)}
            texts = [self.encoded(record, tokenizer, of_name) for record in self.records()]
        empty = sum(not len(tokens) for tokens, _ in texts)
        if empty and self.begin is None:
            raise UserError(
                f"{self.section}.source = {self.source!r}: {empty} of its texts are empty; leave "
                f"them out, or name a token that is put before each in {self.section}.begin"
            )
        labels = [label for _, label in texts]
        held = self.held_out(labels)
        if held.all() or not held.any():
            raise UserError(
                f"{self.section}.source = {self.source!r}: of its {len(held)} texts {held.sum()} "
                f"would be held out; use more, or another {self.section}.heldout_fraction (now "
                f"{self.heldout_fraction})"
            )
        most = self.sequence_length - (self.begin is not None)
        facts: dict[str, float | int | str] = {
            "source": self.source,
            "vocab_size": self.vocab_size,
            "classes": self.num_classes,
            "class_names": ", ".join(names),
            "train_texts": int((~held).sum()),
            "heldout_texts": int(held.sum()),
            "texts_cut": sum(len(tokens) > most for tokens, _ in texts),
        }
        header = {
            "kind": "labelled", "tokenizer": None if tokenizer is None else tokenizer.digest,
            "names": names, "settings": [self.sequence_length, self.begin, self.place],
        }  # fmt: skip
        lengths = np.array([len(tokens) for tokens, _ in texts], np.int64)
        told = np.concatenate([np.atleast_1d(label) for label in labels]).astype(np.int64)
        parts = [np.concatenate([tokens for tokens, _ in texts]), lengths, told, held]
        train, heldout = (
            Rows([texts[place] for place in np.flatnonzero(chosen)], self)
            for chosen in (~held, held)
        )
        return Dataset(train, heldout, digest(header, parts), facts, tokenizer, "tokens")

    def _synthetic(self, seed: int) -> list["Labelled"]:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, self.sequence_length, SYNTHETIC_TEXTS)
        labels = self.random_labels(rng, lengths)
        return [
            (rng.integers(0, self.synthetic_vocab_size, length).astype(np.int32), label)
            for length, label in zip(lengths, labels, strict=True)
        ]


# A text's label, or one for each token of it, -1 where none is told.
Labels = int | np.ndarray
# The tokens of a text, int32, and its labels.
Labelled = tuple[np.ndarray, Labels]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Texts and their labels, in memory; implements Examples.

    Attributes:
      texts: tokens and labels of each.
      data: makes rows of them.
    """

    texts: list[Labelled]
    data: ClassedText[Any]

    def __len__(self) -> int:
        return len(self.texts)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Text `index`, a row [T]; the same for any `rng`."""
        del rng
        tokens, label = self.texts[index]
        return self.data.row(tokens.tolist(), label)
