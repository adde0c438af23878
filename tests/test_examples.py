"""The examples: each README's commands run in a copy of its folder and reach the stated result."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import optimized_environment

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
RESULT = re.compile(r"^Result: (\w+) ([\d.]+) ± ([\d.]+)", re.M)


def commands(example: Path) -> str:
    """The shell blocks of a README, without what installs packages."""
    blocks = re.findall(r"```sh\n(.*?)```", (example / "README.md").read_text(), re.S)
    return "".join(block for block in blocks if not block.startswith("pip "))


def test_there_are_five_examples_with_a_result_and_a_picture():
    assert len(EXAMPLES) == 5
    for example in EXAMPLES:
        text = (example / "README.md").read_text()
        assert RESULT.search(text), example.name
        pictures = re.findall(r"!\[.+\]\((\w+\.png)\)", text)
        assert pictures, example.name
        assert all((example / picture).read_bytes()[:4] == b"\x89PNG" for picture in pictures)


def test_every_command_is_one_of_the_program_s():
    for example in EXAMPLES:
        for line in commands(example).splitlines():
            assert re.search(r"^GGUF=|^python |\bjaxtrain [a-z]", line), line


# Those that train for minutes.
LONG = ("character_gpt", "lora_chat", "own_objective")


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(one, marks=pytest.mark.rotated("examples") if one.name in LONG else ())
        for one in EXAMPLES
    ],
    ids=lambda path: path.name,
)
def test_an_example_reaches_its_stated_result(example, tmp_path):
    """In a shell, as a reader would: up to two minutes each, since they train."""
    folder = tmp_path / example.name
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("runs", "*.png"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("jaxtrain", "-P -m jaxtrain"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        program.chmod(0o755)
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        **optimized_environment(),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": python_path.rstrip(os.pathsep),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands(example)],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    name, stated, tolerance = RESULT.search((example / "README.md").read_text()).groups()
    assert found(folder, name) == pytest.approx(float(stated), abs=float(tolerance))
    if example.name == "lora_chat":
        assert "Arr, books!" in done.stdout


def found(folder: Path, name: str) -> float:
    """The last value of a metric that a run of the folder wrote, or the plan's."""
    plan = folder / "plan.json"
    if plan.exists():
        return json.loads(plan.read_text())[name]
    values = [
        json.loads(line)[name]
        for path in folder.glob("runs/*/metrics.jsonl")
        for line in path.read_text().splitlines()
        if name in json.loads(line)
    ]
    return values[-1]
