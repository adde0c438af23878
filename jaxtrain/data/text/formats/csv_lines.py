"""CSV and TSV files as documents: one column, one document per row."""

import csv
import sys
from collections.abc import Iterator

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.data.text.documents import (
    BYTE_ORDER_MARK,
    BadRecord,
    check_field,
    plain_name,
    reading,
    reject_empty,
)


def read(path: AnyPath, text_field: str) -> Iterator[str | BadRecord]:
    """Yield the text of each row of a file (RFC 4180; tabs in a .tsv); empty lines are skipped.

    Raises:
      UserError: the file cannot be read, is empty, has no such column, or unterminated quotes.
    """
    csv.field_size_limit(
        sys.maxsize
    )  # of all readers; Python's default of 128 kB is too little for documents
    delimiter = "\t" if plain_name(path).endswith(".tsv") else ","
    with reading(path) as stream:
        # An invalid UTF-8 byte passes as half of a surrogate pair, and is reported with its row.
        lines = (
            (line.removeprefix(BYTE_ORDER_MARK) if not number else line).decode(
                "utf-8", errors="surrogateescape"
            )
            for number, line in enumerate(stream)
        )
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                reject_empty(path)
            check_field(path, text_field, header)
            column, begin = header.index(text_field), rows.line_num + 1
            for row in rows:
                if row:
                    yield _text(row, column, header, f"{path}:{begin}")
                begin = rows.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"TextData.source: {path} is not a complete CSV file (line {rows.line_num}: "
                f"{error}); fix it, or remove it from the source"
            ) from error


def _text(row: list[str], column: int, header: list[str], where: str) -> str | BadRecord:
    if len(row) != len(header):
        return BadRecord(f"{where}: {len(row)} fields, where the first line names {len(header)}")
    try:
        row[column].encode()
    except UnicodeEncodeError:
        return BadRecord(f"{where}: {header[column]!r} is not UTF-8 text")
    return row[column]
