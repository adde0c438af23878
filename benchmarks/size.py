"""Lines of code by package, the median function and the share of imports.

    python -m benchmarks.size

A line of code is one that is neither blank nor a comment nor of a docstring.
"""

import ast
import dataclasses
import io
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGE = Path(__file__).parent.parent / "jaxtrain"
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Size:
    """Of one file, or of several.

    Attributes:
      files: how many.
      lines: of code.
      imports: those of them that import something.
      functions: lines of each function's body, nested ones among their outer's.
    """

    files: int
    lines: int
    imports: int
    functions: tuple[int, ...]

    def __add__(self, other: "Size") -> "Size":
        return Size(
            self.files + other.files,
            self.lines + other.lines,
            self.imports + other.imports,
            self.functions + other.functions,
        )


def size_of(text: str) -> Size:
    """The size of a file by its text."""
    tree = ast.parse(text)
    lines = _code_lines(text) - set(_docstring_lines(tree))
    imports = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    functions = [
        len(lines & set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Size(1, len(lines), len(imports & lines), tuple(functions))


def _code_lines(text: str) -> set[int]:
    return {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Lines of strings that stand alone: docstrings of modules, classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def sizes(package: Path) -> dict[str, Size]:
    """The sizes of a package's parts, files outside of any under their own name, and of all."""
    found: dict[str, Size] = {}
    for file in sorted(package.rglob("*.py")):
        part, size = file.relative_to(package).parts[0], size_of(file.read_text())
        for name in (part, "all"):
            found[name] = found[name] + size if name in found else size
    return dict(sorted(found.items(), key=lambda item: item[1].lines))


def main() -> None:
    """Prints the table."""
    table = Table("package", "files", "lines", "lines a file", "imports", "median function")
    for name, size in sizes(PACKAGE).items():
        table.add_row(
            name,
            f"{size.files:,}",
            f"{size.lines:,}",
            f"{size.lines / size.files:.0f}",
            f"{size.imports / max(size.lines, 1):.1%}",
            f"{statistics.median(size.functions) if size.functions else 0:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
