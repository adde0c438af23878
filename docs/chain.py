"""Draws docs/chain.svg: the packages of jaxtrain on their chain, and who imports whom.

`make docs` runs it, and a test compares: the picture is what the imports are.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxtrain"
FLOORS = (
    ("cli",), ("analysis",), ("run",), ("training",), ("models",), ("nn",), ("data", "parallel"),
    ("config",),
)  # fmt: skip
ROW, BOX, LEFT, WIDTH, TEXT = 66, 48, 12, 640, "#1b3a57"
LANE = 17  # between the lines beside the boxes


def imported(name: str) -> set[str]:
    """The packages that a package (or the file of this name) imports."""
    file = PACKAGE / f"{name}.py"
    files = [file] if file.exists() else (PACKAGE / name).rglob("*.py")
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxtrain."):
                found.add(node.module.split(".")[1])
    return found - {name}


def purpose(name: str) -> str:
    """The first sentence of what a package says of itself."""
    file = PACKAGE / f"{name}.py"
    text = (file if file.exists() else PACKAGE / name / "__init__.py").read_text()
    return ast.get_docstring(ast.parse(text)).splitlines()[0]


def inside(name: str) -> str:
    """A package's packages, with theirs in brackets."""
    parts = []
    for folder in sorted((PACKAGE / name).glob("*/__init__.py")):
        deeper = [f.parent.name for f in sorted(folder.parent.glob("*/__init__.py"))]
        parts.append(folder.parent.name + (f" ({', '.join(deeper)})" if deeper else ""))
    return " · ".join(parts)


def text(x: float, y: float, words: str, size: int, **attributes: str) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace("`", "")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{TEXT}"{more}>{words}</text>'


def box(x: float, y: float, width: float, name: str) -> list[str]:
    """A package: its name, what it is for, what is inside."""
    half = width < WIDTH
    about = purpose(name)
    if half:
        about = about.split(":")[0] if ":" in about else about.split(",")[0]
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX}" rx="6"'
    parts = [
        f'{shape} fill="#eef4fa" stroke="{TEXT}"/>',
        text(x + 10, y + 18, name, 14, font_weight="bold"),
        text(x + 10 + (74 if not half else 68), y + 18, about, 10 if not half else 9),
    ]
    if found := inside(name):
        parts.append(text(x + 10, y + 36, found, 11, fill_opacity="0.75"))
    return parts


def arrows(edges: dict[str, set[str]]) -> list[str]:
    """Beside the boxes a line for every package, which ends at those it imports."""
    rows = {name: row for row, names in enumerate(FLOORS) for name in names}
    parts = []
    for lane, name in enumerate(name for names in FLOORS for name in names):
        ends = sorted({rows[other] for other in edges[name]})
        if not ends:
            continue
        x = LEFT + WIDTH + 14 + LANE * lane
        start = ROW * rows[name] + BOX / 2 + 10
        last = ROW * ends[-1] + BOX / 2 + 4
        path = f"M{LEFT + WIDTH} {start:g}H{x:g}V{last:g}"
        parts.append(f'<path d="{path}" fill="none" stroke="{TEXT}" stroke-opacity="0.6"/>')
        for row in ends:
            y = ROW * row + BOX / 2 + 4
            parts.append(
                f'<path d="M{x:g} {y:g}H{LEFT + WIDTH + 1}" fill="none" stroke="{TEXT}" '
                'stroke-opacity="0.6" marker-end="url(#tip)"/>'
            )
    return parts


def drawing() -> str:
    """The whole picture."""
    names = [name for floor in FLOORS for name in floor]
    edges = {name: imported(name) for name in names}
    width = LEFT + WIDTH + 14 + LANE * len(names) + 8
    height = ROW * len(FLOORS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M0 0L6 3L0 6z" fill="{TEXT}"/></marker></defs>',
        *arrows(edges),
    ]
    for row, floor in enumerate(FLOORS):
        each = (WIDTH - 10 * (len(floor) - 1)) / len(floor)
        for place, name in enumerate(floor):
            parts += box(LEFT + place * (each + 10), ROW * row + 6, each, name)
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    sys.stdout.write(drawing())
