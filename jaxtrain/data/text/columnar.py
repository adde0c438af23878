"""Parquet and Arrow files as documents: the column of that name, a document a row, by pyarrow."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.data.text.pieces import opened
from jaxtrain.data.text.records import BadRecord, arrow, check_field

_ROWS = 256  # of Parquet, read at a time
_ARROW_FILE = (
    b"ARROW1"  # begins the file format; the stream format, of `datasets`, has no such mark
)


def read_parquet(path: Place, text_field: str) -> Iterator[str | BadRecord]:
    """The text of every row of a Parquet file, of which the one column is read, in parts.

    Raises:
      UserError: it cannot be read, is cut short, or has no such column of strings.
    """
    parquet = arrow("pyarrow.parquet", path)

    def parts(stream: BinaryIO) -> tuple[Any, Iterator[Any]]:
        file = parquet.ParquetFile(stream)
        return file.schema_arrow, file.iter_batches(_ROWS, columns=[text_field])

    return _read(path, text_field, parts, "Parquet")


def read_arrow(path: Place, text_field: str) -> Iterator[str | BadRecord]:
    """The text of every row of an Arrow file in IPC's stream or file format.

    Raises:
      UserError: as `read_parquet`.
    """
    ipc = arrow("pyarrow.ipc", path)

    def parts(stream: BinaryIO) -> tuple[Any, Iterator[Any]]:
        is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
        stream.seek(0)
        if not is_file:
            reader = ipc.open_stream(stream)
            return reader.schema, iter(reader)
        file = ipc.open_file(stream)
        return file.schema, map(file.get_batch, range(file.num_record_batches))

    return _read(path, text_field, parts, "Arrow")


def _read(
    path: Place,
    text_field: str,
    parts: Callable[[BinaryIO], tuple[Any, Iterator[Any]]],
    kind: str,
) -> Iterator[str | BadRecord]:
    row = 0
    with opened(path) as stream:
        with _whole(path, kind):
            schema, batches = parts(stream)
        check_field(path, text_field, schema.names)
        _check_strings(path, text_field, schema.field(text_field).type)
        while True:
            with _whole(path, kind):
                batch = next(batches, None)
            if batch is None:
                return
            for value in batch.column(text_field):
                row += 1
                yield _text(value, f"{path}: row {row:,}", text_field)


def _text(value: Any, place: str, text_field: str) -> str | BadRecord:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return BadRecord(f"{place}: {text_field!r} is not UTF-8 text")
    return BadRecord(f"{place}: {text_field!r} is null") if text is None else text


@contextlib.contextmanager
def _whole(path: Place, kind: str) -> Iterator[None]:
    # ArrowInvalid is a ValueError, ArrowNotImplementedError a NotImplementedError.
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise UserError(
            f"TextData.source: {path} is no whole {kind} file ({said}); make it again, or remove "
            "it from the source"
        ) from error


def _check_strings(path: Place, text_field: str, kind: Any) -> None:
    types = arrow("pyarrow.types", path)
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value)):
        raise UserError(
            f"TextData.text_field = {text_field!r}: in {path} it holds {kind}, where strings are "
            "wanted; name another field"
        )
