"""Follows the recipes of docs/extending.md on a copy of the package, as they stand there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```python file=(\S+)\n(.*?)```", PAGE, re.S))


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package and its configs with every recipe applied."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("jaxtrain", "configs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert len(FILES) == 3
    for name, text in FILES.items():
        (root / name).write_text(text)
    apply_diff(root, re.search(r"```diff\n(.*?)```", PAGE, re.S).group(1))
    (root / "notes.txt").write_text("to be or not to be\n" * 2000)
    return root


def apply_diff(root: Path, diff: str) -> None:
    """Replaces each run of "-" lines by the "+" lines after it; each stands in its file once."""
    for file, body in re.findall(r"\+\+\+ b/(\S+)\n(.*?)(?=^--- a|\Z)", diff, re.S | re.M):
        text = (root / file).read_text()
        hunks = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", body, re.M)
        assert hunks
        for removed, added in hunks:
            old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in (removed, added))
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (root / file).write_text(text)


def train(root: Path, *arguments: str) -> tuple[str, list[dict]]:
    """Trains in the copy; the output and the lines of metrics.jsonl."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "jaxtrain", "train", *arguments, "--workdir", "run"]
    shutil.rmtree(root / "run", ignore_errors=True)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    return done.stdout, [json.loads(line) for line in lines]


def bindings(*texts: str) -> list[str]:
    return [word for text in texts for word in ("-b", text)]


def test_the_recipe_of_a_model(copy):
    out, lines = train(
        copy,
        "attention_only",
        "--simulate-devices",
        "8",
        *bindings("TextData.source = 'notes.txt'"),
    )
    assert "layers/qkv" in out
    assert "A sample" in out
    entropy = float(re.search(r"unigram entropy ([\d.]+)", out).group(1))
    assert lines[-1]["eval_loss"] < 0.5 * entropy


def test_the_recipes_of_a_dataset_and_of_a_mesh_axis(copy):
    run = copy / "counting.gin"
    run.write_text(
        "Train.model = @AttentionOnly()\nTrain.data = @CountingData()\nTrain.steps = 10\n"
        "Train.global_batch_size = 16\nTrain.eval_batches = 2\nTrain.log_every = 1\n"
        "Precision.compute = 'float32'\nOptimizer.learning_rate = 1e-2\n"
    )
    losses = []
    for sizes in (["Mesh.replica = 2", "Mesh.fsdp = 2", "Mesh.tensor = 2"], []):
        devices = "8" if sizes else "1"
        out, lines = train(copy, str(run), "--simulate-devices", devices, *bindings(*sizes))
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert ("replica=2 x fsdp=2 x tensor=2" in out) == bool(sizes)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.5
