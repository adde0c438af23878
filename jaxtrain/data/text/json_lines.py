"""JSON lines as documents: each record's text; lines that are no such record, by their place."""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.data.text.pieces import reading

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")

_MARK = b"\xef\xbb\xbf"  # that some editors begin UTF-8 with
SHOWN = 3  # bad records that the refusal names


def is_named(path: Place) -> bool:
    """Whether a file is JSON lines by its name."""
    return path.name.lower().endswith(SUFFIXES)


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that is no record with the wanted field: its place and what is wrong with it."""

    told: str


def read(path: Place, text_field: str) -> Iterator[str | BadLine]:
    """The text of every record of a file, one after the other; empty lines are passed over.

    Args:
      path: a file of SUFFIXES.
      text_field: the name whose value is a record's text.

    Raises:
      UserError: the file cannot be read, or is no gzip file although it is named so.
    """
    # A binary file's lines end at a line feed alone: U+2028 may stand inside a JSON string.
    for number, line in enumerate(_lines(path), start=1):
        line = (line.removeprefix(_MARK) if number == 1 else line).removesuffix(b"\n")
        if not line.strip():
            continue
        try:
            yield _text(line, text_field)
        except _BadLineError as error:
            yield BadLine(f"{path}:{number}: {error}")


class Bad:
    """The records of a whole source that cannot be used.

    Args:
      text_field: the field that was wanted.
    """

    def __init__(self, text_field: str) -> None:
        self._text_field = text_field
        self._good, self._bad = 0, list[str]()

    def passed_over(self, records: Iterable[str | BadLine]) -> Iterator[str]:
        """The texts among these records; the others are counted."""
        for record in records:
            if isinstance(record, BadLine):
                self._bad.append(record.told)
            else:
                self._good += 1
                yield record

    def refuse(self) -> None:
        """Raises UserError where there is one, with the number of all and the first by name."""
        if not self._bad:
            return
        total = self._good + len(self._bad)
        first, more = self._bad[:SHOWN], len(self._bad) - SHOWN
        shown = "; ".join(first) + (f"; and {more:,} more" if more > 0 else "")
        raise UserError(
            f"TextData.text_field = {self._text_field!r}: {len(self._bad):,} of {total:,} JSON "
            f"lines cannot be used: {shown}; mend or remove these lines, or name another field"
        )


class _BadLineError(ValueError):
    """What is wrong with a line."""


def _text(line: bytes, text_field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLineError(f"no UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise _BadLineError(f"no JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # numbers and depths past Python's limits
        raise _BadLineError(f"no JSON that can be read ({error})") from error
    if not isinstance(record, dict):
        raise _BadLineError(f"{_kind(record)}, where a record in braces is wanted")
    if text_field not in record:
        raise _BadLineError(f"no field {text_field!r}{did_you_mean(text_field, record)}")
    value = record[text_field]
    if not isinstance(value, str):
        raise _BadLineError(f"{text_field!r} is {_kind(value)}, where a string is wanted")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _BadLineError(f"{text_field!r} holds half of a surrogate pair") from error
    return value


def _kind(value: Any) -> str:
    """What JSON calls a value of this kind."""
    match value:
        case bool():
            return "true or false"
        case None:
            return "null"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "a record"


def _lines(path: Place) -> Iterator[bytes]:
    with reading(path) as stream:
        if not path.name.lower().endswith(".gz"):
            yield from stream
            return
        try:
            yield from gzip.GzipFile(fileobj=stream)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"TextData.source: {path} is no whole gzip file ({error}); make it again, or "
                "remove it from the source"
            ) from error
