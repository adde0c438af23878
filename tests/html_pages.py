"""Reads the HTML pages that commands write, and checks that a page needs nothing but itself."""

import re
from html.parser import HTMLParser
from pathlib import Path

_VOID = {"br", "input", "link", "meta"}
# Attributes of elements that make a browser fetch or run something.
_LOADING = {"src", "href", "xlink:href", "srcset", "data", "action", "formaction", "poster"}


class Page(HTMLParser):
    """One page.

    Attributes:
      elements: tag, attributes and text of every element, nested text included, as they end.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {[tag for tag, _, _ in self._open]}"

    def handle_starttag(self, tag, attrs):
        if tag in _VOID:
            self.elements.append((tag, dict(attrs), ""))
        else:
            self._open.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        opened, attributes, words = self._open.pop()
        assert opened == tag, f"{tag} ends inside {opened}"
        self.elements.append((tag, attributes, "".join(words)))

    def handle_data(self, data):
        for _, _, words in self._open:
            words.append(data)

    def texts(self, tag: str) -> list[str]:
        """Return the text of all elements of this name."""
        return [text for name, _, text in self.elements if name == tag]

    def values(self) -> dict[float, set[str]]:
        """Return what people read of each exact number of a `<data>` element."""
        found: dict[float, set[str]] = {}
        for tag, attributes, text in self.elements:
            if tag == "data":
                found.setdefault(float(attributes["value"] or "nan"), set()).add(text)
        return found


def read(file: Path) -> Page:
    """Return a page, which loads nothing, runs nothing and names no other place."""
    text = file.read_text()
    assert text.startswith("<!doctype html>\n")
    page = Page(text)
    tags = {tag for tag, _, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "a", "image", "use"}
    for tag, attributes, _ in page.elements:
        assert not _LOADING & attributes.keys(), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    for sheet in [*page.texts("style"), *(a.get("style") or "" for _, a, _ in page.elements)]:
        assert not re.search(r"url\(|@import|expression", sheet)
    assert "://" not in text
    policies = [
        attributes["content"]
        for tag, attributes, _ in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    assert "default-src 'none'" in (policies[0] or "")
    return page


def cells(out: str) -> list[str]:
    """Return the cells of the tables that a command printed in a terminal of any width, without
    bars; a cell that was folded is in parts."""
    rows = [line for line in out.splitlines() if line.startswith("│")]
    found = [cell.strip() for row in rows for cell in row.strip("│").split("│")]
    return [cell for cell in found if cell and set(cell) != {"#"}]
