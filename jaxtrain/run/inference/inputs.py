"""Inputs of `predict` and of commands: texts, feature vectors, JSON lines with errors by line.

Letter: T length.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.buckets import to_path
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import path_errors
from jaxtrain.config.untrusted import parse_json, read_bounded
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import existing_path
from jaxtrain.data.vectors.source import read_vectors
from jaxtrain.models.model import Model, VectorModel
from jaxtrain.run.generation.answer import printable

_MAX_BYTES = 1 << 28  # of a whole file, which is read into memory


@dataclasses.dataclass(frozen=True)
class Record:
    """One line.

    Attributes:
      where: the argument, the file and the line number, for messages.
      fields: the names in its braces.
    """

    where: str
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        """Return the string of this name; UserError if there is none."""
        value = self.value(name)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {name!r} is {value!r}; use a string")
        return value

    def value(self, name: str) -> Any:
        """Return the value of a field; UserError if it is missing."""
        if name not in self.fields:
            raise UserError(f"{self.where}: no field {name!r}{did_you_mean(name, self.fields)}")
        return self.fields[name]


def read_records(argument: str, path: str) -> list[Record]:
    """Return the records of a file, empty lines left out.

    Args:
      argument: its option, for messages.
      path: the file, on a disk or in a bucket.

    Raises:
      UserError: the file cannot be read, is empty, or has an invalid line.
    """
    file = to_path(path)
    with path_errors(f"{argument} {path}", needs="name a file of JSON lines that can be read"):
        content = read_bounded(file, named=f"{argument} {path}", limit=_MAX_BYTES)
    found = []
    # Not splitlines: U+2028 may occur inside a JSON string.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{argument} {path}:{number}"
        try:
            fields = parse_json(line.decode())
        except ValueError as error:
            raise UserError(f"{where}: no JSON ({error}); use one record a line") from error
        if not isinstance(fields, dict):
            raise UserError(f"{where}: not a JSON object; use one such as {{...}} a line")
        found.append(Record(where, fields))
    if not found:
        raise UserError(f"{argument} {path}: it is empty; give at least one record")
    return found


AT_ONCE = 64  # batch size of inference


@dataclasses.dataclass(frozen=True)
class GeneratedText:
    """The text that a model generates from one text.

    Attributes:
      name: the text itself, or its file.
      text: its likeliest continuation, or its target.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{printable(self.name)}: {printable(self.text)}"


def row_of(ids: Sequence[int], length: int) -> Batch:
    """Return a text [T] with padding, and no targets."""
    position_T, zeros_T = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
    return Batch(
        np.pad(np.array(ids, np.int32), (0, length - len(ids))),
        zeros_T,
        np.zeros(length, np.float32),
        (position_T < len(ids)).astype(np.int32),
        position_T,
    )


def texts_of(given: Sequence[Any], model: Model) -> Iterator[str]:
    """Yield the texts themselves, or those in files.

    Raises:
      UserError: one of them is empty, not text, or a missing file.
    """
    for source in given:
        if not isinstance(source, str | Path):
            raise UserError(f"predict: {type(model).__name__} reads texts; give strings")
        text = _text(source).strip()
        if not text:
            raise UserError("predict: a text is empty; give at least one character")
        yield text


def _text(source: str | Path) -> str:
    """Return a file's text, or the text itself; a single word that ends in .txt names a file."""
    name = str(source)
    names_file = name.endswith(".txt") and (len(name.split()) == 1 or os.path.isfile(name))
    if not names_file and isinstance(source, str):
        return source
    named = f"predict INPUT {name!r}"
    with path_errors(named, needs="name a file that is there, or give a text"):
        content = Path(source).read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{named} is not UTF-8 text (byte {error.start})") from error


def vectors_of(given: Sequence[Any], model: VectorModel) -> tuple[list[str], np.ndarray]:
    """Return each vector's name, and all vectors [N, D], unscaled.

    Args:
      given: .npz or .csv files, or arrays [D] or [n, D]; at least one.
      model: the model's settings.

    Raises:
      UserError: one of them is neither, cannot be read, or has another number of features.
    """
    called, tables, arrays = list[str](), list[np.ndarray](), 0
    for source in given:
        if isinstance(source, np.ndarray):
            name, table, first = "vector", np.atleast_2d(source), arrays
            arrays += len(table)
        elif isinstance(source, str) or hasattr(source, "__fspath__"):
            path = existing_path("predict INPUT", str(source))
            name, first = str(path), 0
            table = read_vectors(path, f"predict INPUT = {str(path)!r}")
        else:
            raise UserError(f"predict: {type(model).__name__} reads vectors, not images")
        if table.shape[1] != model.features:
            raise UserError(
                f"predict: {name} has vectors of {table.shape[1]} numbers; "
                f"{type(model).__name__} reads {model.features}"
            )
        called += [f"{name} {first + number}" for number in range(1, len(table) + 1)]
        tables.append(table)
    return called, np.concatenate(tables)
