"""`jaxtrain init`: the starter is written whole or not at all, and its README's commands work."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import optimized_environment

from jaxtrain.__main__ import main
from jaxtrain.run.commands.init import FILES

ROOT = Path(__file__).parent.parent


# Trains; that nothing is overwritten and what the wheel holds is in the fast part.
@pytest.mark.slow
def test_the_starter_is_written_and_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "new/project"]) == 0
    assert {path.name for path in Path("new/project").iterdir()} == set(FILES)
    last = capsys.readouterr().out.splitlines()[-1]
    program, *words = shlex.split(last.partition("&& ")[2])
    assert last.startswith("Next: cd new/project && ")
    assert program == "jaxtrain"
    monkeypatch.chdir("new/project")
    small = ["Train.steps = 2", "Train.eval_batches = 1", "MyModel.num_layers = 1"]
    few = [word for binding in small for word in ("-b", binding)]
    assert main([*words, "--simulate-devices", "8", *few]) == 0
    lines = Path("runs/first/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["eval_loss"] > 0
    for word in ("Train.model = @MyModel()", "import my_model"):
        assert word in Path("runs/first/config.gin").read_text()


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("project").mkdir()
    Path("project", name).write_text("mine")
    assert main(["init", "project"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"jaxtrain: DIR 'project' already has {name}, and nothing is overwritten"
    )
    assert told.count("\n") == 1
    assert [path.name for path in Path("project").iterdir()] == [name]
    assert Path("project", name).read_text() == "mine"
    suggested = told.rpartition(" ")[2].strip()
    assert main(["init", suggested]) == 0


def test_a_file_in_the_way_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("project").write_text("mine")
    assert main(["init", "project"]) == 2
    assert capsys.readouterr().err.startswith("jaxtrain: DIR 'project': ")
    assert Path("project").read_text() == "mine"


def test_the_wheel_has_the_starter():
    """The Slurm script is that of `tpu_scripts`; the others are in the package already."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    starter = "jaxtrain/run/starter"
    assert included["tpu_scripts/slurm.sbatch"] == f"{starter}/slurm.sbatch"
    assert {path.name for path in (ROOT / starter).iterdir()} >= set(FILES) - {"slurm.sbatch"}


@pytest.mark.slow
@pytest.mark.rotated("examples")  # examples/own_objective has such a model
def test_the_commands_of_the_readme_work_from_an_empty_folder(tmp_path):
    """In processes of their own, as written: two minutes, for the loss that the config states."""

    def run(words, folder):
        code = "import sys; from jaxtrain.__main__ import main; sys.exit(main(sys.argv[1:]))"
        return subprocess.run(
            [sys.executable, "-P", "-c", code, *words], cwd=folder, capture_output=True, text=True,
            env=optimized_environment(),
        )  # fmt: skip

    assert run(["init", "project"], tmp_path).returncode == 0
    folder = tmp_path / "project"
    (block,) = re.findall(r"```sh\n(.*?)```", (folder / "README.md").read_text(), re.S)
    for line in block.splitlines():
        done = run(shlex.split(line)[1:], folder)
        assert done.returncode == 0, (line, done.stderr)
    lines = (folder / "runs/first/metrics.jsonl").read_text().splitlines()
    stated = float(re.search(r"about ([\d.]+) nats", (folder / "train.gin").read_text()).group(1))
    assert json.loads(lines[-1])["eval_loss"] == pytest.approx(stated, abs=0.1)
