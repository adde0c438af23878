"""ArrayRecord files of tf.train.Example as documents.

An Example is a protocol buffer: field 1 holds features, each an entry of field 1 with its name in
field 1 and its value in field 2; of a value field 1 is a list of bytes, 2 of floats, 3 of integers
(https://www.tensorflow.org/api_docs/python/tf/train/Example). No TensorFlow is needed to read it.
"""

from collections.abc import Iterator
from pathlib import Path

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.data.text.records import BadRecord

_AT_ONCE = 256  # records
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def read(path: Place, text_field: str) -> Iterator[str | BadRecord]:
    """Yield the text of each record of a file, in order.

    Raises:
      UserError: the file is in a bucket, is no ArrayRecord file, or is damaged.
    """
    if not isinstance(path, Path):
        raise UserError(
            f"TextData.source: {path}: ArrayRecord files are read from a disk; copy it to one"
        )
    # Imported here: few sources need it.
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        # A file that was cut opens without an error, as one of no records.
        if not reader.ok():
            raise RuntimeError("its end is missing or damaged")
        count = reader.num_records()
        for begin in range(0, count, _AT_ONCE):
            end = min(begin + _AT_ONCE, count)
            for number, record in enumerate(reader.read(begin, end), begin + 1):
                yield _text(record, f"{path}: record {number:,}", text_field)
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(
            f"TextData.source: {path} is no whole ArrayRecord file ({str(error).splitlines()[0]}); "
            "make it again, or remove it from the source"
        ) from error


def _text(record: bytes, place: str, text_field: str) -> str | BadRecord:
    try:
        features = dict(_entry(entry) for entry in _fields(_only(record, 1), 1))
        if text_field not in features:
            hint = did_you_mean(text_field, features)
            return BadRecord(f"{place}: no feature {text_field!r}{hint}")
        values = _fields(_only(features[text_field], 1), 1)
    except (ValueError, IndexError) as error:
        return BadRecord(f"{place}: no tf.train.Example ({error})")
    if len(values) != 1:
        return BadRecord(f"{place}: {text_field!r} is no single text, but {len(values)} of them")
    try:
        return values[0].decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(f"{place}: {text_field!r} is not UTF-8 text (byte {error.start})")


def _entry(entry: bytes) -> tuple[str, bytes]:
    return _only(entry, 1).decode("utf-8"), _only(entry, 2)


def _only(message: bytes, number: int) -> bytes:
    """Return the bytes of the field of that number, which is present once or, being
    empty, absent.
    """
    found = _fields(message, number)
    return b"".join(found)


def _fields(message: bytes, number: int) -> list[bytes]:
    """Return the contents of all fields with that number that hold bytes; others are skipped."""
    found, at = list[bytes](), 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if size is None:
            if kind != _BYTES:
                raise ValueError(f"wire type {kind} at byte {at}")
            size, at = _varint(message, at)
        if at + size > len(message):
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(message)}")
        if kind == _BYTES and tag >> 3 == number:
            found.append(message[at : at + size])
        at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at a byte offset (7 bits a byte, lowest first); also return its end."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
