"""HTML elements whose text and attributes are always escaped."""

import html
from typing import Any

_VOID = frozenset(("br", "input", "meta"))


class Html(str):
    """Markup that is escaped already; every other string is text and is escaped where it is used.

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
