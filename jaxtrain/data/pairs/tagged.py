"""`TaggedText`: sentences with a tag per word, for sequence tagging (NER, POS).

Letter: T length.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.classed_rows import Labelled, Labels
from jaxtrain.data.pairs import tagged_files
from jaxtrain.data.pairs.classed import ClassedText
from jaxtrain.data.pairs.tagged_files import Sentence
from jaxtrain.data.source import existing_path, is_heldout
from jaxtrain.data.tokenization.tokenizer import Tokenizer


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggedText(ClassedText[Sentence]):
    """Sentences whose words have classes, one sentence in a row: JSON lines (`.jsonl`) with a list
    of words and one of tags, or CoNLL's columns (`.conll`, `.iob`, `.bio`, `.txt`).

    Attributes:
      words_field, tags_field: names of the two lists of a record of JSON lines.
    """

    words_field: str = "tokens"
    tags_field: str = "tags"

    def records(self) -> Iterable[Sentence]:
        """As in ClassedText: the words, and the names of their classes."""
        path = existing_path("TaggedText.source", self.source, words=("synthetic",))
        return tagged_files.read(path, "TaggedText.source", self.words_field, self.tags_field)

    def names_of(self, record: Sentence) -> Sequence[str]:
        """As in ClassedText."""
        return record[1]

    def encode(self, record: Sentence, tokenizer: Tokenizer, labels: dict[str, int]) -> Labelled:
        """As in ClassedText; a word without a token has no label."""
        words, tags = record
        tokens, places = self.tokens_of(words, tokenizer)
        told = np.full(len(tokens), -1, np.int32)
        for place, tag in zip(places, tags, strict=True):
            if place is not None:
                told[place] = labels[tag]
        return np.array(tokens, np.int32), told

    def tokens_of(
        self, words: Sequence[str], tokenizer: Tokenizer
    ) -> tuple[list[int], list[int | None]]:
        """Return the tokens of words with a space between them, and where each class is
        predicted."""
        tokens, places = list[int](), list[int | None]()
        for word in words:
            space = " " if tokens else ""
            ids, of = tokenizer.encode_with_places(space + word)
            place = len(ids) - 1 if self.place == "last" else _covering(of, len(space))
            places.append(len(tokens) + place if ids else None)
            tokens += ids
        return tokens, places

    def random_labels(self, rng: np.random.Generator, lengths: np.ndarray) -> list[Labels]:
        """As in ClassedText: one for each token."""
        return [rng.integers(0, self.num_classes, length).astype(np.int32) for length in lengths]

    def row(self, places: Sequence[int] | np.ndarray, label: Any = 0) -> Batch:
        """As in ClassedText, with labels of the tokens; one stands for all."""
        if np.ndim(label):
            label = np.asarray(label)[: self.room]
        return self.label_tokens(self.wrap_tokens(places), label, first=len(self.around[0]))

    def select_heldout(self, labels: list[Labels]) -> np.ndarray:
        """As in ClassedText."""
        return is_heldout(len(labels), self.heldout_fraction)


def _covering(places: Sequence[int], character: int) -> int:
    """The first token that begins at a character, else the last that begins before it.

    Args:
      places: of each token's first character, in order.
      character: the one that is looked for.
    """
    before = [number for number, place in enumerate(places) if place <= character]
    return places.index(character) if character in places else max(before, default=0)
