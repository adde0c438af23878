"""JSON lines: the field of each record that is used, and bad lines by position."""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import did_you_mean
from jaxtrain.config.untrusted import MalformedError, parse_json
from jaxtrain.data.text.documents import BYTE_ORDER_MARK, BadRecord, reading, reject_empty

T = TypeVar("T")


def read(path: AnyPath, text_field: str) -> Iterator[str | BadRecord]:
    """Yield the text of each record of a file, in order; empty lines are skipped.

    Args:
      path: the file, perhaps compressed.
      text_field: the name whose value is a record's text.

    Raises:
      UserError: the file cannot be read or decompressed, or is empty.
    """
    return read_taken(path, lambda record: _text(record, text_field))


def read_taken(path: AnyPath, take: Callable[[dict[str, Any]], T]) -> Iterator[T | BadRecord]:
    """Yield `take(record)` of each record of a file.

    Where it raises `BadLineError`, the record is bad.
    """
    # A binary file's lines end at a line feed alone: U+2028 may occur inside a JSON string.
    with reading(path) as lines:
        number = 0
        for number, line in enumerate(lines, start=1):
            line = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).removesuffix(b"\n")
            if not line.strip():
                continue
            try:
                yield take(_record(line))
            except BadLineError as error:
                yield BadRecord(f"{path}:{number}: {error}")
        if not number:
            reject_empty(path)


class BadLineError(ValueError):
    """Error in a line of JSON."""


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLineError(f"no UTF-8 text (byte {error.start})") from error
    except MalformedError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            cause = error.__cause__
            raise BadLineError(f"no JSON ({cause.msg}, column {cause.colno})") from error
        raise BadLineError(f"JSON that cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise BadLineError(f"{kind(record)}, but it must be a JSON object")
    return record


def _text(record: dict[str, Any], text_field: str) -> str:
    if text_field not in record:
        raise BadLineError(f"no field {text_field!r}{did_you_mean(text_field, record)}")
    return string(text_field, record[text_field])


def string(name: str, value: Any) -> str:
    """Return the value if it is text, else raise BadLineError with this name."""
    if not isinstance(value, str):
        raise BadLineError(f"{name!r} is {kind(value)}, but it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadLineError(f"{name!r} holds an unpaired surrogate") from error
    return value


def kind(value: Any) -> str:
    """Return the name of a value's JSON type, for messages."""
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
