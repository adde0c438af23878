"""`LabelledText`: texts with class names, for text classification. Letter: T length."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.classed_rows import Labelled, Labels
from jaxtrain.data.pairs import files
from jaxtrain.data.pairs.classed import ClassedText
from jaxtrain.data.source import existing_path
from jaxtrain.data.tokenization.tokenizer import Tokenizer


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledText(ClassedText[files.Texts]):
    """Texts and their classes, one text in a row: JSON lines (`.jsonl`), or columns with a line of
    names (`.tsv`, `.csv`).

    Attributes:
      text_field, label_field: names of the text and of the name of its class.
    """

    text_field: str = "text"
    label_field: str = "label"

    def records(self) -> Iterable[files.Texts]:
        """As in ClassedText: a text, and the name of its class."""
        path = existing_path("LabelledText.source", self.source, words=("synthetic",))
        return files.read(path, "LabelledText.source", self.text_field, self.label_field)

    def names_of(self, record: files.Texts) -> Sequence[str]:
        """As in ClassedText."""
        return record[1:]

    def encode(self, record: files.Texts, tokenizer: Tokenizer, labels: dict[str, int]) -> Labelled:
        """As in ClassedText."""
        text, name = record
        return np.array(tokenizer.encode(text), np.int32), labels[name]

    def random_labels(self, rng: np.random.Generator, lengths: np.ndarray) -> list[Labels]:
        """As in ClassedText: one each."""
        return rng.integers(0, self.num_classes, len(lengths)).tolist()

    def row(self, places: Sequence[int] | np.ndarray, label: Any = 0) -> Batch:
        """As in ClassedText, with the text's one label."""
        return self.label_sequence(self.wrap_tokens(places), label)

    def select_heldout(self, labels: list[Labels]) -> np.ndarray:
        """As in ClassedText: the same share of each class."""
        return self.split_by_class(labels)
