"""docs/formulas.md: every example runs, every function it names is there, none is left out."""

import inspect
import re
from pathlib import Path

import pytest

from jaxtrain.analysis.planning.search import budget
from jaxtrain.analysis.planning.textbook import flops, formulas, rooflines, scaling, sizes
from jaxtrain.analysis.planning.timing import timeline
from jaxtrain.nn.moe import dispatch

PAGE = (Path(__file__).parent.parent / "docs" / "formulas.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
MODULES = (budget, flops, formulas, rooflines, scaling, sizes)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_example_holds(number):
    assert BLOCKS[number].count("assert ") >= 2
    exec(compile(BLOCKS[number], f"docs/formulas.md, example {number}", "exec"), {})


def functions(module) -> set[str]:
    return {
        name
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("module", [formulas, rooflines, scaling, sizes], ids=lambda m: m.__name__)
def test_every_function_has_its_formula_and_its_number(module):
    words = set(re.findall(r"\w+", "".join(BLOCKS)))
    for name in functions(module):
        assert f"`{name}`" in PAGE, name
        assert name in words, name


def test_every_function_of_a_table_exists():
    known = set().union(*(functions(module) for module in (*MODULES, timeline, dispatch)))
    rows = re.findall(r"^\|(.*)\|$", PAGE, re.M)
    named = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)}
    assert named - known - {"tensor"} == set()
