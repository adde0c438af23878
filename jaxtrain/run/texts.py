"""Texts as `predict` is given them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import Model

AT_ONCE = 64  # examples that go through the model together


def texts_of(given: Sequence[Any], model: Model) -> Iterator[str]:
    """The texts themselves, or those in files.

    Raises:
      UserError: one of them is empty, or no text.
    """
    for source in given:
        if not isinstance(source, str | Path):
            raise UserError(f"predict: {type(model).__name__} reads texts; give strings")
        is_file = str(source).endswith(".txt") and Path(source).is_file()
        text = (Path(source).read_text("utf-8") if is_file else str(source)).strip()
        if not text:
            raise UserError("predict: a text is empty; give at least one character")
        yield text
