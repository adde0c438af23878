"""docs/python*.md: their blocks run one after the other, and they name the whole of the package."""

import re
from pathlib import Path

import numpy as np
import pytest

import jaxtrain

DOCS = Path(__file__).parent.parent / "docs"


def run(page: str) -> dict:
    """Run the blocks of a page in order; return their names."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    assert len(blocks) >= 5
    names: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/{page}, block {number}", "exec"), names)
    return names


@pytest.mark.slow
def test_the_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run("python.md")
    out = capsys.readouterr().out
    assert "step 8/8" in out
    assert "Plan for v5e:2x4" in out
    for picture in ("loss.png", "up.png", "plan.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert len([line for line in names["trainer"].history if "eval_loss" in line]) == 2


@pytest.mark.slow
def test_the_blocks_of_the_page_of_loops_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run("python_loops.md")
    whole = jaxtrain.Trainer(names["config"])
    whole.train(steps=3)
    pieces = names["watched"].weights()
    assert len(names["means"]) == len(set(names["means"])) == 3
    for name, array in whole.weights().items():
        np.testing.assert_array_equal(pieces[name], array)


def test_the_page_names_everything_that_is_public():
    page = (DOCS / "python.md").read_text()
    for name in jaxtrain.__all__:
        if name != "Plan":  # what `plan` returns, never made by hand
            assert f"`{name}" in page, name
