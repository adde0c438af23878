"""Documents read in pieces, to tokenize files of any size in bounded memory."""

import codecs
import contextlib
import dataclasses
import gzip
import importlib
import io
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Protocol, cast

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError

READ_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # that some editors write before UTF-8
COMPRESSED = (".gz", ".zst")
_HEAD_BYTES = 1 << 13  # that distinguish text from other files


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
