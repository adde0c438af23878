"""Documents from files of any supported format, folders, globs, or the embedded text.

Files are read in pieces, so that text of any size is tokenized in bounded memory. Records without a
usable text are counted, and named by their position.
"""

import codecs
import contextlib
import dataclasses
import gzip
import importlib
import io
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn, Protocol, TypeVar, cast

from jaxtrain.config.buckets import AnyPath, BucketPath, in_threads
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.data.source import ending_of, file_facts, walk_files

T = TypeVar("T")
SHOWN = 3  # bad records that the rejection names
READ_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # that some editors write before UTF-8
COMPRESSED = (".gz", ".zst")
_HEAD_BYTES = 1 << 13  # that distinguish text from other files


# -- one document, and files read in pieces ------------------------------------------------------


class Document(Protocol):
    """Text that may be too long to be held in memory."""

    def is_blank(self) -> bool:
        """Whether the text has only white space."""
        ...

    def cut_at_line(self, fraction: float) -> int:
        """Return the character to split at: after the first line break after `fraction` of the
        text.

        It is at the fraction itself if no line break follows but a final one.
        """
        ...

    def parts(self, begin: int = 0, end: int | None = None) -> Iterator[str]:
        """Yield the characters from `begin` to `end`, in parts of any size."""
        ...


@dataclasses.dataclass(frozen=True)
class Text:
    """A document in memory."""

    text: str

    def is_blank(self) -> bool:
        """Whether the text has only white space."""
        return not self.text.strip()

    def cut_at_line(self, fraction: float) -> int:
        """Return the character to split at, as in `Document`."""
        return cut_at_line(self.text, fraction)

    def parts(self, begin: int = 0, end: int | None = None) -> Iterator[str]:
        """Yield the characters from `begin` to `end`, as in `Document`."""
        yield self.text[begin:end]


@dataclasses.dataclass(frozen=True)
class TextFile:
    """Document in a UTF-8 file, which is read again each time."""

    path: AnyPath

    def is_blank(self) -> bool:
        """Whether the file has only white space; stops at the first other character."""
        return not any(part.strip() for part in self._parts())

    def cut_at_line(self, fraction: float) -> int:
        """Return the character to split at, as in `Document`; reads the file twice."""
        count = sum(map(len, self._parts()))
        offset, begin = int(count * fraction), 0
        for part in self._parts():
            if begin + len(part) > offset:
                found = part.find("\n", max(offset - begin, 0))
                if found != -1:
                    line_end = begin + found + 1
                    return offset if line_end == count else line_end
            begin += len(part)
        return offset

    def parts(self, begin: int = 0, end: int | None = None) -> Iterator[str]:
        """Yield the characters from `begin` to `end`, as in `Document`."""
        yield from _between(self._parts(), begin, end)

    def _parts(self) -> Iterator[str]:
        decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
        with reading(self.path) as stream:
            while True:
                block = stream.read(READ_BYTES)
                try:
                    yield decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    # Counted from the bytes that the decoder kept of the previous block.
                    at = read + len(block) - len(error.object) + error.start
                    raise not_utf8(self.path, at) from error
                if not block:
                    return
                read += len(block)


@contextlib.contextmanager
def reading(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file of the source, decompressed if it is named .gz or .zst.

    An object of a bucket is read at once.

    Raises:
      UserError: it cannot be read or decompressed.
    """
    with open_stored(path) as stream:
        if path.suffix.lower() not in COMPRESSED:
            yield stream
            return
        kind = "gzip" if path.suffix.lower() == ".gz" else "Zstandard"
        try:
            yield _gzip(stream) if kind == "gzip" else _zstandard(stream, path)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"TextData.source: {path} is not a complete {kind} file ({error}); write it "
                "again, or remove it from the source"
            ) from error


@contextlib.contextmanager
def open_stored(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file of the source as it is stored.

    Raises:
      UserError: it cannot be read.
    """
    try:
        with (
            io.BytesIO(path.read_bytes())
            if isinstance(path, BucketPath)
            else path.open("rb") as stream
        ):
            yield stream
    except PermissionError as error:
        raise UserError(f"TextData.source: {path} cannot be read: permission denied") from error


def begins_with_text(path: AnyPath) -> bool:
    """Whether a file, which may be compressed, begins with UTF-8 text without a NUL."""
    if isinstance(path, BucketPath) and path.suffix.lower() not in COMPRESSED:
        head = path.read_range(0, _HEAD_BYTES)
    else:
        with reading(path) as stream:
            head = stream.read(_HEAD_BYTES)
    try:
        # The last character may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def plain_name(path: AnyPath) -> str:
    """Return a file's name in lower case, without the suffix of its compression."""
    name = path.name.lower()
    return next((name.removesuffix(end) for end in COMPRESSED if name.endswith(end)), name)


def _gzip(stream: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=stream))


def _zstandard(stream: BinaryIO, path: AnyPath) -> BinaryIO:
    """Return a stream of the decompressed contents of a Zstandard file, all frames concatenated."""
    library = arrow("pyarrow", path)
    unpacked = library.CompressedInputStream(library.PythonFile(stream, mode="r"), "zstd")
    return io.BufferedReader(unpacked, READ_BYTES)


def arrow(module: str, path: object, setting: str = "TextData.source") -> Any:
    """Import a module of pyarrow to read this file.

    Raises:
      UserError: it is not installed.
    """
    # Imported here: only the formats that it reads need it, and it takes 0.2 s.
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{setting}: {path} is read by pyarrow, of jaxtrain[formats] ({error}); run: "
            "pip install 'jaxtrain[formats]'"
        ) from error


def not_utf8(path: AnyPath, byte: int) -> UserError:
    """Return the error for a file that is not text from this byte on."""
    return UserError(
        f"TextData.source: {path} is not UTF-8 text (byte {byte}); convert it to UTF-8, for "
        "example with iconv, or remove it from the source"
    )


def cut_at_line(text: str, fraction: float) -> int:
    """Return `Document.cut_at_line` of a text."""
    offset = int(len(text) * fraction)
    line_end = text.find("\n", offset)
    return offset if line_end == -1 or line_end + 1 == len(text) else line_end + 1


def _between(parts: Iterable[str], begin: int, end: int | None) -> Iterator[str]:
    """Yield the characters from `begin` to `end` of concatenated parts."""
    offset = 0
    for part in parts:
        if end is not None and offset >= end:
            return
        yield part[max(begin - offset, 0) : None if end is None else end - offset]
        offset += len(part)


# -- records and files of a source ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """Record without a usable text: its position and the error."""

    message: str


class Records:
    """Records of a whole source, good and bad.

    Args:
      text_field: the field that holds the text.
      allowed: how many bad ones may be left out.
      setting: the setting and its value that an error begins with; None: TextData.text_field.
      ways: what the message offers besides repairing them.
    """

    def __init__(
        self,
        text_field: str,
        allowed: int = 0,
        *,
        setting: str | None = None,
        ways: str = "name another field, or set TextData.bad_records",
    ) -> None:
        self.text_field = text_field
        self._allowed, self._ways = allowed, ways
        self._setting = setting or f"TextData.text_field = {text_field!r}"
        self._good, self._bad, self._first = 0, 0, list[str]()

    def texts(self, records: Iterable[T | BadRecord]) -> Iterator[T]:
        """Yield the texts, or other values, among these records; bad records are counted."""
        for record in records:
            if isinstance(record, BadRecord):
                self._bad += 1
                if len(self._first) < SHOWN:
                    self._first.append(record.message)
            else:
                self._good += 1
                yield record

    def reject(self) -> None:
        """Raise UserError if too many records are bad, with their number and the names of the
        first.
        """
        if self._bad <= self._allowed:
            return
        raise UserError(
            f"{self._setting}: {self._bad:,} of {self._good + self._bad:,} records cannot be used: "
            f"{self._name()}; fix or remove them, {self._ways} = {self._bad} to leave them out"
        )

    def facts(self) -> dict[str, int | str]:
        """Return the number of bad records left out, and the first of them."""
        return {"bad_records": self._bad, "first_bad_records": self._name()} if self._bad else {}

    def _name(self) -> str:
        more = self._bad - len(self._first)
        return "; ".join(self._first) + (f"; and {more:,} more" if more else "")


def reject_empty(path: object) -> NoReturn:
    """Raise UserError for an empty file of records, such as a failed copy leaves."""
    raise UserError(
        f"TextData.source: {path} is empty, without any record; write it again, or remove it from "
        "the source"
    )


def check_field(path: object, text_field: str, fields: Iterable[str]) -> None:
    """Raise UserError if a file whose records all have these fields lacks this one."""
    fields = list(fields)
    if text_field not in fields:
        raise UserError(
            f"TextData.text_field = {text_field!r}: {path} has no such column"
            f"{did_you_mean(text_field, fields)}"
        )


Reader = Callable[[AnyPath, str], Iterator[str | BadRecord]]


def _in_module(name: str) -> Reader:
    """Return the `read` function of a module of `formats`, imported for the first file of its
    format.
    """

    def read(path: AnyPath, text_field: str) -> Iterator[str | BadRecord]:
        module = importlib.import_module(f"jaxtrain.data.text.formats.{name}")
        return module.read(path, text_field)

    return read


# Formats whose records are documents, by suffixes that .gz or .zst may follow, and by those
# of files that are compressed inside.
_LINES: dict[str, Reader] = {
    ".jsonl": _in_module("json_lines"),
    ".ndjson": _in_module("json_lines"),
    ".csv": _in_module("csv_lines"),
    ".tsv": _in_module("csv_lines"),
}
_PACKED: dict[str, Reader] = {
    ".parquet": _in_module("columnar"),
    ".arrow": _in_module("columnar"),
    ".array_record": _in_module("array_records"),
    ".arrayrecord": _in_module("array_records"),
}
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")  # after the suffix, as TFDS and others write it

# Other suffixes that a folder source reads; anything else in the folder is skipped, with a warning.
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".bash", ".c", ".cc", ".cfg", ".cpp", ".css", ".cu", ".go", ".h", ".hpp", ".html",
    ".ini", ".ipynb", ".java", ".jl", ".js", ".json", ".lua", ".md", ".org", ".php",
    ".pl", ".py", ".r", ".rb", ".rs", ".rst", ".scala", ".sh", ".sql", ".swift", ".tex", ".text",
    ".toml", ".ts", ".txt", ".xml", ".yaml", ".yml",
))
# fmt: on

# Tests are repetitive, and installed packages are not Python's.
EMBEDDED_EXCLUDED_FOLDERS = frozenset(
    ("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests")
)


@dataclasses.dataclass(frozen=True)
class Files:
    """Text files of a source.

    Attributes:
      paths: files that are read, in the order of their documents.
      left_out: number of other files, by suffix; 0 for a source that is one file.
    """

    paths: list[AnyPath]
    left_out: Mapping[str, int]

    def facts(self) -> dict[str, int | str]:
        """Return the number of files left out of a folder and their suffixes, most common first."""
        return file_facts(len(self.paths), self.left_out)

    def size(self) -> int | None:
        """Return the stored size of all files in bytes; None if some are in a bucket."""
        if any(isinstance(path, BucketPath) for path in self.paths):
            return None
        return sum(path.stat().st_size for path in self.paths if isinstance(path, Path))

    def documents(self, records: Records) -> Iterator[Document]:
        """Yield one document per file, or per record of record files; blank ones too.

        Raises:
          UserError: a file cannot be read, or too many records are bad.
        """
        for path in self.paths:
            reader = reader_of(path)
            if reader is None:
                yield TextFile(path)
            else:
                yield from map(Text, records.texts(reader(path, records.text_field)))
        records.reject()

    def texts(self, records: Records) -> Iterator[str]:
        """Yield the documents as texts; objects of a bucket are read concurrently."""
        if any(isinstance(path, BucketPath) for path in self.paths):
            for found in in_threads(lambda path: _read(path, records.text_field), self.paths):
                yield from records.texts(found)
            records.reject()
            return
        for document in self.documents(records):
            yield "".join(document.parts())


def reader_of(path: AnyPath) -> Reader | None:
    """Return the reader for a file of records, by its name; None for plain text, which is one
    document.
    """
    name = _SHARD.sub("", path.name.lower())
    for ending, reader in _PACKED.items():
        if name.endswith(ending):
            return reader
    name = plain_name(path)
    return next((reader for ending, reader in _LINES.items() if name.endswith(ending)), None)


def is_packed(path: AnyPath) -> bool:
    """Whether a file is compressed, as a whole or inside, and may have more characters than
    bytes."""
    name = _SHARD.sub("", path.name.lower())
    return name.endswith((*COMPRESSED, *_PACKED))


def files_of(source: AnyPath, split: str, setting: str) -> Files:
    """Return the file itself, or all text files under a folder, sorted by path.

    A file is text by its suffix: one of TEXT_SUFFIXES or of a record format. One without a
    suffix is text if it begins with UTF-8 text.

    Args:
      source: a file or a folder.
      split: the split of a folder that `datasets` saved.
      setting: the binding that names the split.

    Raises:
      UserError: a link leads out of the folder (see `walk_files`), or it has no such split.
    """
    if not source.is_dir():
        return Files([source], {})
    # Imported here: only folders can be saved by `datasets`.
    from jaxtrain.data.text.formats import saved_datasets

    if saved_datasets.is_saved(source):
        return Files(saved_datasets.arrow_files(source, split, setting), {})
    paths, left_out = [], Counter[str]()
    for path, *_ in walk_files(source, "TextData.source"):
        ending = PurePosixPath(plain_name(path)).suffix
        is_text = ending in TEXT_SUFFIXES if ending else begins_with_text(path)
        if is_text or reader_of(path) is not None:
            paths.append(path)
        else:
            left_out[ending_of(path.name) + (" and not UTF-8 text" if not ending else "")] += 1
    return Files(paths, left_out)


def read_embedded() -> Iterator[str]:
    """Yield the source of Python's standard library, one document per file, then its language
    reference.

    Raises:
      UserError: this Python has no sources.
    """
    # Imported here: a string of 700 kB.
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        # Skipped with all they hold: site-packages can have a hundred times as many files.
        folders[:] = set(folders) - EMBEDDED_EXCLUDED_FOLDERS
        files = (Path(folder, name) for name in names if name.endswith(".py"))
        paths += [path for path in files if _is_embedded(path.relative_to(root))]
    if not paths:
        raise UserError(
            f"TextData.source = 'embedded': this Python has no .py files in {root}; "
            "set TextData.source to a text file or folder"
        )
    for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
        yield "".join(TextFile(path).parts())
    for name in sorted(topics):
        yield topics[name]


def _is_embedded(relative: Path) -> bool:
    # _sysconfigdata holds this machine's paths; topics.py is read as text, below.
    own = relative.name.startswith("_sysconfigdata") or relative.name == "sitecustomize.py"
    configuration = relative.parts[0].startswith("config-")
    return not (own or configuration or relative.parts[0] == "pydoc_data")


def _read(path: AnyPath, text_field: str) -> list[str | BadRecord]:
    reader = reader_of(path)
    if reader is not None:
        return list(reader(path, text_field))
    return ["".join(TextFile(path).parts())]
