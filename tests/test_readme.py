"""README and docs: every command runs, every link leads somewhere, the tree is the folder's."""

import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jaxtrain.__main__ import main
from jaxtrain.config import _CONFIGURABLES
from jaxtrain.settings import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What makes a command of the docs short; everything else runs as it is written.
SHORT_TEXT = ["Train.steps = 4", "Schedule.warmup_steps = 2", "Train.eval_batches = 1",
              "GPT.num_layers = 2", "GPT.embed_dim = 32"]  # fmt: skip
SHORT_IMAGES = ["Train.steps = 2", "Schedule.warmup_steps = 1", "ResNet.width = 8"]


def commands(page: Path) -> list[list[str]]:
    """The shell commands of a page, split into words, comments dropped."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
    return [words for block in blocks for line in block.splitlines()
            if (words := shlex.split(line, comments=True))]  # fmt: skip


def shortened(words: list[str]) -> list[str]:
    if words[0] == "plan":
        # Compiling for accelerators has its own tests; a search is as long as the model is deep.
        quick = [] if "cpu:8" in words or "--no-compile" in words else ["--no-compile"]
        return [*words, *quick]
    if words[0] != "train":
        return words
    bindings = SHORT_IMAGES if "resnet" in words[1] else SHORT_TEXT
    return [*words, *(word for binding in bindings for word in ("-b", binding))]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.stem)
def test_every_command_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README)  # a page trains on it
    for words in commands(page):
        if words[0] == "make":
            done = subprocess.run(
                ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            expected = {"train": "jaxtrain train", "test": "-m pytest"}[words[1]]
            assert expected in done.stdout
        else:
            assert words[0] == "jaxtrain"
            status = main(shortened(words[1:]))
            assert status == 0, (words, capsys.readouterr().err)


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "eval_loss" in out
    assert "argument_size_in_bytes" in out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_tree_of_the_readme_is_the_folder():
    tree = re.search(r"```\njaxtrain/\n(.*?)```", README, re.S).group(1)
    named = set(re.findall(r"^  (\w+(?:\.py|/))", tree, re.M))
    inside = {p.name for p in (ROOT / "jaxtrain").glob("*.py")} - {"__init__.py"}
    folders = {f"{p.parent.name}/" for p in (ROOT / "jaxtrain").glob("*/__init__.py")}
    assert named == inside | folders
    assert len(README.splitlines()) <= 200


def test_every_config_stands_in_the_readme():
    for config in (ROOT / "configs").glob("*.gin"):
        assert f"`{config.stem}`" in README, config.stem


def test_every_setting_of_a_config_dataclass_is_documented():
    load_config("gpt_quickstart")  # registers every model and every source
    ours = [cls for cls in _CONFIGURABLES.values() if cls.__module__.startswith("jaxtrain.")]
    assert len(ours) > 10
    for cls in ours:
        for field in dataclasses.fields(cls):
            pattern = rf"\b{field.name}\b[^\n]*:"
            assert re.search(pattern, cls.__doc__), f"{cls.__name__}.{field.name}"
