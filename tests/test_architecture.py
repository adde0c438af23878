"""Imports flow one way, files stay short, and every module says what it is for."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxtrain"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").glob("*.py"))
MAX_LINES = 400

# Lower layers first; a module imports its own layer and those below, never one above.
LAYERS = [
    ["allocation"],
    ["errors", "values", "tables", "options", "buckets", "files", "staging", "compilation", "plot"],
    ["attempts.signals", "attempts.maintenance", "attempts.phases"],
    ["attempts.records", "attempts.lifeline"],
    ["attempts.lock", "attempts.supervise"],
    ["peers"],
    ["distributed"],
    [
        "config",
        "planning.hlo",
        "planning.flops",
        "planning.groups",
        "planning.collectives",
        "planning.formulas",
        "planning.hardware",
        "planning.gpu",
        "planning.targets",
    ],
    ["mesh"],
    ["sharding", "precision", "contraction", "batch_norm"],
    ["gathering"],
    ["remat"],
    ["float8", "int8"],
    ["narrow"],
    ["context"],
    ["ring"],
    ["blocked_attention", "kernels"],
    ["attention", "products", "convolution"],
    ["layers"],
    ["self_attention", "experts"],
    ["transformer"],
    ["data.batch"],
    ["moments"],
    ["loss_chunks"],
    ["models", "loss", "optimizer", "guard"],
    ["pipeline"],
    ["step", "checkpoint", "metrics", "progress", "data"],
    ["attempts.watchdog", "attempts.goodput", "corruption"],
    ["attempts.attempt"],
    ["exchange"],
    ["settings"],
    ["preflight", "report", "generate", "doctor", "resume", "program", "bindings"],
    ["profiling"],
    ["saved", "feed", "run_log", "display", "stepper"],
    ["train", "attempts"],
    ["planning"],
    ["verify"],
    ["__init__"],
    ["commands"],
    ["__main__"],
]


def layer_of(module: str) -> int:
    """The layer that the longest matching prefix of a module's name stands in."""
    found = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    assert found, f"jaxtrain.{module} stands in no layer: add it to LAYERS"
    return max(found)[1]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


def imports(path: Path) -> set[str]:
    """The package's modules that a file imports, without the leading "jaxtrain."."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if is_module(n) else node.module for n in names]
        else:
            continue
        found |= {n.removeprefix("jaxtrain.") for n in names if n.startswith("jaxtrain.")}
    return found


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_flow_one_way(path):
    name = name_of(path)
    above = [other for other in imports(path) if layer_of(other) > layer_of(name)]
    assert above == []
    if name.startswith("models."):
        assert [other for other in imports(path) if other.startswith("models.")] == []


@pytest.mark.parametrize("path", MODULES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_says_what_it_is_for(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", "?"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_wrappers_know_gin_and_orbax(path):
    libraries = {
        (n.module if isinstance(n, ast.ImportFrom) else n.names[0].name) or ""
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Import | ast.ImportFrom)
    }
    roots = {library.split(".")[0] for library in libraries}
    assert ("gin" in roots) == (name_of(path) == "config")
    assert ("orbax" in roots) == (name_of(path) == "checkpoint.store")
    assert "torch" not in roots
    assert "pickle" not in roots


def test_at_most_sixteen_runtime_dependencies():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 16
