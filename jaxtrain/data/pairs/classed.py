"""Text and token classification: one text per row with a label, or a tag per word (NER, POS).

Files of tagged sentences are JSON lines or CoNLL columns. Letter: T length.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Generic, TypeVar

import jax
import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.classed_rows import ClassedRows, Labelled, Labels, Rows
from jaxtrain.data.pairs import files
from jaxtrain.data.pairs.files import field, records, text_of
from jaxtrain.data.source import Dataset, digest, existing_path, is_heldout
from jaxtrain.data.text.documents import BYTE_ORDER_MARK, plain_name, reading
from jaxtrain.data.tokenization.tokenizer import Tokenizer, open_tokenizer

COLUMNS = (".conll", ".iob", ".bio", ".txt")
ENDINGS = (".jsonl", ".json", *COLUMNS)
DOCUMENT = "-DOCSTART-"  # the word of a line that belongs to no sentence
Sentence = tuple[list[str], list[str]]


def read(path: AnyPath, setting: str, words_field: str, tags_field: str) -> Iterator[Sentence]:
    """Yield the words and tags of a file's sentences in order; none of them is empty.

    Args:
      path: the file, perhaps compressed (.gz, .zst).
      setting: the setting that names the file, for messages.
      words_field, tags_field: the names of a record's two lists.

    Raises:
      UserError: it has another suffix, cannot be read, or a record or line has no words and tags.
    """
    origin, name = f"{setting} = {str(path)!r}", plain_name(path)
    if not name.endswith(ENDINGS):
        raise UserError(f"{origin}: it takes a file that ends in {', '.join(ENDINGS)}")
    with reading(path) as stream:
        lines = (
            line.removeprefix(BYTE_ORDER_MARK) if not number else line
            for number, line in enumerate(stream)
        )
        if name.endswith(COLUMNS):
            yield from _of_columns(lines, origin)
            return
        for where, record in records(lines, origin):
            words, tags = (_strings(record, one, where) for one in (words_field, tags_field))
            if len(words) != len(tags):
                raise UserError(
                    f"{where} has {len(words)} words in {words_field!r} and {len(tags)} tags in "
                    f"{tags_field!r}; each word has one"
                )
            if words:
                yield words, tags


def _strings(record: dict, name: str, where: str) -> list[str]:
    value = field(record, name, where)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{where}: {name!r} is not a list of strings")
    return [text_of(one, f"{where}: {name!r}") for one in value]


def _of_columns(lines: Iterator[bytes], origin: str) -> Iterator[Sentence]:
    """Yield sentences of a file with one word per line, its tag in the last column, and blank lines
    between sentences.
    """
    words, tags = list[str](), list[str]()
    for number, line in enumerate(lines, start=1):
        try:
            columns = line.decode("utf-8").split()
        except UnicodeDecodeError as error:
            raise UserError(f"{origin}: line {number} is not UTF-8 text") from error
        if not columns or columns[0] == DOCUMENT:
            if words:
                yield words, tags
            words, tags = [], []
            continue
        if len(columns) < 2:
            raise UserError(
                f"{origin}: line {number} has one column, {columns[0]!r}; each line has a word "
                "and its tag"
            )
        words.append(columns[0])
        tags.append(columns[-1])
    if words:
        yield words, tags


SYNTHETIC_TEXTS = 4096

# A source's record of a text: its words or itself, and the names of its classes.
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassedText(ClassedRows, Generic[R]):
    """Base of text with labels, one text per row.

    Attributes:
      source: the file, which may be `.gz` or `.zst`; or `'synthetic'`, random tokens and labels.
      sequence_length: tokens of a row; longer texts are truncated, and counted.
      tokenizer: `'byte'`, or the path of a Hugging Face `tokenizer.json`.
      begin: the id of the only token that is put around each text, before it; None: the
        special tokens that the tokenizer puts around a text, such as BERT's `[CLS]` and `[SEP]`.
      add_special_tokens: whether they are added; None: the tokenizer's default.
      pooling: the token of a text, or of a word, at which its class is predicted: the `'first'`, or
        the `'last'`, as unidirectional recurrent models need it.
      synthetic_vocab_size: the vocabulary that `'synthetic'` draws from.
    """

    tokenizer: Annotated[str, PathOr(("byte",))] = "byte"
    begin: int | None = None
    add_special_tokens: bool | None = None
    synthetic_vocab_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(2, self, "synthetic_vocab_size")
        if self.begin is not None:
            require_at_least(0, self, "begin")

    @abc.abstractmethod
    def records(self) -> Iterable[R]:
        """Return the records of the source, unprocessed.

        Raises:
          UserError: no such source, or it has no such texts.
        """

    @abc.abstractmethod
    def names_of(self, record: R) -> Sequence[str]:
        """Return the class names in a record."""

    @abc.abstractmethod
    def encode(self, record: R, tokenizer: Tokenizer, labels: dict[str, int]) -> Labelled:
        """Return the tokens of a record, and their labels."""

    @abc.abstractmethod
    def random_labels(self, rng: np.random.Generator, lengths: np.ndarray) -> list[Labels]:
        """Draw labels for texts of random tokens."""

    @abc.abstractmethod
    def select_heldout(self, labels: list[Labels]) -> np.ndarray:
        """Return which texts are held out, given their labels: bool [texts]."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: all ids are below it."""
        if self.source == "synthetic":
            return self.synthetic_vocab_size
        return max(self.open_tokenizer().vocab_size, (self.begin or 0) + 1)

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, without reading any text.

        Raises:
          UserError: no such file, it is not a tokenizer.json, or the tokens are random.
        """
        if self.source == "synthetic":
            raise UserError(
                f"{self.section}.source = 'synthetic' has no tokenizer: random tokens are not text"
            )
        path = None
        if self.tokenizer != "byte":
            path = existing_path(f"{self.section}.tokenizer", self.tokenizer, words=("byte",))
        return open_tokenizer(
            self.tokenizer, end_of_text=None, path=path, section=self.section,
            add_special_tokens=self.add_special_tokens,
        )  # fmt: skip

    @functools.cached_property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Special tokens before and after each text; random texts have only `begin`."""
        if self.begin is not None:
            return (self.begin,), ()
        if self.source == "synthetic":
            return (), ()
        tokenizer = self.open_tokenizer()
        return tokenizer.before, tokenizer.after

    @property
    def room(self) -> int:
        """Number of text tokens that fit in a row, special tokens excluded."""
        return max(self.sequence_length - sum(map(len, self.around)), 0)

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data."""
        shape = (global_batch_size, self.sequence_length)
        tokens: Any = jax.ShapeDtypeStruct(shape, np.int32)
        mask: Any = jax.ShapeDtypeStruct(shape, np.float32)
        return Batch(tokens, tokens, mask, tokens, tokens)

    def class_names(self) -> list[str]:
        """Return the names of the classes, by label.

        Raises:
          UserError: the source does not exist, or has another number of classes.
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

    def wrap_tokens(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return a text's tokens with the special tokens around them, truncated to a row, int32."""
        before, after = self.around
        whole = [*before, *list(tokens)[: self.room], *after]
        return np.array(whole[: self.sequence_length], np.int32)

    def open(self, *, seed: int) -> Dataset:
        """Read, tokenize and split the texts; only `'synthetic'` depends on `seed`.

        Raises:
          UserError: no such source, another number of classes, or a split that would be empty.
        """
        names, tokenizer = self.class_names(), None
        if self.source == "synthetic":
            texts = self._synthetic(seed)
        else:
            tokenizer = self.open_tokenizer()
            of_name = {name: label for label, name in enumerate(names)}
            texts = [self.encode(record, tokenizer, of_name) for record in self.records()]
        empty = sum(not len(tokens) for tokens, _ in texts)
        if empty and not any(self.around):
            raise UserError(
                f"{self.section}.source = {self.source!r}: {empty} of its texts are empty; leave "
                f"them out, or name a token that is put before each in {self.section}.begin"
            )
        labels = [label for _, label in texts]
        held = self.select_heldout(labels)
        self.reject_empty_split(held, "texts")
        facts: dict[str, float | int | str] = {
            "source": self.source,
            "vocab_size": self.vocab_size,
            "classes": self.num_classes,
            "class_names": ", ".join(names),
            "train_texts": int((~held).sum()),
            "heldout_texts": int(held.sum()),
            "texts_cut": sum(len(tokens) > self.room for tokens, _ in texts),
        }
        header: dict[str, Any] = {
            "kind": "labelled", "tokenizer": None if tokenizer is None else tokenizer.digest,
            "names": names, "settings": [self.sequence_length, self.begin, self.pooling],
        }  # fmt: skip
        if self.begin is None and any(self.around):
            header["special_tokens"] = [list(part) for part in self.around]
        lengths = np.array([len(tokens) for tokens, _ in texts], np.int64)
        label_ids = np.concatenate([np.atleast_1d(label) for label in labels]).astype(np.int64)
        parts = [np.concatenate([tokens for tokens, _ in texts]), lengths, label_ids, held]
        train, heldout = (
            Rows([texts[index] for index in np.flatnonzero(chosen)], self)
            for chosen in (~held, held)
        )
        return Dataset(train, heldout, digest(header, parts), facts, tokenizer, "tokens")

    def _synthetic(self, seed: int) -> list[Labelled]:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, self.sequence_length, SYNTHETIC_TEXTS)
        labels = self.random_labels(rng, lengths)
        return [
            (rng.integers(0, self.synthetic_vocab_size, length).astype(np.int32), label)
            for length, label in zip(lengths, labels, strict=True)
        ]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledText(ClassedText[files.Texts]):
    """Text classification data, one text per row: JSON lines (`.jsonl`), or columns with a header
    (`.tsv`, `.csv`).

    Attributes:
      text_field, label_field: names of the text and of the name of its class.
    """

    text_field: str = "text"
    label_field: str = "label"

    def records(self) -> Iterable[files.Texts]:
        """Read the records: a text, and the name of its class."""
        path = existing_path("LabelledText.source", self.source, words=("synthetic",))
        return files.read(path, "LabelledText.source", self.text_field, self.label_field)

    def names_of(self, record: files.Texts) -> Sequence[str]:
        """Return the class name in a record."""
        return record[1:]

    def encode(self, record: files.Texts, tokenizer: Tokenizer, labels: dict[str, int]) -> Labelled:
        """Tokenize the text of a record and look up its label, as in `ClassedText`."""
        text, name = record
        return np.array(tokenizer.encode(text), np.int32), labels[name]

    def random_labels(self, rng: np.random.Generator, lengths: np.ndarray) -> list[Labels]:
        """Draw one label for each text."""
        return rng.integers(0, self.num_classes, len(lengths)).tolist()

    def row(self, content: Sequence[int] | np.ndarray, label: Any = 0) -> Batch:
        """Return a row as in `ClassedText`, with the text's one label."""
        return self.label_sequence(self.wrap_tokens(content), label)

    def select_heldout(self, labels: list[Labels]) -> np.ndarray:
        """Return which texts are held out: the same fraction of each class."""
        return self.split_by_class(labels)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggedText(ClassedText[Sentence]):
    """Token classification data (NER, POS), one sentence per row: JSON lines (`.jsonl`) with a list
    of words and one of tags, or CoNLL's columns (`.conll`, `.iob`, `.bio`, `.txt`).

    Attributes:
      words_field, tags_field: names of the two lists of a record of JSON lines.
    """

    words_field: str = "tokens"
    tags_field: str = "tags"

    def records(self) -> Iterable[Sentence]:
        """Read the records: the words, and the names of their classes."""
        path = existing_path("TaggedText.source", self.source, words=("synthetic",))
        return read(path, "TaggedText.source", self.words_field, self.tags_field)

    def names_of(self, record: Sentence) -> Sequence[str]:
        """Return the class names in a record."""
        return record[1]

    def encode(self, record: Sentence, tokenizer: Tokenizer, labels: dict[str, int]) -> Labelled:
        """Tokenize the words of a record and look up their labels; a word without a token has no
        label.
        """
        words, tags = record
        tokens, positions = self.tokens_of(words, tokenizer)
        label_ids = np.full(len(tokens), -1, np.int32)
        for position, tag in zip(positions, tags, strict=True):
            if position is not None:
                label_ids[position] = labels[tag]
        return np.array(tokens, np.int32), label_ids

    def tokens_of(
        self, words: Sequence[str], tokenizer: Tokenizer
    ) -> tuple[list[int], list[int | None]]:
        """Return the tokens of words with a space between them, and where each class is
        predicted."""
        tokens, positions = list[int](), list[int | None]()
        for word in words:
            space = " " if tokens else ""
            ids, of = tokenizer.encode_with_offsets(space + word)
            position = len(ids) - 1 if self.pooling == "last" else _covering(of, len(space))
            positions.append(len(tokens) + position if ids else None)
            tokens += ids
        return tokens, positions

    def random_labels(self, rng: np.random.Generator, lengths: np.ndarray) -> list[Labels]:
        """Draw one label for each token."""
        return [rng.integers(0, self.num_classes, length).astype(np.int32) for length in lengths]

    def row(self, content: Sequence[int] | np.ndarray, label: Any = 0) -> Batch:
        """Return a row as in `ClassedText`, with one label per token; a scalar label is used for
        all.
        """
        if np.ndim(label):
            label = np.asarray(label)[: self.room]
        return self.label_tokens(self.wrap_tokens(content), label, first=len(self.around[0]))

    def select_heldout(self, labels: list[Labels]) -> np.ndarray:
        """Return which texts are held out, bool [texts]."""
        return is_heldout(len(labels), self.heldout_fraction)


def _covering(positions: Sequence[int], character: int) -> int:
    """Return the first token that starts at a character, else the last one before it.

    Args:
      positions: of each token's first character, in order.
      character: its offset.
    """
    before = [number for number, position in enumerate(positions) if position <= character]
    return positions.index(character) if character in positions else max(before, default=0)
