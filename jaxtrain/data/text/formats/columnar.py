"""Parquet and Arrow files through pyarrow: one document or record per row.

CSV and JSON lines are read by Python's csv and json, which need no extra. pyarrow's readers of both
do not say where a bad row is, and the one of JSON ends at the first record that is no text, where
`TextData.bad_records` names and skips it (`test_what_the_readers_of_pyarrow_lack`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.data.text.documents import BadRecord, arrow, check_field, open_stored
from jaxtrain.data.text.formats.json_lines import BadLineError

T = TypeVar("T")

_ROWS = 256  # of Parquet, per read
_ARROW_FILE = (
    b"ARROW1"  # start of the file format; the stream format, of `datasets`, has no such magic
)


def is_columnar(path: AnyPath) -> bool:
    """Whether a file is Parquet or Arrow, by its name."""
    return path.name.lower().endswith((".parquet", ".arrow"))


def read(path: AnyPath, text_field: str) -> Iterator[str | BadRecord]:
    """Yield the text of each row, in parts; only that column of a Parquet file is read.

    Raises:
      UserError: the file cannot be read, is cut short, or has no such column of strings.
    """
    row = 0
    for batch in _batches(path, text_field):
        for value in batch.column(text_field):
            row += 1
            yield _text(value, f"{path}: row {row:,}", text_field)


def read_taken(path: AnyPath, take: Callable[[dict[str, Any]], T]) -> Iterator[T | BadRecord]:
    """Yield `take(record)` of each row, a record without nulls.

    A column has all fields that any row has, so absent fields are nulls. Where `take` raises
    `BadLineError`, the record is bad.

    Raises:
      UserError: the file cannot be read or is cut short.
    """
    row = 0
    for batch in _batches(path, None):
        for number in range(batch.num_rows):
            row += 1
            try:
                record = {name: batch.column(name)[number].as_py() for name in batch.schema.names}
                yield take(_without_nulls(record))
            except UnicodeDecodeError:
                yield BadRecord(f"{path}: row {row:,}: no UTF-8 text")
            except BadLineError as error:
                yield BadRecord(f"{path}: row {row:,}: {error}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _batches(path: AnyPath, text_field: str | None) -> Iterator[Any]:
    """Yield batches of rows; with a text field, at least that column, which is checked."""
    is_parquet = path.name.lower().endswith(".parquet")
    kind, parts = ("Parquet", _of_parquet) if is_parquet else ("Arrow", _of_arrow)
    with open_stored(path) as stream:
        with _load(path, kind):
            schema, batches = parts(path, stream, None if text_field is None else [text_field])
        if text_field is not None:
            check_field(path, text_field, schema.names)
            _check_strings(path, text_field, schema.field(text_field).type)
        while True:
            with _load(path, kind):
                batch = next(batches, None)
                if batch is not None and not is_parquet:
                    # Its offsets come from the file: pyarrow crashes the process at a wrong one.
                    batch.validate(full=True)
            if batch is None:
                return
            yield batch


def _of_parquet(
    path: AnyPath, stream: BinaryIO, columns: list[str] | None
) -> tuple[Any, Iterator[Any]]:
    file = arrow("pyarrow.parquet", path).ParquetFile(stream)
    return file.schema_arrow, file.iter_batches(_ROWS, columns=columns)


def _of_arrow(
    path: AnyPath, stream: BinaryIO, columns: list[str] | None
) -> tuple[Any, Iterator[Any]]:
    del columns  # all of them are mapped
    ipc = arrow("pyarrow.ipc", path)
    is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
    stream.seek(0)
    if not is_file:
        reader = ipc.open_stream(stream)
        return reader.schema, iter(reader)
    file = ipc.open_file(stream)
    return file.schema, map(file.get_batch, range(file.num_record_batches))


def _text(value: Any, where: str, text_field: str) -> str | BadRecord:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return BadRecord(f"{where}: {text_field!r} is not UTF-8 text")
    return BadRecord(f"{where}: {text_field!r} is null") if text is None else text


@contextlib.contextmanager
def _load(path: AnyPath, kind: str) -> Iterator[None]:
    # ArrowInvalid is a ValueError, ArrowNotImplementedError a NotImplementedError.
    try:
        yield
    except (ValueError, OSError, NotImplementedError, MemoryError) as error:
        # A damaged length requests more memory than there is.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"TextData.source: {path} is not a complete {kind} file ({reason}); write it again, "
            "or remove it from the source"
        ) from error


def _check_strings(path: AnyPath, text_field: str, kind: Any) -> None:
    types = arrow("pyarrow.types", path)
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value)):
        raise UserError(
            f"TextData.text_field = {text_field!r}: in {path} it holds {kind}, but it must hold "
            "strings; name another field"
        )
