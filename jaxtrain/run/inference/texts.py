"""Text input and output of `predict`.

Letter: T length.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors
from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Model
from jaxtrain.run.generation.answer import printable

AT_ONCE = 64  # examples that go through the model together


@dataclasses.dataclass(frozen=True)
class Written:
    """What a model writes of one text.

    Attributes:
      name: the text itself, or the file that holds it.
      text: the likeliest that follows, or its target.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{printable(self.name)}: {printable(self.text)}"


def row_of(ids: Sequence[int], length: int) -> Batch:
    """Return a text [T] with padding, and no targets."""
    place_T, zeros_T = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
    return Batch(
        np.pad(np.array(ids, np.int32), (0, length - len(ids))),
        zeros_T,
        np.zeros(length, np.float32),
        (place_T < len(ids)).astype(np.int32),
        place_T,
    )


def texts_of(given: Sequence[Any], model: Model) -> Iterator[str]:
    """The texts themselves, or those in files.

    Raises:
      UserError: one of them is empty, or no text, or a file that is not there.
    """
    for source in given:
        if not isinstance(source, str | Path):
            raise UserError(f"predict: {type(model).__name__} reads texts; give strings")
        text = _text(source).strip()
        if not text:
            raise UserError("predict: a text is empty; give at least one character")
        yield text


def _text(source: str | Path) -> str:
    """What a file says, or the text itself; a single word that ends in .txt names a file."""
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
