"""Token store: memory-mapped files of text that was tokenized once."""

import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.buckets import AnyPath, BucketPath, in_threads
from jaxtrain.config.errors import UserError
from jaxtrain.config.untrusted import read_json_object
from jaxtrain.data.source import STORE_FILE, Split
from jaxtrain.data.text.packing import PackedText
from jaxtrain.data.token_arrays import Ranged, Tokens, Verified, block_checksums
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.data.tokenization.tokenizer_folder import SETTINGS, SPECIAL_MAP

SPLITS: tuple[Split, ...] = ("train", "heldout")

TOKENIZER_FILE = "tokenizer.json"  # a copy of the tokenizer; none for bytes
# And of the files next to it that define its tokens.
TOKENIZER_FILES = (TOKENIZER_FILE, SETTINGS, SPECIAL_MAP)
_FORMAT = 2
_READ = (1, 2)  # 1: without checksums of blocks
# This many blocks of a file, evenly spaced, are read when a store is opened.
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16


@dataclasses.dataclass(frozen=True)
class Part:
    """Description of one split of a token store.

    Attributes:
      texts: documents of the source, including empty ones.
      documents: those with tokens.
      tokens: of all of them, end-of-text tokens included.
      digests: sha256 hex of the tokens and of the offsets, as `source.part_digest`.
      samples: sha256 hex of some blocks of each of the two files.
      checksums: CRC-32 of the file of the tokens' block checksums and of the offsets; empty in
        stores of format 1, of which only the samples are verified.
    """

    texts: int
    documents: int
    tokens: int
    digests: Sequence[str]
    samples: Sequence[str]
    checksums: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Store:
    """Description of a token store.

    Attributes:
      folder: where it is.
      tokenizer: sha256 hex of the definition of the ids.
      end_of_text: the id that ends a document, or None.
      before, after: special tokens around each document; stores of earlier versions have none.
      dtype: of the ids.
      heldout_fraction: share of the documents held out; None: the source had its own splits.
      unigram_entropy: as `packing.unigram_entropy`.
      facts: further facts of the source.
      parts: by split.
      tokens_in: the folder of the token files; None: `folder`.
    """

    folder: Path
    tokenizer: str
    end_of_text: int | None
    dtype: str
    heldout_fraction: float | None
    unigram_entropy: float
    facts: dict[str, int | str]
    parts: dict[Split, Part]
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    tokens_in: BucketPath | None = None

    def save(self) -> str:
        """Return the contents of STORE_FILE, JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["parts"] = {name: dataclasses.asdict(part) for name, part in self.parts.items()}
        del fields["folder"], fields["tokens_in"]
        return json.dumps({"format": _FORMAT, **fields}, indent=1)

    @property
    def bytes(self) -> int:
        """Size of the tokens and the document offsets, in bytes."""
        size = np.dtype(self.dtype).itemsize
        return sum(part.tokens * size + (part.documents + 1) * 8 for part in self.parts.values())

    def pack(self, split: Split, sequence_length: int, *, separate: bool) -> PackedText:
        """Return a split's rows; reads only the tokens that the rows are made of."""
        part = self.parts[split]
        _, offsets = files_of(self.folder, split)
        starts = _map(offsets, np.dtype(np.int64), part.documents + 1)
        return PackedText(self._tokens(split), starts, sequence_length, separate)

    def _tokens(self, split: Split) -> Tokens:
        part, dtype = self.parts[split], np.dtype(self.dtype)
        file, _ = files_of(self.folder, split)
        if self.tokens_in is not None:  # a bucket verifies its objects itself
            return Ranged(self.tokens_in / file.name, dtype, part.tokens)
        if part.checksums and part.tokens:
            checksums = np.fromfile(checksums_of(self.folder, split), "<u4")
            return Verified(file, dtype, part.tokens, checksums)
        return _map(file, dtype, part.tokens)

    def settle_tokenizer(
        self, tokenizer: Tokenizer, origin: str, *, ends: bool, surrounds: bool
    ) -> None:
        """Give the run's tokenizer the store's end-of-text and special tokens.

        Args:
          tokenizer: the run's.
          origin: TextData.tokenizer.
          ends: whether TextData.end_of_text is set.
          surrounds: whether TextData.add_special_tokens is set.

        Raises:
          UserError: the tokenizer or its settings differ from the store's.
        """
        if self.tokenizer not in (tokenizer.digest, tokenizer.file_digest):
            copy = self.folder / TOKENIZER_FILE
            use = str(copy) if copy.is_file() else "byte"
            raise UserError(
                f"TextData.tokenizer = {origin!r} did not make the tokens of the store "
                f"{self.folder}; use TextData.tokenizer = {use!r}, or prepare the text again"
            )
        if ends and tokenizer.end_of_text != self.end_of_text:
            raise UserError(
                f"TextData.end_of_text is the token {tokenizer.end_of_text}, but documents of "
                f"the store {self.folder} end with {self.end_of_text}; set it as the store was "
                "prepared, or prepare the text again"
            )
        own, stored = (tokenizer.before, tokenizer.after), (tuple(self.before), tuple(self.after))
        if surrounds and own != stored:
            raise UserError(
                f"TextData.add_special_tokens puts the tokens {list(own[0])} before a document and "
                f"{list(own[1])} after it, but those of the store {self.folder} have "
                f"{list(stored[0])} and {list(stored[1])}; leave it None, or prepare the text again"
            )
        tokenizer.digest, tokenizer.end_of_text = self.tokenizer, self.end_of_text
        tokenizer.before, tokenizer.after = stored

    def validate_fraction(self, fraction: float) -> None:
        """Raise UserError if the configured held-out fraction is not the store's."""
        held = self.heldout_fraction
        if held is not None and held != fraction:
            raise UserError(
                f"TextData.heldout_fraction = {fraction}, but the store {self.folder} holds out "
                f"{held} of its documents, chosen when it was prepared; use {held}, or prepare "
                "the text again"
            )


def open_store(folder: Path, tokens_in: BucketPath | None = None) -> Store:
    """Open the token store of a folder.

    Only samples of the tokens are verified here, the rest at its first read (`Verified`): opening
    takes as long for 100 GB as for 1.

    Args:
      folder: of the store.
      tokens_in: folder of its token files; None: the same folder.

    Raises:
      UserError: a file is missing, truncated or changed, or another version wrote it.
    """
    file = folder / STORE_FILE
    store = _parse_description(folder, tokens_in, file)
    for split, part in store.parts.items():
        sizes = part.tokens * np.dtype(store.dtype).itemsize, (part.documents + 1) * 8
        files: list[AnyPath] = list(files_of(folder, split))
        if tokens_in is not None:
            files[0] = tokens_in / files[0].name
        for path, size, sample in zip(files, sizes, part.samples, strict=True):
            if not path.is_file():
                raise UserError(f"the store {folder} lacks {path.name}; prepare the text again")
            found = _size(path)
            if found != size or sample_digest(path) != sample:
                raise UserError(
                    f"{path} was changed after it was prepared ({found:,} bytes, {size:,} were "
                    "written); prepare the text again"
                )
        if part.checksums:
            _verify_whole(checksums_of(folder, split), part.checksums[0])
            _verify_whole(files_of(folder, split)[1], part.checksums[1])
    return store


def _parse_description(folder: Path, tokens_in: BucketPath | None, file: Path) -> Store:
    """Parse STORE_FILE and check the type of each value.

    Raises:
      UserError: it is damaged, or of another version.
    """
    content = read_json_object(file, advice="prepare the text again")
    written = content.pop("format", None)
    if written not in _READ:
        raise UserError(
            f"{file} has format {written}; this version reads {_FORMAT}: prepare the text again"
        )
    try:
        rows = content.pop("parts")
        parts = {split: Part(**rows.pop(split)) for split in SPLITS}
        if rows or any(_misfits(part, _OF_PART) for part in parts.values()):
            raise ValueError("parts")  # noqa: TRY301
        store = Store(folder=folder, parts=parts, tokens_in=tokens_in, **content)
        if wrong := _misfits(store, _OF_STORE):
            raise ValueError(", ".join(wrong))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}); prepare the text again") from error
    return store


def _misfits(of: Part | Store, fits: Mapping[str, Callable[[Any], bool]]) -> list[str]:
    return [name for name, fit in fits.items() if not fit(getattr(of, name))]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 56


def _are_digests(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(one, str) and re.fullmatch("[0-9a-f]{64}", one) for one in value)
    )


_OF_PART: Mapping[str, Callable[[Any], bool]] = {
    "texts": _is_count,
    "documents": _is_count,
    "tokens": _is_count,
    "digests": _are_digests,
    "samples": _are_digests,
    "checksums": lambda value: value == () or len(value) == 2 and all(map(_is_count, value)),
}
_OF_STORE: Mapping[str, Callable[[Any], bool]] = {
    "tokenizer": lambda value: isinstance(value, str),
    "end_of_text": lambda value: value is None or _is_count(value),
    "before": lambda value: isinstance(value, list | tuple) and all(map(_is_count, value)),
    "after": lambda value: isinstance(value, list | tuple) and all(map(_is_count, value)),
    "dtype": lambda value: value in ("uint8", "uint16", "uint32"),
    "heldout_fraction": lambda value: value is None or isinstance(value, float),
    "unigram_entropy": lambda value: isinstance(value, float),
    "facts": lambda value: (
        isinstance(value, dict) and all(isinstance(one, int | str) for one in value.values())
    ),
}


def _verify_whole(file: Path, checksum: int) -> None:
    if file_checksum(file) != checksum:
        raise UserError(f"{file} was changed after it was prepared; prepare the text again")


def file_checksum(file: Path) -> int:
    """Return the CRC-32 of a file's block checksums."""
    return zlib.crc32(block_checksums(file).tobytes())


def checksums_of(folder: Path, split: Split) -> Path:
    """Return the path of a split's block checksums: uint32, see `block_checksums`."""
    return folder / f"{split}.crc32"


def files_of(folder: Path, split: Split) -> tuple[Path, Path]:
    """Return the paths of a split's tokens and offsets: int64, start and end of each document."""
    return folder / f"{split}.tokens", folder / f"{split}.offsets"


def sample_digest(file: AnyPath) -> str:
    """Return the sha256 hex of some blocks of a file, or of all if it is small."""
    size, sha = _size(file), hashlib.sha256()
    step = max(_BLOCK_BYTES, -(-size // _BLOCKS))
    # The end too, which an interrupted copy lacks.
    begins = [*range(0, size, step), max(0, size - _BLOCK_BYTES)]
    if isinstance(file, BucketPath):

        def block(begin: int) -> bytes:
            return file.read_range(begin, min(begin + _BLOCK_BYTES, size))

        for content in in_threads(block, begins) if size else ():
            sha.update(content)
        return sha.hexdigest()
    with file.open("rb") as stream:
        for begin in begins:
            stream.seek(begin)
            sha.update(stream.read(_BLOCK_BYTES))
    return sha.hexdigest()


def _size(file: AnyPath) -> int:
    return file.size() if isinstance(file, BucketPath) else file.stat().st_size


def _map(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    return np.memmap(file, dtype, "r", shape=(count,))
