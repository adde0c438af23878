"""JSON lines as documents: each record's text; lines that are no such record, by their place."""

import json
from collections.abc import Iterator
from typing import Any

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import did_you_mean
from jaxtrain.data.text.pieces import BYTE_ORDER_MARK, reading
from jaxtrain.data.text.records import BadRecord


def read(path: Place, text_field: str) -> Iterator[str | BadRecord]:
    """The text of every record of a file, one after the other; empty lines are passed over.

    Args:
      path: the file, perhaps compressed.
      text_field: the name whose value is a record's text.

    Raises:
      UserError: the file cannot be read, or not unpacked.
    """
    # A binary file's lines end at a line feed alone: U+2028 may stand inside a JSON string.
    with reading(path) as lines:
        for number, line in enumerate(lines, start=1):
            line = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).removesuffix(b"\n")
            if not line.strip():
                continue
            try:
                yield _text(line, text_field)
            except _BadLineError as error:
                yield BadRecord(f"{path}:{number}: {error}")


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
