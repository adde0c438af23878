"""A table that stands between two marks in a page and is written row by row, as rows are known."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from jaxtrain.config.errors import did_you_mean
from jaxtrain.config.files import write_atomically


@dataclasses.dataclass(frozen=True)
class Table:
    """A page's table.

    Attributes:
      module: that writes it, by which its marks are named.
      head: of its columns; the first is the rows' name.
      names: of all rows, in their order.
    """

    module: str
    head: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def begin(self) -> str:
        """The mark before it."""
        return f"<!-- {self.module} -->"

    @property
    def end(self) -> str:
        """The mark after it."""
        return f"<!-- end of {self.module} -->"

    def told(self, page: str) -> dict[str, list[str]]:
        """The cells of a page's table, after their rows' names."""
        table = page.partition(self.begin)[2].partition(self.end)[0].splitlines()
        rows = [line.strip("|").split("|") for line in table if line.startswith("| `")]
        return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}

    def with_row(self, page: str, name: str, cells: Sequence[str]) -> str:
        """The page with a row in its table, in the order of `names`.

        Raises:
          ValueError: the page has no such table.
        """
        before, begin, rest = page.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end:
            raise ValueError(f"the page has no lines {self.begin!r} and {self.end!r}")
        rows = self.told(page) | {name: list(cells)}
        lines = [_line([f"`{one}`", *rows[one]]) for one in self.names if one in rows]
        table = "\n".join([_line(self.head), "|" + "---|" * len(self.head), *lines])
        return f"{before}{begin}\n{table}\n{end}{after}"

    def arguments(self, parser: argparse.ArgumentParser, *, folder: str, page: Path) -> None:
        """Adds what every such command takes.

        Args:
          parser: the command's.
          folder: where it keeps what it trains, unless it is told.
          page: that has the table, unless it is told.
        """
        names = ", ".join(self.names)
        parser.add_argument("rows", nargs="*", metavar=self.head[0].upper(), help=names)
        parser.add_argument("--folder", type=Path, default=Path(folder))
        parser.add_argument("--page", type=Path, default=page)

    def asked(self, parser: argparse.ArgumentParser, asked: argparse.Namespace) -> list[str]:
        """The rows that are named, or those that the page does not have; ends where one is none."""
        for name in asked.rows:
            if name not in self.names:
                nearest = did_you_mean(name, self.names)
                parser.error(f"{name!r} is no {self.head[0]}{nearest}; there are {self.names}")
        told = self.told(asked.page.read_text())
        return asked.rows or [name for name in self.names if name not in told]

    def write(self, page: Path, names: Sequence[str], cells: Callable[[str], list[str]]) -> None:
        """Writes these rows into a page, one by one, and tells them."""
        console = Console()
        for name in names:
            found = cells(name)
            text = self.with_row(page.read_text(), name, found)
            write_atomically(page, text.encode())
            line = _line([f"`{name}`", *found])
            console.print(line, soft_wrap=True, markup=False, highlight=False)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
