"""Records of which each holds a document: those that cannot be used, counted and named by place."""

import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from jaxtrain.config.errors import UserError, did_you_mean

SHOWN = 3  # bad records that the refusal names


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A record without a usable text: its place and what is wrong with it."""

    told: str


class Records:
    """The records of a whole source, good and bad.

    Args:
      text_field: the field that holds the text.
      allowed: how many bad ones may be left out.
    """

    def __init__(self, text_field: str, allowed: int = 0) -> None:
        self.text_field = text_field
        self._allowed = allowed
        self._good, self._bad, self._first = 0, 0, list[str]()

    def texts(self, records: Iterable[str | BadRecord]) -> Iterator[str]:
        """The texts among these records; the others are counted."""
        for record in records:
            if isinstance(record, BadRecord):
                self._bad += 1
                if len(self._first) < SHOWN:
                    self._first.append(record.told)
            else:
                self._good += 1
                yield record

    def refuse(self) -> None:
        """Raises UserError where too many are bad, with their number and the first by name."""
        if self._bad <= self._allowed:
            return
        raise UserError(
            f"TextData.text_field = {self.text_field!r}: {self._bad:,} of "
            f"{self._good + self._bad:,} records cannot be used: {self._named()}; mend or remove "
            f"them, name another field, or set TextData.bad_records = {self._bad} to leave them out"
        )

    def facts(self) -> dict[str, int | str]:
        """How many were left out, and the first of them."""
        return {"bad_records": self._bad, "first_bad_records": self._named()} if self._bad else {}

    def _named(self) -> str:
        more = self._bad - len(self._first)
        return "; ".join(self._first) + (f"; and {more:,} more" if more else "")


def check_field(path: object, text_field: str, fields: Iterable[str]) -> None:
    """Raises UserError where a file whose records all have these fields has none of that name."""
    fields = list(fields)
    if text_field not in fields:
        raise UserError(
            f"TextData.text_field = {text_field!r}: {path} has no such column"
            f"{did_you_mean(text_field, fields)}"
        )


def arrow(module: str, path: object) -> Any:
    """A module of pyarrow, which reads this file.

    Raises:
      UserError: it is not installed.
    """
    # Imported here: only the formats that it reads need it, and it takes 0.2 s.
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"TextData.source: {path} is read by pyarrow, of jaxtrain[formats] ({error}); run: "
            "pip install 'jaxtrain[formats]'"
        ) from error
