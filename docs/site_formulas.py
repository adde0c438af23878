"""Formulas of the documentation site as MathML, which browsers draw without scripts and fonts."""

import re
import sys

from latex2mathml import converter

# As GitHub reads them: `$$...$$`, and `$...$` whose signs touch the formula.
_BLOCK = re.compile(r"\$\$(.+?)\$\$", re.S)
_INLINE = re.compile(r"(?<![\\$\w])\$(?![\s$])((?:[^$\n\\]|\\.|\n(?!\n))+?)(?<!\s)\$(?![\w$])")
# Characters that Markdown reads between tags too.
_ENTITIES = {ord(c): f"&#{ord(c)};" for c in "*_[]`|\\~^"}


def draw_formulas(text: str, page: str) -> str:
    """Return Markdown with its formulas drawn.

    Args:
      text: without code.
      page: its path, for messages.
    """
    text = _BLOCK.sub(lambda match: f"\n\n{_drawn(match[1], 'block', page)}\n\n", text)
    return _INLINE.sub(lambda match: _drawn(match[1], "inline", page), text)


def _drawn(formula: str, display: str, page: str) -> str:
    """Return one formula.

    Raises:
      SystemExit: a command of it is not known.
    """
    drawn = converter.convert(" ".join(formula.split()), display=display)
    if "\\" in re.sub(r"<[^>]*>", "", drawn):
        sys.exit(f"{page}: this formula has a command that is not known: {formula}")
    tag = "div" if display == "block" else "span"
    texts = re.split(r"(<[^>]*>)", drawn)
    safe = "".join(t if t.startswith("<") else t.translate(_ENTITIES) for t in texts)
    return f'<{tag} class="formula">{safe}</{tag}>'
