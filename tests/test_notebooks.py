"""Every notebook is clean in git and runs in a real kernel, with pictures and its own asserts."""

import ast
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 180

COLAB = "https://colab.research.google.com"
BADGE = (
    f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]"
    f"({COLAB}/github/jaxtrain/jaxtrain/blob/main/notebooks/{{name}})"
)
# The extra `tpu` has the compiler that traffic is read from; it needs no TPU.
INSTALL = re.compile(
    r"import importlib\.util\n\n"
    r'if importlib\.util\.find_spec\("jaxtrain"\) is None:\n'
    r'    %pip install -q "jaxtrain\[demo(,tpu)?\] @ git\+https://github\.com/jaxtrain/jaxtrain"'
)

# Run with every change; the others take as long together as a quarter of the suite.
FIRST = ("1_first_run",)
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class ThisPython(AsyncKernelManager):
    """Starts the interpreter that runs the tests, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=start, display_name="this Python", language="python")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def sources(book: nbformat.NotebookNode, kind: str) -> list[str]:
    return [cell.source for cell in book.cells if cell.cell_type == kind]


@each
def test_git_holds_no_outputs(path):
    book = read(path)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    assert set(book.metadata) <= {"kernelspec", "language_info"}
    for cell in book.cells:
        # Editors make random ids: these stay the same when a notebook is written again.
        assert re.fullmatch(r"cell-\d\d", cell.id)
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@each
def test_a_notebook_says_what_it_is_and_installs_itself(path):
    book = read(path)
    title, code = book.cells[0].source, sources(book, "code")
    assert book.cells[0].cell_type == "markdown"
    assert title.startswith(f"# {path.stem.split('_')[0]}. ")
    assert BADGE.format(name=path.name) in title
    assert len(title.splitlines()) >= 5  # title, badge, a sentence, with empty lines between
    assert INSTALL.fullmatch(code[0])
    assert "use_devices(" in code[1]


@each
def test_a_notebook_ends_with_three_exercises(path):
    last = read(path).cells[-1]
    assert last.cell_type == "markdown"
    assert last.source.startswith("## Exercises\n")
    assert re.findall(r"^(\d)\. ", last.source, re.M) == ["1", "2", "3"]


@each
def test_a_notebook_measures_what_it_states(path):
    book = read(path)
    code = "\n".join(sources(book, "code")[1:])  # the first has a line that only notebooks know
    asserts = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Assert)]
    assert len(asserts) >= 3
    assert "$" in "\n".join(sources(book, "markdown"))


def test_every_notebook_has_its_own_number():
    numbers = [path.stem.split("_")[0] for path in NOTEBOOKS]
    assert numbers
    assert len(set(numbers)) == len(numbers)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """What a reader's kernel has: none of the suite's flags; compiled programs are kept."""
    suites = ("XLA_FLAGS", "MPLBACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in suites}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    folder = tmp_path_factory.mktemp("kernel")
    return kept | {
        "JAXTRAIN_OFFLINE": "1",  # nothing is fetched while testing
        "PYTHONPATH": os.pathsep.join(paths),
        "JAXTRAIN_CACHE": str(folder / "cache"),
        "IPYTHONDIR": str(folder / "ipython"),
    }


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in FIRST else pytest.mark.slow)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(path, environment, tmp_path):
    book = read(path)
    client = NotebookClient(
        book,
        timeout=CELL_SECONDS,
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env=environment)  # raises what a cell raises, an assert that fails too
    ran = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    shown = [output.get("data", {}) for cell in ran for output in cell.outputs]
    assert any("image/png" in data for data in shown)
    told = [out.text for cell in ran for out in cell.outputs if out.output_type == "stream"]
    assert "Warning" not in "\n".join(told)
