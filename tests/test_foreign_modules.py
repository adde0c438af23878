"""No module of a config's folder, or of the current one, runs in place of an installed one."""

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from jaxtrain.cli import main

ROOT = Path(__file__).parent.parent
# As pip's program does; `python -m` is tried too.
PROGRAM = """
import sys
from jaxtrain.__main__ import run
if __name__ == "__main__":
    sys.exit(run())
"""
# Python itself loads some of its own modules from there before `-m` runs anything.
INSTALLED = sorted(
    {name for name in packages_distributions() if name.isidentifier()} - {"jaxtrain"}
)
ALL = sorted({*INSTALLED, *sys.stdlib_module_names, "jaxtrain"})

MLP = [
    "mlp_digits", "-b", "Train.steps = 1", "-b", "Train.global_batch_size = 8",
    "-b", "Train.eval_batches = 1", "-b", "MLP.widths = (64, 10)",
]  # fmt: skip


@pytest.fixture
def hostile(tmp_path):
    """Fills a folder with modules that leave a mark where they run: hostile(folder, names)."""

    def fill(folder, names):
        folder.mkdir(exist_ok=True)
        mark = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + ' ')\nraise SystemExit(9)\n"
        for name in names:
            (folder / f"{name}.py").write_text(mark)
        return folder

    yield fill
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.fixture
def call(tmp_path):
    """Runs the program in a folder: call(folder, words)."""
    program = tmp_path / "bin" / "jaxtrain"
    program.parent.mkdir()
    program.write_text(PROGRAM)

    def one(folder, *words, start=(str(program),)):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8"}
        command = [sys.executable, *start, *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    return one


PICTURE = "import jaxtrain.run.show.figures\n"
LOAD = """
import dataclasses, sys
from pathlib import Path
from jaxtrain.config import configurable, reader
@configurable
@dataclasses.dataclass(frozen=True)
class Garden:
    size: int = 1
@dataclasses.dataclass(frozen=True)
class Root:
    garden: Garden
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
file, allow_imports, *bindings = sys.argv[1:]
file = None if file == "-" else Path(file)
folder = Path(__file__).parent
reader.load(Root, file, bindings, search_path=folder, allow_imports=bool(allow_imports))
assert "jaxtrain.run.show.figures" in sys.modules
"""


@pytest.mark.parametrize("route", ["config", "binding", "trusted module"])
def test_an_import_of_jaxtrain_s_takes_no_library_from_the_config_s_folder(
    route, hostile, call, tmp_path
):
    folder = hostile(tmp_path / "downloaded", INSTALLED)
    (tmp_path / "load.py").write_text(LOAD)
    (folder / "mine.py").write_text("import helper\n" + PICTURE)
    (folder / "helper.py").write_text("import matplotlib\nassert matplotlib.__version__\n")
    line = "import mine\n" if route == "trusted module" else PICTURE
    (folder / "run.gin").write_text(line + "Garden.size = 1\n")
    words = {
        "config": ("run.gin", ""),
        "binding": ("-", "", PICTURE.strip()),
        "trusted module": ("run.gin", "yes"),
    }[route]
    done = call(folder, *words, start=(str(tmp_path / "load.py"),))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_downloaded_run_takes_no_library_from_its_folder(hostile, call, tmp_path):
    run = tmp_path / "run"
    assert main(["train", *MLP, "--workdir", str(run)]) == 0
    hostile(run, INSTALLED)
    (run / "config.gin").write_text(PICTURE + (run / "config.gin").read_text())
    done = call(tmp_path, "eval", "--workdir", str(run))
    assert done.returncode == 0, done.stderr


# Starts a training; what an import of jaxtrain's takes is in the fast part.
@pytest.mark.slow
def test_python_m_takes_no_library_from_the_current_folder(hostile, call, tmp_path):
    folder = hostile(tmp_path / "here", INSTALLED)
    done = call(folder, "data", "mlp_digits", start=("-m", "jaxtrain"))
    assert done.returncode == 0, done.stderr


# Starts Python four times; the command itself is checked above.
@pytest.mark.slow
def test_the_processes_of_prepare_take_no_module_from_the_current_folder(
    hostile, call, tiny_config, tmp_path
):
    folder = hostile(tmp_path / "here", ALL)
    source = str(tiny_config.parent)
    done = call(folder, "prepare", source, "--tokenizer", "byte", "--out", "o", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert (folder / "o" / "store.json").exists()


# Starts Python twice and trains; the command itself is checked above.
@pytest.mark.slow
def test_a_supervised_run_takes_no_module_from_the_current_folder(hostile, call, tmp_path):
    folder = hostile(tmp_path / "here", ALL)
    done = call(folder, "supervise", "--", "train", *MLP, "--workdir", "run")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_runs_of_a_sweep_take_no_module_from_the_current_folder(hostile, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(hostile(tmp_path / "here", ALL))
    assert main(["sweep", *MLP, "--workdir", "runs", "-b", "Train.seed = [1]"]) == 0
