"""docs/bindings.md is what the settings' docstrings say now, and says it of every setting."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.analysis import bindings
from jaxtrain.config.registry import CONFIGURABLES
from jaxtrain.config.values import settings_of
from jaxtrain.training.settings import load_config

PAGE = (Path(__file__).parent.parent / "docs" / "bindings.md").read_text()


def test_the_page_is_what_the_docstrings_say():
    assert bindings.page() == PAGE, "run: make docs"


def test_every_field_that_a_config_can_set_stands_on_the_page():
    load_config("gpt_quickstart")  # registers every model and every source
    ours = [cls for cls in CONFIGURABLES.values() if cls.__module__.startswith("jaxtrain.")]
    assert len(ours) > 20
    for cls in ours:
        _, heading, rest = PAGE.partition(f"\n## {cls.__name__}\n")
        assert heading, cls.__name__
        section = rest.partition("\n## ")[0]
        for name in settings_of(cls):
            assert f"\n| `{cls.__name__}.{name}` | " in section, f"{cls.__name__}.{name}"


def test_every_setting_that_a_string_names_exists():
    """Messages, hints, help and docstrings: `Section.setting` is one that a config can set."""
    load_config("gpt_quickstart")
    absent = []
    for path in Path(jaxtrain.__file__).parent.rglob("*.py"):
        # What people type in place of ours, and the table of former names.
        if path.name in ("synonyms.py", "registry.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            for section, name in re.findall(r"(?<![\w.@/])([A-Z]\w*)\.([a-z]\w*)", node.value):
                cls = CONFIGURABLES.get(section)
                if cls and name not in settings_of(cls) and not hasattr(cls, name):
                    absent.append(f"{path.name}:{node.lineno}: {section}.{name}")
    # A method of the class in nn/, which has the name of the model that is made of it.
    assert [one for one in absent if not one.endswith(": Transformer.run_layer")] == []


def test_choices_units_and_defaults_are_spelled_out():
    row = next(line for line in PAGE.splitlines() if line.startswith("| `Precision.loss_scale` "))
    assert row.startswith("| `Precision.loss_scale` | `'dynamic'` or float or `None` | `None` | ")
    assert "| `Train.steps` | int |  | optimizer steps of the whole run. |" in PAGE
    assert "| `Checkpoint.keep_every` | int or `None` | `None` | steps that are multiples" in PAGE
    models = ", ".join(f"`@{cls.__name__}()`" for cls in bindings.models())
    assert "`@GPT()`" in models
    assert f"| `Train.model` | {models} |  |" in PAGE


def test_a_field_without_a_meaning_is_refused():
    @dataclasses.dataclass
    class Half:
        """Two fields.

        Attributes:
          first, second: described
            over two lines: with a colon.
        """

        first: int
        second: int

    assert bindings.meanings(Half)["second"] == "described over two lines: with a colon."

    @dataclasses.dataclass
    class Other(Half):
        """Three fields.

        Attributes:
          first: described anew.
          third: not there.
        """

        fourth: int

    # What it extends says what it does not say itself.
    with pytest.raises(ValueError, match="differ in fourth, third"):
        bindings.meanings(Other)
