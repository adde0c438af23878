"""Files of text pairs: JSON lines, Parquet, Arrow, and tables with a header."""

import csv
import sys
from collections.abc import Iterator
from typing import Any

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.untrusted import parse_json
from jaxtrain.data.text.documents import BYTE_ORDER_MARK, BadRecord, plain_name, reading
from jaxtrain.data.text.formats import columnar
from jaxtrain.data.text.formats.json_lines import BadLineError, string

ENDINGS = (".jsonl", ".json", ".tsv", ".csv", ".parquet", ".arrow")
Texts = tuple[str, str]
Answered = tuple[str, tuple[str, ...]]  # a source, and its correct targets


def read(path: AnyPath, setting: str, source_field: str, target_field: str) -> Iterator[Texts]:
    """Yield the pairs of a file in order, as `read_answered` reads them.

    Raises:
      UserError: as there, or a record has a list of targets.
    """
    for source, targets in read_answered(path, setting, source_field, target_field):
        if len(targets) != 1:
            raise UserError(
                f"{setting} = {str(path)!r}: {target_field!r} is a list of {len(targets)} texts; "
                "give each text one"
            )
        yield source, targets[0]


def read_answered(
    path: AnyPath, setting: str, source_field: str, target_field: str
) -> Iterator[Answered]:
    """Yield the sources of a file, each with its targets; empty lines are skipped.

    Args:
      path: the file, perhaps compressed (.gz, .zst).
      setting: the setting that names the file, for messages.
      source_field, target_field: the names of a record's, or of a column's, texts; a record's
        target is a text, or a nonempty list of texts.

    Raises:
      UserError: it has another suffix, cannot be read, or a record of it has no such texts.
    """
    origin, name = f"{setting} = {str(path)!r}", plain_name(path)
    if not name.endswith(ENDINGS):
        raise UserError(f"{origin}: it takes a file that ends in {', '.join(ENDINGS)}")
    if columnar.is_columnar(path):
        fields = source_field, target_field
        for found in columnar.read_taken(path, lambda record: _of_record(record, fields)):
            if isinstance(found, BadRecord):
                raise UserError(f"{setting}: {found.message}")
            yield found
        return
    with reading(path) as stream:
        # A binary file's lines end at a line feed alone: U+2028 may occur inside a text.
        lines = (
            line.removeprefix(BYTE_ORDER_MARK) if not number else line
            for number, line in enumerate(stream)
        )
        if name.endswith((".tsv", ".csv")):
            delimiter = "\t" if name.endswith(".tsv") else ","
            yield from _of_table(lines, delimiter, (source_field, target_field), origin)
        else:
            for where, record in records(lines, origin):
                answer = field(record, target_field, where)
                if isinstance(answer, list) and not answer:
                    raise UserError(f"{where}: {target_field!r} is an empty list; give a text")
                several = answer if isinstance(answer, list) else [answer]
                source = _string(field(record, source_field, where), source_field, where)
                yield source, tuple(_string(one, target_field, where) for one in several)


def _of_record(record: dict[str, Any], fields: Texts) -> Answered:
    for field in fields:
        if field not in record:
            raise BadLineError(f"no field {field!r}{did_you_mean(field, record)}")
    source, target = (record[field] for field in fields)
    if target == []:
        raise BadLineError(f"{fields[1]!r} is an empty list")
    several = target if isinstance(target, list) else [target]
    return string(fields[0], source), tuple(string(fields[1], one) for one in several)


def records(lines: Iterator[bytes], origin: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of JSON lines, each with its position for messages.

    Raises:
      UserError: a line is not a record.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode("utf-8"))
        except ValueError as error:  # covers text that is not UTF-8
            raise UserError(f"{origin}: line {number} is not UTF-8 JSON ({error})") from error
        if not isinstance(record, dict):
            raise UserError(f"{origin}: line {number} is not a JSON object")
        yield f"{origin}: line {number}", record


def field(record: dict[str, Any], name: str, where: str) -> Any:
    """Return the value of a record's field; UserError if the field is missing."""
    if name not in record:
        raise UserError(f"{where} has no field {name!r}{did_you_mean(name, record)}")
    return record[name]


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name!r} is not a string")
    return text_of(value, f"{where}: {name!r}")


def text_of(text: str, origin: str) -> str:
    """Return the text; UserError if it has an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{origin} is not UTF-8 text") from error
    return text


def _of_table(
    lines: Iterator[bytes], delimiter: str, fields: Texts, origin: str
) -> Iterator[Answered]:
    csv.field_size_limit(
        sys.maxsize
    )  # of all readers; Python's default of 128 kB is too little for texts
    # An invalid UTF-8 byte passes as half of a surrogate pair, and is reported with its row.
    decoded = (line.decode("utf-8", errors="surrogateescape") for line in lines)
    rows = csv.reader(decoded, delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        for field in fields:
            if field not in header:
                raise UserError(f"{origin} has no column {field!r}{did_you_mean(field, header)}")
        columns = [header.index(field) for field in fields]
        for row in rows:
            if not row:
                continue
            where = f"{origin}: line {rows.line_num}"
            if len(row) != len(header):
                raise UserError(f"{where} has {len(row)} fields, the line of names {len(header)}")
            source, target = (text_of(row[column], where) for column in columns)
            yield source, (target,)
    except csv.Error as error:
        raise UserError(
            f"{origin} is not a complete table (line {rows.line_num}: {error})"
        ) from error
