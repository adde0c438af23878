"""Names of the package's code and files in docs, docstrings, comments and messages exist."""

import ast
import functools
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxtrain"
PACKAGES = {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
# Names of settings in general, and a wrong one.
EXAMPLES = {"Name.field", "GPT.num_layer"}
# Former names, and those of other libraries.
WITH_OTHER_NAMES = {"compatibility.md", "synonyms.py", "registry.py"}
# Files of other projects, of Python, and a pattern of names.
OTHER_FILES = {
    "NAME.py", "constants.py", "data_common.py", "indexed_dataset.py", "matplotlib.py",
    "prepare.py", "sitecustomize.py", "topics.py", "xla_flags_library.py",
}  # fmt: skip
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in ("jaxtrain", "tests", "benchmarks", "docs", "examples", "notebooks")
    for path in (ROOT / folder).rglob("*.py")
}


@functools.cache
def names_of(path: Path) -> dict[str, ast.stmt]:
    """What a module binds at its top level, under `if` and `try` too."""
    found: dict[str, ast.stmt] = {}

    def read(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for one in node.names:
                    found[(one.asname or one.name).split(".")[0]] = node
            elif isinstance(node, ast.If | ast.Try):
                read(node.body)
            else:
                for one in ast.walk(node):
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                        found[one.id] = node

    read(ast.parse(path.read_text()).body)
    return found


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Classes of the package by name; several modules may have one of a name."""
    found = defaultdict(list)
    for path in MODULES:
        for node in names_of(path).values():
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


@functools.cache
def members(name: str) -> set[str] | None:
    """Names in the classes of this name and their bases; None if a base is from elsewhere."""
    found: set[str] = set()
    for cls in classes()[name]:
        for node in ast.walk(cls):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
        for base in cls.bases:
            text = re.sub(r"\[.*", "", ast.unparse(base)).split(".")[-1]
            if text in ("Protocol", "Generic", "object"):
                continue
            if text == name or text not in classes() or (more := members(text)) is None:
                return None
            found |= more
    return found


def exists(name: str) -> bool:
    """Whether a dotted name below the package is a module, or a name in one."""
    parts, folder = name.split("."), PACKAGE
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if not parts:
        return True
    module = folder / f"{parts[0]}.py"
    if module.is_file():
        parts.pop(0)
    else:
        module = folder / "__init__.py"
    if not parts:
        return True
    node = names_of(module).get(parts[0])
    if node is None:
        return False
    if not isinstance(node, ast.ClassDef) or len(parts) == 1:
        return True
    known = members(parts[0])
    return known is None or parts[1] in known


def missing(text: str) -> Iterator[str]:
    """Names in a text that do not exist: `jaxtrain.x.y`, `package.module.name`, `Class.name`."""
    for name in re.findall(r"(?<![\w./@-])(?:jaxtrain\.)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)", text):
        first, *rest = name.split(".")
        if rest[-1] in ("py", "md", "gin", "sh", "json"):
            continue
        inside = PACKAGE / first / rest[0]
        if f"jaxtrain.{name}" in text:
            if not exists(name):
                yield f"jaxtrain.{name}"
        elif first in PACKAGES and (inside.is_dir() or inside.with_suffix(".py").is_file()):
            if not exists(name):
                yield name
        elif first in classes() and first[0].isupper():
            known = members(first)
            if known is not None and rest[0] not in known:
                yield name


@functools.cache
def prose(path: Path) -> list[tuple[int, str]]:
    """First lines and texts: the lines of a page; of a module its strings and comments."""
    if path.suffix == ".md":
        return list(enumerate(path.read_text().splitlines(), 1))
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                found.append((token.start[0], token.string))
    return found


def code_spans(path: Path) -> Iterator[tuple[int, str]]:
    """First lines and contents of code spans."""
    for line, text in prose(path):
        for span in re.findall(r"`([^`\n]+)`", text):
            yield line, span


def absent_files(text: str) -> Iterator[str]:
    """Names of Python files in a text that no file of the project has."""
    for name in re.findall(r"(?<![\w@:*-])[\w./]*\w\.py\b", text):
        path = re.sub(r"^[./]+", "", name)
        if not any(f"/{file}".endswith(f"/{path}") for file in FILES):
            yield name


@pytest.mark.parametrize("paths", [PAGES, MODULES], ids=["docs", "package"])
def test_every_name_of_the_code_exists(paths):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        if path.name not in WITH_OTHER_NAMES
        for line, text in code_spans(path)
        for name in missing(text)
        if name not in EXAMPLES
    ]
    assert wrong == []


@pytest.mark.parametrize("paths", [PAGES, MODULES], ids=["docs", "package"])
def test_every_file_that_is_named_exists(paths):
    """Pages on extending the package name files that their reader writes."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        if not path.name.startswith("extending")
        for line, text in prose(path)
        for name in absent_files(text)
        if name.rsplit("/", maxsplit=1)[-1] not in OTHER_FILES
    ]
    assert wrong == []


def test_a_link_to_a_file_has_the_file_s_name():
    wrong = [
        f"{path.relative_to(ROOT)}: {name} for {target}"
        for path in PAGES
        for name, target in re.findall(
            r"\[`([^`\]]+\.(?:py|md|sh|gin))`\]\(([^)#]+)", path.read_text()
        )
        if not target.endswith(re.sub(r"^[./]+", "", name))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("run.generation.sampling.Sampling", ["run.generation.sampling.Sampling"]),
        ("jaxtrain.run.generation.decoding.Sampling", []),
        ("jaxtrain.nowhere.there", ["jaxtrain.nowhere.there"]),
        ("parallel.sharding.Layout.whole", []),
        ("parallel.sharding.Layout.half", ["parallel.sharding.Layout.half"]),
        ("Layout.moment", []),
        ("Layout.moments", ["Layout.moments"]),
        ("data.shape, state.params", []),
    ],
)
def test_a_name_that_does_not_exist_is_found(text, absent):
    assert list(missing(text)) == absent


def test_a_file_that_does_not_exist_is_found():
    assert list(absent_files("see `sharding.py` and parallel/tables.py, not *.py")) == [
        "parallel/tables.py"
    ]
