"""`TextData`: text, tokenized, split by document and packed into rows."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import numpy as np

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError, count_of, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import (
    TFDS_PREFIX,
    Dataset,
    Split,
    WholeBatches,
    check_heldout_fraction,
    check_heldout_split,
    digest,
    digest_of,
    existing_path,
    glob_files,
    heldout_facts,
    hold_out,
    is_glob,
    is_heldout,
    is_store,
    sentences,
    tfds_name,
)
from jaxtrain.data.text import documents
from jaxtrain.data.text.documents import Records, cut_at_line
from jaxtrain.data.text.fill_in_middle import FillInMiddle, fill_in_middle
from jaxtrain.data.text.packing import PackedText, pack, unigram_entropy
from jaxtrain.data.tokenization.tokenizer import (
    Tokenizer,
    closing,
    no_end_of_text,
    open_tokenizer,
    special_tokens_header,
)

if TYPE_CHECKING:
    from jaxtrain.data.text.stores.store import Store

SOURCE = PathOr(("embedded", "synthetic", TFDS_PREFIX))
SOURCE_WORDS = ("embedded", "synthetic", "tfds:NAME")

# Enough for one epoch of any benchmark, and cheap: a row is drawn when it is requested.
SYNTHETIC_ROWS = {"train": 1 << 20, "heldout": 256}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Text for language modeling: tokenized and packed into rows.

    Attributes:
      source: a UTF-8 text file; a folder, each text file in it a document; or a pattern of files
        (`*`, `**`, `?`, `[...]`), on a disk or at `'gs://BUCKET/PATH'`; `'tfds:NAME'`, each record
        a document; `'embedded'`, Python's own library and language reference; or `'synthetic'`,
        random tokens for benchmarks. In JSON lines (`.jsonl`, `.ndjson`), `.csv`, `.tsv`,
        `.parquet`, `.arrow` and `.array_record`, alone or in a folder, each record is a document,
        as in a folder that `datasets` saved. Text, JSON lines and CSV may be compressed (`.gz`,
        `.zst`). Or a token store, the folder that `jaxtrain prepare` made of one of these, on a
        disk or in a bucket; or `.bin` files of tokens by nanoGPT, llm.c, or Megatron with their
        `.idx`.
      sequence_length: tokens per row.
      separate_documents: documents in one row are masked from each other and positions restart;
        False lets attention run across them, which kernels without segment ids need.
      lengths: lengths of 'padded' rows below sequence_length, such as (64, 256).
      packing: 'stream' concatenates documents and cuts them into rows, with no padding; 'best_fit'
        keeps documents whole that fit into a row (arXiv 2404.10830), and reports its padding;
        'padded' gives each a row, padded to the smallest of `lengths` that fits, and each batch
        one length.
      fill_in_middle: `@FillInMiddle()`, some documents have their middle last; None: none.
      tokenizer: `'byte'` (vocabulary 256, byte 0 ends a document) or the path of a Hugging Face
        tokenizer.json.
      end_of_text: the token of tokenizer.json that ends a document; None takes the tokenizer's own.
      add_special_tokens: whether the special tokens that the tokenizer puts around a text, such as
        Llama's beginning-of-text token, are put around documents and prompts; None: as it does by
        default, and in a store as it was prepared; True: also if it names one but adds none.
      heldout_fraction: share of the documents that is held out, evenly spaced over their order; for
        a source of one document its last part, from a line's beginning.
      data_dir: where TFDS keeps prepared data sets; None is TFDS's own default.
      train_split: the split to train on, of TFDS or of a folder that `datasets` saved.
      heldout_split: the split to evaluate on; None holds out a part of `train_split`. For several
        `.bin` files, those with this word in their names, such as 'val'.
      text_feature: the TFDS feature with the text.
      text_field: the field or column of records with the text.
      bad_records: how many records without such a text may be skipped; they are counted, and the
        first are named.
      synthetic_vocab_size: the vocabulary that `'synthetic'` draws from.
    """

    source: Annotated[str, SOURCE] = "embedded"
    sequence_length: int = 256
    separate_documents: bool = True
    packing: Literal["stream", "best_fit", "padded"] = "stream"
    lengths: tuple[int, ...] = ()
    fill_in_middle: FillInMiddle | None = None
    tokenizer: Annotated[str, PathOr(("byte",))] = "byte"
    end_of_text: str | None = None
    add_special_tokens: bool | None = None
    heldout_fraction: float = 0.05
    data_dir: Annotated[str | None, PathOr()] = None
    train_split: str = "train"
    heldout_split: str | None = None
    text_feature: str = "text"
    text_field: str = "text"
    bad_records: int = 0
    synthetic_vocab_size: int = 256

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise UserError(
                f"TextData.sequence_length = {self.sequence_length}: a row has at least 1 token"
            )
        if self.synthetic_vocab_size < 2:
            raise UserError(
                f"TextData.synthetic_vocab_size = {self.synthetic_vocab_size}: "
                "a vocabulary has at least 2 tokens"
            )
        check_heldout_fraction("TextData.heldout_fraction", self.heldout_fraction)
        require_at_least(0, self, "bad_records")
        validate_lengths(self)
        if self.packing != "stream" and not self.separate_documents:
            raise UserError(
                f"TextData.packing = {self.packing!r} keeps documents whole, which TextData."
                "separate_documents = False does not separate; use 'stream', or True"
            )
        if self.fill_in_middle is not None and not self.separate_documents:
            raise UserError(
                "TextData.fill_in_middle moves parts of documents, which TextData."
                "separate_documents = False does not separate; use None, or True"
            )
        # Whether a path has named splits is checked when it is opened.
        named = self.source not in ("embedded", "synthetic")
        check_heldout_split("TextData", self.train_split, self.heldout_split, named=named)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: all ids are below it. Reads the tokenizer file if there is one, and no
        text.
        """
        if self.source == "synthetic":
            return self.synthetic_vocab_size
        return self.open_tokenizer().vocab_size

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, without reading any text.

        Raises:
          UserError: no such file, it is not a tokenizer.json, or the tokens are random.
        """
        if self.source == "synthetic":
            raise UserError(
                "TextData.source = 'synthetic' has no tokenizer: random tokens are not text; "
                "bind TextData.source to text, and TextData.tokenizer to what the model reads"
            )
        path = None
        if self.tokenizer != "byte":
            path = existing_path("TextData.tokenizer", self.tokenizer, words=("byte",))
        return open_tokenizer(
            self.tokenizer, end_of_text=self.end_of_text, path=path,
            add_special_tokens=self.add_special_tokens,
        )  # fmt: skip

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Lengths of rows in tokens, the longest last."""
        return (*self.lengths, self.sequence_length)

    def abstract_batch(self, global_batch_size: int, length: int | None = None) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data.

        Args:
          global_batch_size: rows over all processes.
          length: of the rows; None: the longest.
        """
        shape = (global_batch_size, self.sequence_length if length is None else length)
        tokens: Any = jax.ShapeDtypeStruct(shape, np.int32)
        mask: Any = jax.ShapeDtypeStruct(shape, np.float32)
        return Batch(tokens, tokens, mask, tokens if self.separate_documents else None, tokens)

    def open(self, *, seed: int) -> Dataset:
        """Read, tokenize and split the source; only `'synthetic'` depends on `seed`.

        Raises:
          UserError: no such source, it is empty, or too short for one row in each split.
        """
        opened = self._open(seed)
        return (
            opened if self.fill_in_middle is None else fill_in_middle(opened, self.fill_in_middle)
        )

    def _open(self, seed: int) -> Dataset:
        if self.source == "synthetic":
            return _open_synthetic(self, seed)
        tokenizer = self.open_tokenizer()
        path = self.path()
        if path is not None and is_store(path):
            # Imported here, like each kind of source below: a run reads one of them.
            from jaxtrain.data.text.stores.store import open_store

            if isinstance(path, BucketPath):
                from jaxtrain.data.text.stores.prepare import fetch

                return self._of_store(open_store(*fetch(path, lambda line: None)), tokenizer)
            return self._of_store(open_store(path), tokenizer)
        files, records = self.files(), Records(self.text_field, self.bad_records)
        if files is not None and self.is_tokens():
            return self._open_token_files(files["train"].paths, tokenizer)
        train_texts, heldout_texts, rule = self._split_texts(files, records)
        train, heldout = (
            pack(
                _end_documents(texts, tokenizer),
                self.sequence_length,
                tokenizer.dtype,
                separate=self.separate_documents,
            )
            for texts in (train_texts, heldout_texts)
        )
        texts = len(train_texts), len(heldout_texts)
        self._validate_short((train, heldout), texts)
        entropy = unigram_entropy(train, heldout, tokenizer.vocab_size)
        parts = (train.tokens, train.offsets, heldout.tokens, heldout.offsets)
        more = {} if files is None else {**files["train"].facts(), **records.facts()}
        more |= rule
        made = digest(self._header(tokenizer), parts)
        return self._dataset((train, heldout), texts, made, tokenizer, entropy, more)

    def _of_store(self, store: "Store", tokenizer: Tokenizer) -> Dataset:
        """Return the dataset that `open` returns for the text of a token store, without reading the
        text.
        """
        from jaxtrain.data.text.stores.store import SPLITS

        store.settle_tokenizer(
            tokenizer, self.tokenizer, ends=self.end_of_text is not None,
            surrounds=self.add_special_tokens is not None,
        )  # fmt: skip
        store.validate_fraction(self.heldout_fraction)
        train, heldout = (
            store.pack(split, self.sequence_length, separate=self.separate_documents)
            for split in SPLITS
        )
        texts = store.parts["train"].texts, store.parts["heldout"].texts
        self._validate_short((train, heldout), texts)
        parts = [made for split in SPLITS for made in store.parts[split].digests]
        made = digest_of(self._header(tokenizer), parts)
        more = {name: fact for name, fact in store.facts.items() if name != "source"}
        # One document in each split may have been one, cut in two.
        if store.heldout_fraction is not None and sum(texts) > 2:
            more |= self._heldout_rule(sum(texts))
        entropy = store.unigram_entropy
        return self._dataset((train, heldout), texts, made, tokenizer, entropy, more)

    def _open_token_files(self, paths: list[AnyPath], tokenizer: Tokenizer) -> Dataset:
        """Open token files of other programs, special tokens included."""
        if self.add_special_tokens is not None:
            raise UserError(
                f"TextData.add_special_tokens = {self.add_special_tokens} with TextData.source = "
                f"{self.source!r}: files of tokens are read as they are; leave it None"
            )
        from jaxtrain.data.text.formats.token_files import open_token_files

        tokenizer.before = tokenizer.after = ()
        found = open_token_files(
            paths,
            tokenizer,
            self.sequence_length,
            origin=self.tokenizer,
            separate=self.separate_documents,
            heldout_split=self.heldout_split,
            heldout_fraction=self.heldout_fraction,
        )
        packed = found.train, found.heldout
        texts = len(found.train.offsets) - 1, len(found.heldout.offsets) - 1
        self._validate_short(packed, texts)
        made = digest_of(self._header(tokenizer), found.digests)
        return self._dataset(packed, texts, made, tokenizer, found.unigram_entropy, {})

    def is_tokens(self) -> bool:
        """Whether the source names token files of other programs."""
        return self.source.lower().endswith(".bin")

    def _header(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the settings, besides the tokens, that determine the rows."""
        return {
            "kind": "text",
            "tokenizer": tokenizer.digest,
            "end_of_text": tokenizer.end_of_text,
            **special_tokens_header(tokenizer),
            "sequence_length": self.sequence_length,
            "separate_documents": self.separate_documents,
            # Not of the stream, omitted by default, so that older digests stay valid.
            **({} if self.packing == "stream" else {"packing": self.packing}),
            **({"lengths": self.lengths} if self.lengths else {}),
        }

    def _dataset(
        self,
        packed: tuple[PackedText, PackedText],
        texts: tuple[int, int],
        made: str,
        tokenizer: Tokenizer,
        entropy: float,
        more: Mapping[str, int | str],
    ) -> Dataset:
        train, heldout = packed
        facts = {
            "source": self.source,
            "documents": sum(texts),
            "train_documents": texts[0],
            "heldout_documents": texts[1],
            "train_tokens": len(train.tokens),
            "heldout_tokens": len(heldout.tokens),
            "vocab_size": tokenizer.vocab_size,
            "unigram_entropy": entropy,
            **more,
        }
        if tokenizer.end_of_text is None:
            facts["no_end_of_text"] = no_end_of_text("TextData", self.tokenizer)
        if self.packing == "stream":
            return Dataset(train, heldout, made, facts, tokenizer, "tokens")
        if self.packing == "padded":
            from jaxtrain.data.mixture_sampler import ByLength
            from jaxtrain.data.text.packing import PaddedText

            rows = PaddedText(train.tokens, train.offsets, self.row_lengths)
            held = PaddedText(heldout.tokens, heldout.offsets, (self.sequence_length,))
            self._validate_rowless(len(rows), len(held))
            facts["train_padding"] = rows.padding
            facts["rows_by_length"] = ", ".join(
                f"{length}: {count:,}"
                for length, count in zip(rows.lengths, rows.rows, strict=True)
            )
            order = ByLength(rows.rows)
            return Dataset(rows, held, made, facts, tokenizer, "tokens", by_length=order)
        from jaxtrain.data.text.packing import BestFit

        fitted = BestFit(train.tokens, train.offsets, self.sequence_length)
        held = BestFit(heldout.tokens, heldout.offsets, self.sequence_length)
        self._validate_rowless(len(fitted), len(held))
        facts["train_padding"] = fitted.padding
        return Dataset(fitted, held, made, facts, tokenizer, "tokens")

    def _heldout_rule(self, count: int) -> dict[str, int | str]:
        """Return the fact that the last document is held out, if the fraction selects none."""
        if is_heldout(count, self.heldout_fraction).any():
            return {}
        setting = "TextData.heldout_fraction"
        return heldout_facts(setting, self.heldout_fraction, count, "document")

    def _validate_rowless(self, *rows: int) -> None:
        """Raise UserError if one of these numbers of rows is 0."""
        if not all(rows):
            raise UserError(
                f"TextData.source = {self.source!r}: a split has no document of 2 tokens, so there "
                "is no next token to predict; use TextData.packing = 'stream'"
            )

    def path(self) -> AnyPath | None:
        """Path of a source that is a file or a folder; None for other sources.

        Raises:
          UserError: no such path.
        """
        if self.source in ("embedded", "synthetic") or is_glob(self.source):
            return None
        if tfds_name("TextData.source", self.source) is not None:
            return None
        return existing_path("TextData.source", self.source, words=SOURCE_WORDS)

    def files(self) -> dict[Split, documents.Files] | None:
        """Return the files of a source, by split; None for sources that are not paths.

        Without `heldout_split` all are listed under "train".

        Raises:
          UserError: no such path, or no split of that name.
        """
        if is_glob(self.source):
            self._validate_split(named=self.is_tokens())
            found = glob_files(self.source, "TextData.source")
            return {"train": documents.Files(found, {})}
        path = self.path()
        if path is None:
            return None
        settings: dict[Split, str] = {"train": self.train_split}
        if self.heldout_split is not None:
            from jaxtrain.data.text.formats.saved_datasets import has_splits

            self._validate_split(named=has_splits(path))
            settings["heldout"] = self.heldout_split
        return {
            split: documents.files_of(path, name, f"TextData.{split}_split")
            for split, name in settings.items()
        }

    def size(self) -> int | None:
        """Return the size in bytes of source files on this machine's disks; None for
        other sources.
        """
        files = self.files()
        sizes = [] if files is None else [of_split.size() for of_split in files.values()]
        known = [size for size in sizes if size is not None]
        return sum(known) if sizes and len(known) == len(sizes) else None

    def _validate_split(self, *, named: bool) -> None:
        check_heldout_split("TextData", self.train_split, self.heldout_split, named=named)

    def _split_texts(
        self, files: dict[Split, documents.Files] | None, records: Records
    ) -> tuple[list[str], list[str], dict[str, int | str]]:
        """Return the documents that are not blank, for training and held out, and the fact of
        `_heldout_rule`. A single document is cut in two.
        """
        texts = _not_blank(
            self.read(self.train_split, "TextData.train_split")
            if files is None
            else files["train"].texts(records)
        )
        if not texts:
            raise UserError(
                f"TextData.source = {self.source!r}: the text is empty, so there is nothing to "
                "train on" + ("" if files is None else _without(files["train"]))
            )
        if self.heldout_split is not None:
            if files is not None:
                return texts, _not_blank(files["heldout"].texts(records)), {}
            return texts, _not_blank(self.read(self.heldout_split, "TextData.heldout_split")), {}
        if len(texts) == 1:
            cut = cut_at_line(texts[0], 1.0 - self.heldout_fraction)
            return [texts[0][:cut]], [texts[0][cut:]], {}
        held = hold_out(len(texts), self.heldout_fraction)
        train = [text for text, out in zip(texts, held, strict=True) if not out]
        heldout = [text for text, out in zip(texts, held, strict=True) if out]
        return train, heldout, self._heldout_rule(len(texts))

    def read(self, split: str, setting: str) -> Iterable[str]:
        """Return the documents of a source that is not a path; `setting` names the split."""
        name = tfds_name("TextData.source", self.source)
        if name is None:
            return documents.read_embedded()
        # Imported here: most runs read no TFDS.
        from jaxtrain.data.tfds import open_builder, read_text

        builder = open_builder(name, self.data_dir, "TextData.source")
        return read_text(builder, split, setting, feature=self.text_feature)

    def _validate_short(
        self, packed: tuple[PackedText, PackedText], texts: tuple[int, int]
    ) -> None:
        """Raise UserError if a split has too few tokens for a row."""
        needed = self.sequence_length + 1
        for split, rows, count in zip(("training", "held-out"), packed, texts, strict=True):
            if len(rows.tokens) < needed:
                raise UserError(
                    f"TextData.source = {self.source!r}: its {split} part has "
                    f"{count_of(count, 'document')} with {count_of(len(rows.tokens), 'token')}, "
                    f"and one row of TextData.sequence_length = {self.sequence_length} needs "
                    f"{needed}; use more text, a smaller TextData.sequence_length or another "
                    f"TextData.heldout_fraction (now {self.heldout_fraction})"
                )


def text_of(data: object) -> TextData | None:
    """Return the text settings among a run's data, or None."""
    if isinstance(data, TextData):
        return data
    # Imported here: most runs read one source.
    from jaxtrain.data.mixture import Mixture

    return data.data if isinstance(data, Mixture) else None


def validate_lengths(data: TextData) -> None:
    """Raise UserError if row lengths are set without 'padded' packing, or are not in order."""
    if data.packing != "padded":
        if data.lengths:
            raise UserError(
                f"TextData.lengths = {data.lengths} with TextData.packing = {data.packing!r}: only "
                "'padded' rows have several lengths"
            )
        return
    steps = (0, *data.row_lengths)
    if any(after <= before for before, after in itertools.pairwise(steps)):
        raise UserError(
            f"TextData.lengths = {data.lengths}: each is more than the one before it, from 1 on, "
            f"and less than TextData.sequence_length = {data.sequence_length}"
        )
    if data.source == "synthetic":
        raise UserError(
            "TextData.packing = 'padded' with TextData.source = 'synthetic': random rows have no "
            "documents of other lengths; use 'stream'"
        )


@dataclasses.dataclass(frozen=True)
class RandomTokens(WholeBatches):
    """Rows of uniformly random tokens, each one document."""

    rows: int
    sequence_length: int
    vocab_size: int
    seed: tuple[int, ...]
    separate: bool

    def __len__(self) -> int:
        return self.rows

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the rows `indices`, each drawn from a generator of its own."""
        shape = len(indices), self.sequence_length
        windows = np.empty((shape[0], shape[1] + 1), np.int32)
        for row, index in enumerate(indices.tolist()):
            draw = np.random.default_rng((*self.seed, index))
            windows[row] = draw.integers(self.vocab_size, size=shape[1] + 1, dtype=np.int32)
        segment_ids = np.ones(shape, np.int32) if self.separate else None
        positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        inputs, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        return Batch(inputs, targets, np.ones(shape, np.float32), segment_ids, positions)


def _open_synthetic(config: TextData, seed: int) -> Dataset:
    length, vocab_size = config.sequence_length, config.synthetic_vocab_size
    train, heldout = (
        RandomTokens(rows, length, vocab_size, (seed, number), config.separate_documents)
        for number, rows in enumerate(SYNTHETIC_ROWS.values())
    )
    header = {"kind": "synthetic", "vocab": vocab_size, "sequence_length": length, "seed": seed}
    facts = {
        "source": config.source,
        "documents": len(train) + len(heldout),
        "train_tokens": len(train) * length,
        "heldout_tokens": len(heldout) * length,
        "vocab_size": vocab_size,
        "unigram_entropy": math.log(vocab_size),
    }
    return Dataset(train, heldout, digest(header, ()), facts, None, "tokens")


def _end_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    begin, end = tokenizer.before, closing(tokenizer)
    for ids in tokenizer.encode_documents(texts):
        if len(ids):
            yield np.concatenate([np.asarray(begin, ids.dtype), ids, np.asarray(end, ids.dtype)])


def _not_blank(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if text.strip()]


def _without(files: documents.Files) -> str:
    """Return the part of a message that reports files left out."""
    if not files.left_out:
        return ""
    return "; " + "; ".join(sentences(files.facts()))
