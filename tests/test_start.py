"""What a command imports before it has anything to do with it: what takes long comes late."""

import json
import os
import subprocess
import sys

import pytest

# Each takes a tenth of a second or more, or brings what does.
HEAVY = frozenset(
    {
        "jax", "jaxlib", "numpy", "flax", "optax", "orbax", "grain", "matplotlib", "rich", "gin",
        "PIL", "torch", "tensorflow_datasets", "safetensors", "tokenizers",
    }
)  # fmt: skip

TELL = """
import atexit, os, sys
def tell():
    found = {name.split(".")[0] for name in sys.modules}
    found |= sys.modules.keys() & {"jaxtrain.analysis"}
    os.write(2, ("\\nimported " + " ".join(sorted(found)) + "\\n").encode())
atexit.register(tell)
"""


def imported(code: str, *arguments: str, folder: object = None) -> set[str]:
    """The heavy packages that a program has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", TELL + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("imported ")]
    found = set(line.split())
    assert "jaxtrain" in found
    return found & {*HEAVY, "jaxtrain.analysis"}


MAIN = "from jaxtrain.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"]])
def test_help_imports_nothing_heavy(words):
    assert imported(MAIN, *words) <= {"jaxtrain.analysis"}  # its options


def test_configs_imports_what_it_prints_with():
    assert imported(MAIN, "configs") <= {"rich", "gin", "jaxtrain.analysis"}


def test_plot_imports_no_jax(tmp_path):
    lines = [{"step": step, "loss": 1 / step, "learning_rate": 1e-3} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = imported(MAIN, "plot", ".", folder=tmp_path)
    assert "matplotlib" in found
    assert not found & {"jax", "flax", "optax", "orbax", "grain", "tensorflow_datasets"}


def test_training_imports_nothing_that_it_does_not_need_before_the_first_step():
    """Drawing, tokenizers and planning come with the first evaluation, file or failure."""
    found = imported("import jaxtrain.run.commands.train")
    assert {"jax", "flax"} <= found
    late = {
        "orbax",
        "matplotlib",
        "torch",
        "tensorflow_datasets",
        "tokenizers",
        "jaxtrain.analysis",
    }
    assert not found & late


def test_metrics_and_event_files_are_written_without_them(tmp_path):
    code = """
from pathlib import Path
from jaxtrain.run.metrics.files import MetricsFiles
files = MetricsFiles(Path(sys.argv[1]), 0, {})
files.write({"step": 1, "loss": 2.5})
assert list(Path(sys.argv[1]).glob("tensorboard/*"))
"""
    # An environment of tests has PyTorch, which packages that write event files load.
    assert not imported(code, str(tmp_path)) & {"matplotlib", "torch", "jax", "tensorflow_datasets"}
