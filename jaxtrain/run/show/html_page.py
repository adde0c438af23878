"""A self-contained HTML page of terminal output: no script, no external file.

Text and attributes of its elements are always escaped.
"""

import datetime
import html
import importlib.metadata
import io
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

_VOID = frozenset(("br", "input", "meta"))


class Html(str):
    """Markup that is escaped already; every other string is text and is escaped when used.

    Only `element` and `join` make it, and `as_markup` for constants of this package.
    """


def as_markup(markup: str) -> Html:
    """Return a constant of this package, such as its style sheet, as markup."""
    return Html(markup)


def join(*children: str) -> Html:
    """Return the children one after another; text is escaped, markup is kept."""
    return Html("".join(c if isinstance(c, Html) else html.escape(_printable(c)) for c in children))


def element(tag: str, *children: str, **attributes: Any) -> Html:
    """Return one element.

    Args:
      tag: its name.
      children: text, which is escaped, or `Html`.
      attributes: a trailing underscore is dropped and others become hyphens (`class_`,
        `data_label`); True is an attribute without a value; None and False are left out.
    """
    written = ""
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        written += f" {name.removesuffix('_').replace('_', '-')}"
        if value is not True:
            written += f'="{html.escape(_printable(str(value)))}"'
    if tag in _VOID:
        return Html(f"<{tag}{written}>")
    return Html(f"<{tag}{written}>{join(*children)}</{tag}>")


def _printable(text: str) -> str:
    """Return text with its control characters and lone surrogates as escapes: a page can hold
    neither, and marks that reverse the direction of text would show a name as another."""
    return "".join(
        c if c.isprintable() or c in "\n\t\xa0" else c.encode("unicode_escape").decode()
        for c in text
    )


# The browser itself then blocks scripts, and anything from another origin.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"
# A phone shows a table of at most `_FEW` columns and `_NARROW` characters in a row; of others each
# row is a card. A cell of at most `_LONG` characters is kept in one line.
_FEW, _NARROW, _LONG = 3, 60, 18
_MANY = 8  # columns; with more the letters are smaller
_ASSUMED = "Assumed: "
_TONES = {"green": "good", "red": "bad", "yellow": "unsure"}


class Recorder(Console):
    """A console that records its output, so that a page has the terminal's tables.

    Attributes:
      blocks: tables, and lines as plain text, in order.
    """

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=160)
        self.blocks: list[Table | str] = []

    def print(self, *objects: Any, markup: bool | None = None, **_: Any) -> None:
        for one in objects:
            if isinstance(one, Table):
                self.blocks.append(one)
            else:
                self.blocks.append(str(one) if markup is False else Text.from_markup(one).plain)


class Tile(NamedTuple):
    """A key figure: its name, its exact value, the displayed value, and a remark."""

    name: str
    value: float | None
    shown: str
    note: str = ""


def document(
    title: str, *body: str, words: Sequence[str] = (), styles: str = "", reads: str = ""
) -> bytes:
    """Return a whole page, encoded.

    Args:
      title: also the heading.
      body: what follows it.
      words: the command line that wrote the page.
      styles: rules after those of every page; a constant or made of numbers alone.
      reads: a sentence under the command on how to read the page.
    """
    sheet = Path(__file__).with_name("html_page.css").read_text(encoding="utf-8")
    version = importlib.metadata.version("jaxtrain")
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=f"jaxtrain {version}"),
        element("title", title),
        element("style", as_markup(sheet + styles)),
    )
    command = element("pre", shlex.join(words)) if words else ""
    foot = element(
        "footer",
        *([element("p", "Written by this command:"), command] if words else []),
        *([element("p", reads)] if reads else []),
        element("p", f"jaxtrain {version}, {written}"),
    )
    page = element("body", element("main", element("h1", title), *body), foot)
    text = f"<!doctype html>\n{element('html', head, page, lang='en')}\n"
    return text.encode()


def tiles(several: Iterable[Tile | None]) -> Html:
    """Return key figures; `<data>` holds the exact value of what is rounded for display."""
    return element("dl", *(_tile(one) for one in several if one is not None), class_="tiles")


def _tile(one: Tile) -> Html:
    figure = element("span", data(one.value, one.shown), class_="figure")
    note = element("span", one.note, class_="note") if one.note else ""
    return element("div", element("dt", one.name), element("dd", figure, note), class_="tile")


def data(value: float | None, shown: str) -> Html:
    """Return a number as people read it, with its exact value in the attribute."""
    return join(shown) if value is None else element("data", shown, value=repr(value))


def verdict(text: str, tone: str) -> Html:
    """Return the overall verdict as a badge; `tone` is 'good', 'bad' or 'unsure'."""
    return element("p", element("span", text, class_=f"verdict {tone}"))


def details(summary: str, *body: str) -> Html:
    """Return a collapsible section, closed at first; it is printed open."""
    return element("details", element("summary", summary), *body)


def sections(blocks: Iterable[Table | str]) -> Html:
    """Return recorded blocks: each table is a section, with the lines that follow it.

    Lines that begin with "- " become a list, assumptions one of their own.
    """
    parts: list[str] = []
    listed: list[str] = []
    kind = ""

    def close() -> None:
        nonlocal kind
        if listed:
            if kind == _ASSUMED:
                parts.append(element("h3", "Assumptions"))
            parts.append(element("ul", *(element("li", line) for line in listed)))
            listed.clear()
        kind = ""

    for block in blocks:
        if isinstance(block, Table):
            close()
            parts.append(
                join(element("h2", _plain(block.title)) if block.title else "", table(block))
            )
            continue
        for line in block.splitlines():
            found = next((mark for mark in ("- ", "  ", _ASSUMED) if line.startswith(mark)), "")
            if found != kind:
                close()
            kind = found
            if found:
                text = line.removeprefix(found)
                listed.append(text[:1].upper() + text[1:] if found == _ASSUMED else text)
            elif line.strip():
                parts.append(element("p", line))
    close()
    return join(*parts)


def table(shown: Table) -> Html:
    """Return a terminal table; a wide one shows rows as cards on a phone."""
    heads = [_plain(column.header) for column in shown.columns]
    columns = [[_text(cell) for cell in column.cells] for column in shown.columns]
    lengths = [max((len(cell.plain) for cell in cells), default=0) for cells in columns]
    meters = {
        index
        for index, cells in enumerate(columns)
        if lengths[index] and all(set(cell.plain) <= {"#"} for cell in cells)
    }
    # Short cells are not wrapped; long ones have their own line of a card.
    sides = [
        f"{'number' if column.justify == 'right' else ''} {'long' if length > _LONG else 'short'}"
        for column, length in zip(shown.columns, lengths, strict=True)
    ]
    rows = []
    for number, row in enumerate(shown.rows):
        cells = []
        for index, column in enumerate(columns):
            text = column[number].plain
            if index in meters:
                cells.append(_meter(len(text), lengths[index]))
                continue
            classes = [sides[index], _tone(column[number]), "" if text.strip(" -") else "blank"]
            label = heads[index] or None
            cells.append(element("td", text, class_=_join(*classes), data_label=label))
        rows.append(element("tr", *cells, class_="section" if row.end_section else None))
    head = (
        element("th", name, scope="col", class_=_join(side))
        for name, side in zip(heads, sides, strict=True)
    )
    parts = [element("thead", element("tr", *head)), element("tbody", *rows)]
    if shown.show_footer:
        feet = (
            element("td", _plain(column.footer), class_=_join(side))
            for column, side in zip(shown.columns, sides, strict=True)
        )
        parts.append(element("tfoot", element("tr", *feet)))
    width = sum(length for index, length in enumerate(lengths) if index not in meters)
    is_wide = len(columns) > _FEW or width > _NARROW
    kinds = ("wide" if is_wide else "", "dense" if len(columns) > _MANY else "")
    drawn = element("table", *parts, class_=_join(*kinds))
    return element("div", drawn, class_="scroll")


def _join(*classes: str) -> str | None:
    return " ".join(" ".join(classes).split()) or None


def _meter(length: int, most: int) -> Html:
    """Return a cell that is a bar of characters in the terminal."""
    bar = element("rect", x=0, y=0, width=length, height=1, class_="f0")
    drawn = element(
        "svg", bar, viewBox=f"0 0 {most} 1", preserveAspectRatio="none", aria_hidden="true"
    )
    return element("td", drawn if length else "", class_="meter" if length else "meter blank")


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def _plain(cell: Any) -> str:
    return _text(cell).plain


def _tone(cell: Text) -> str:
    styles = " ".join(str(span.style) for span in cell.spans)
    return next((tone for color, tone in _TONES.items() if color in styles), "")


def settings(text: str) -> Html:
    """Return a configuration as gin text, folded."""
    return details("Settings that differ from their defaults", element("pre", text))
