"""What a newcomer types: names of configs and folders of runs, and how little a start prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.cli import main
from jaxtrain.config import writer
from jaxtrain.config.shipped import configs_folder
from jaxtrain.training.settings import load_config

SHIPPED = sorted(path.stem for path in configs_folder().glob("*.gin"))


@pytest.mark.parametrize("command", ["train", "data", "verify", "timeline", "sweep", "plan"])
def test_a_misspelled_config_is_reported_before_anything_heavy_is_imported(command, tmp_path):
    more = {"sweep": ["--workdir", "s"], "plan": ["--target", "cpu:8"]}.get(command, [])
    code = (
        "import sys; from jaxtrain.cli import main; status = main(sys.argv[1:]);"
        "heavy = {'jax', 'flax', 'numpy', 'rich', 'matplotlib'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, "gpt_quickstrt", *more],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "jaxtrain: config 'gpt_quickstrt': no .gin file and not shipped; did you mean "
        "'gpt_quickstart'?\n"
    )


def test_a_folder_as_config_says_what_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, file in (("Llama-3.2-1B", "config.json"), ("runs/first", "config.gin")):
        Path(folder).mkdir(parents=True)
        Path(folder, file).write_text("{}")
    assert main(["train", "Llama-3.2-1B"]) == 2
    assert "is a Hugging Face folder; use 'hf:Llama-3.2-1B'" in capsys.readouterr().err
    assert main(["train", "runs/first"]) == 2
    assert "is a run's folder; use 'runs/first/config.gin'" in capsys.readouterr().err


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs, and a sweep of two with its log files."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("first", "second", "sweep/rate=1", "sweep/rate=2")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        lines = [{"step": step, "loss": number + 1 / step} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        (folder / "config.gin").touch()
        (folder / "checkpoints").mkdir()
    (tmp_path / "runs" / "sweep" / "rate=1.log").touch()
    (tmp_path / "runs" / "notes").mkdir()


def test_plot_takes_folders_of_runs_and_of_a_sweep(runs, tmp_path, capsys):
    assert main(["plot", "runs"]) == 0
    said = capsys.readouterr().out
    rows = [line.split("│")[1:4] for line in said.splitlines() if line.startswith("│")]
    assert [" ".join(cell.strip() for cell in row) for row in rows] == [
        "first 2 0.5", "second 2 1.5", "rate=1 2 2.5", "rate=2 2 3.5",
    ]  # fmt: skip
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", "runs/sweep", "runs/first"]) == 0
    assert "second" not in capsys.readouterr().out
    assert main(["plot", "runs/notes"]) == 2
    assert "no metrics there" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["eval"], ["inspect"], ["predict", "x.png"]])
def test_a_folder_of_runs_as_workdir_names_the_runs_in_it(command, runs, capsys):
    assert main([command[0], "--workdir", "runs", *command[1:]]) == 2
    assert (
        "--workdir runs is not a run (no config.gin); it contains: runs/first, runs/second, "
        "runs/sweep/rate=1, runs/sweep/rate=2"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("name", SHIPPED)
def test_the_settings_that_are_printed_are_those_that_make_the_run(name):
    config = load_config(name)
    text = writer.changes(config)
    assert load_config(text) == config
    whole = config.to_gin().splitlines()
    assert set(text.splitlines()) <= set(whole)
    assert len(text.splitlines()) < len(whole) / 2


# Two runs; which settings are printed is in the fast part.
@pytest.mark.slow
def test_a_start_prints_what_differs_and_all_when_asked(tiny_config, tmp_path, capsys):
    words = ["train", str(tiny_config), "-b", "Train.steps=1", "--workdir", str(tmp_path / "run")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Settings that differ from their defaults (config.gin has all; --verbose):" in said
    assert "Train.steps = 1\n" in said
    assert "Checkpoint.keep = " not in said
    assert "Checkpoint.keep = " in (tmp_path / "run" / "config.gin").read_text()
    assert main([*words, "--verbose"]) == 0
    assert "Checkpoint.keep = " in capsys.readouterr().out
