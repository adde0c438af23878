"""JSON-lines input of commands, with errors by line."""

import dataclasses
from typing import Any

from jaxtrain.config.buckets import place
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import path_errors
from jaxtrain.config.untrusted import parse_json, read_bounded

_MAX_BYTES = 1 << 28  # of a whole file, which is held in memory


@dataclasses.dataclass(frozen=True)
class Record:
    """One line.

    Attributes:
      where: the argument, the file and the number of the line, for messages.
      fields: what stands in its braces.
    """

    where: str
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        """The string of this name; UserError where there is none."""
        value = self.value(name)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {name!r} is {value!r}; use a string")
        return value

    def value(self, name: str) -> Any:
        """What stands under this name; UserError where nothing does."""
        if name not in self.fields:
            raise UserError(f"{self.where}: no field {name!r}{did_you_mean(name, self.fields)}")
        return self.fields[name]


def read_records(argument: str, path: str) -> list[Record]:
    """The records of a file, empty lines left out.

    Args:
      argument: the option that names it, for messages.
      path: the file, on a disk or in a bucket.

    Raises:
      UserError: the file cannot be read, has no record, or has a line that is none.
    """
    file = place(path)
    with path_errors(f"{argument} {path}", needs="name a file of JSON lines that can be read"):
        content = read_bounded(file, named=f"{argument} {path}", limit=_MAX_BYTES)
    found = []
    # Not splitlines: U+2028 may stand inside a JSON string.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{argument} {path}:{number}"
        try:
            fields = parse_json(line.decode())
        except ValueError as error:
            raise UserError(f"{where}: no JSON ({error}); use one record a line") from error
        if not isinstance(fields, dict):
            raise UserError(f"{where}: no record in braces; use one such as {{...}} a line")
        found.append(Record(where, fields))
    if not found:
        raise UserError(f"{argument} {path}: there is no line in it; give at least one record")
    return found
