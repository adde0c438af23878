"""LabelledText: texts out of a file, each with the name of its class.

Letters: B rows, T length.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np

from jaxtrain.config.errors import UserError, refuse_below
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.pairs import files
from jaxtrain.data.source import (
    Dataset,
    check_heldout_fraction,
    digest,
    existing_path,
    is_heldout,
)
from jaxtrain.data.tokenizer import Tokenizer, open_tokenizer

SYNTHETIC_TEXTS = 4096
Texts = list[tuple[np.ndarray, int]]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledText:
    """Texts and their classes, one text in a row.

    Attributes:
      source: a file of JSON lines (`.jsonl`), or of columns with a line of names (`.tsv`, `.csv`),
        each of them perhaps `.gz` or `.zst`; or `'synthetic'`, random tokens and labels.
      text_field, label_field: names of the text and of the name of its class.
      num_classes: different classes; their labels follow the order of their names.
      sequence_length: tokens of a row; of longer texts the rest is left out, and counted.
      tokenizer: `'byte'`, or the path of a Hugging Face `tokenizer.json`.
      begin: the id of a token that is put before each text, such as BERT's `[CLS]`; None: none.
      place: which token of a text tells its class: the `'first'`, or the `'last'`, as a recurrent
        model needs it that goes one way.
      heldout_fraction: share of the texts that is held out, evenly spaced, of each class.
      synthetic_vocab_size: the vocabulary that `'synthetic'` draws from.
    """

    source: Annotated[str, PathOr(("synthetic",))] = "synthetic"
    text_field: str = "text"
    label_field: str = "label"
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
        check_heldout_fraction("LabelledText.heldout_fraction", self.heldout_fraction)

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
                "LabelledText.source = 'synthetic' has no tokenizer: random tokens stand for no "
                "text"
            )
        path = None
        if self.tokenizer != "byte":
            path = existing_path("LabelledText.tokenizer", self.tokenizer, words=("byte",))
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
        names = sorted({label for _, label in self._texts()})
        if len(names) != self.num_classes:
            raise UserError(
                f"LabelledText.num_classes = {self.num_classes}, but LabelledText.source = "
                f"{self.source!r} has {len(names)} ({', '.join(names[:8])}); set "
                f"LabelledText.num_classes = {len(names)}"
            )
        return names

    def row(self, tokens: Sequence[int], label: int = 0) -> Batch:
        """One text as a row [T]: the label stands where it is told, and nothing else counts."""
        begun = ([] if self.begin is None else [self.begin]) + list(tokens)
        begun = begun[: self.sequence_length]
        place_T = np.arange(self.sequence_length, dtype=np.int32)
        real_T = place_T < len(begun)
        told_T = place_T == (0 if self.place == "first" else len(begun) - 1)
        return Batch(
            np.pad(np.array(begun, np.int32), (0, self.sequence_length - len(begun))),
            np.where(told_T, label, 0).astype(np.int32),
            told_T.astype(np.float32),
            real_T.astype(np.int32),
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
            texts = [
                (np.array(tokenizer.encode(text), np.int32), of_name[name])
                for text, name in self._texts()
            ]
        empty = sum(not len(tokens) for tokens, _ in texts)
        if empty and self.begin is None:
            raise UserError(
                f"LabelledText.source = {self.source!r}: {empty} of its texts are empty; leave "
                "them out, or name a token that is put before each in LabelledText.begin"
            )
        labels = np.array([label for _, label in texts])
        held = np.zeros(len(texts), bool)
        for label in range(self.num_classes):
            (of_class,) = np.nonzero(labels == label)
            held[of_class] = is_heldout(len(of_class), self.heldout_fraction)
        if held.all() or not held.any():
            raise UserError(
                f"LabelledText.source = {self.source!r}: of its {len(held)} texts {held.sum()} "
                "would be held out; use more, or another LabelledText.heldout_fraction (now "
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
        parts = [np.concatenate([tokens for tokens, _ in texts]), lengths, labels, held]
        train, heldout = (
            Rows([texts[place] for place in np.flatnonzero(chosen)], self)
            for chosen in (~held, held)
        )
        return Dataset(train, heldout, digest(header, parts), facts, tokenizer, "tokens")

    def _texts(self) -> list[files.Texts]:
        path = existing_path("LabelledText.source", self.source, words=("synthetic",))
        return list(files.read(path, "LabelledText.source", self.text_field, self.label_field))

    def _synthetic(self, seed: int) -> Texts:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, self.sequence_length, SYNTHETIC_TEXTS)
        labels = rng.integers(0, self.num_classes, SYNTHETIC_TEXTS).tolist()
        return [
            (rng.integers(0, self.synthetic_vocab_size, length).astype(np.int32), label)
            for length, label in zip(lengths, labels, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Texts and their labels, in memory; implements Examples.

    Attributes:
      texts: tokens and label of each.
      data: makes rows of them.
    """

    texts: Texts
    data: LabelledText

    def __len__(self) -> int:
        return len(self.texts)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Text `index`, a row [T]; the same for any `rng`."""
        del rng
        tokens, label = self.texts[index]
        return self.data.row(tokens.tolist(), label)
