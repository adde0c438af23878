"""Records that hold documents; unusable ones are counted and named by position."""

import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from jaxtrain.config.errors import UserError, did_you_mean

T = TypeVar("T")

SHOWN = 3  # bad records that the rejection names


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """Record without a usable text: its position and the error."""

    message: str


class Records:
    """Records of a whole source, good and bad.

    Args:
      text_field: the field that holds the text.
      allowed: how many bad ones may be left out.
      setting: the setting and its value that an error begins with; None: TextData.text_field.
      ways: what the message offers besides repairing them.
    """

    def __init__(
        self,
        text_field: str,
        allowed: int = 0,
        *,
        setting: str | None = None,
        ways: str = "name another field, or set TextData.bad_records",
    ) -> None:
        self.text_field = text_field
        self._allowed, self._ways = allowed, ways
        self._setting = setting or f"TextData.text_field = {text_field!r}"
        self._good, self._bad, self._first = 0, 0, list[str]()

    def texts(self, records: Iterable[T | BadRecord]) -> Iterator[T]:
        """Yield the texts, or other values, among these records; bad records are counted."""
        for record in records:
            if isinstance(record, BadRecord):
                self._bad += 1
                if len(self._first) < SHOWN:
                    self._first.append(record.message)
            else:
                self._good += 1
                yield record

    def reject(self) -> None:
        """Raise UserError if too many records are bad, with their number and the names of the
        first.
        """
        if self._bad <= self._allowed:
            return
        raise UserError(
            f"{self._setting}: {self._bad:,} of {self._good + self._bad:,} records cannot be used: "
            f"{self._name()}; fix or remove them, {self._ways} = {self._bad} to leave them out"
        )

    def facts(self) -> dict[str, int | str]:
        """Return the number of bad records left out, and the first of them."""
        return {"bad_records": self._bad, "first_bad_records": self._name()} if self._bad else {}

    def _name(self) -> str:
        more = self._bad - len(self._first)
        return "; ".join(self._first) + (f"; and {more:,} more" if more else "")


def reject_empty(path: object) -> NoReturn:
    """Raise UserError for an empty file of records, such as a failed copy leaves."""
    raise UserError(
        f"TextData.source: {path} is empty, without any record; make it again, or remove it from "
        "the source"
    )


def check_field(path: object, text_field: str, fields: Iterable[str]) -> None:
    """Raise UserError if a file whose records all have these fields lacks this one."""
    fields = list(fields)
    if text_field not in fields:
        raise UserError(
            f"TextData.text_field = {text_field!r}: {path} has no such column"
            f"{did_you_mean(text_field, fields)}"
        )


def arrow(module: str, path: object, setting: str = "TextData.source") -> Any:
    """Import a module of pyarrow to read this file.

    Raises:
      UserError: it is not installed.
    """
    # Imported here: only the formats that it reads need it, and it takes 0.2 s.
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{setting}: {path} is read by pyarrow, of jaxtrain[formats] ({error}); run: "
            "pip install 'jaxtrain[formats]'"
        ) from error
