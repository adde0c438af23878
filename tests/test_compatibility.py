"""Runs and stores that earlier versions wrote (tests/releases/VERSION) are read and resumed.

Each folder was written by that version: `jaxtrain train` of a small GPT on text.txt with two
simulated devices for 4 steps, and `jaxtrain prepare text.txt --out store`. A release adds its own.
"""

import dataclasses
import json
import shutil
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.data.text.source import TextData
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

FOLDER = Path(__file__).parent / "releases"
VERSIONS = sorted(path.name for path in FOLDER.iterdir())


@pytest.fixture(params=VERSIONS)
def written(request, tmp_path, monkeypatch) -> Path:
    shutil.copytree(FOLDER / request.param, tmp_path / "written")
    monkeypatch.chdir(tmp_path / "written")
    return tmp_path / "written"


def metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_this_version_has_written_its_own():
    project = tomllib.loads((FOLDER.parent.parent / "pyproject.toml").read_text())["project"]
    assert project["version"] in VERSIONS


# Several runs; tests/test_resume.py has every layout in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["Mesh.fsdp=2", "Mesh.data=4"], ["Mesh.fsdp=4", "Mesh.tensor=2"]])
def test_a_run_is_evaluated_and_resumed_on_any_mesh(written, mesh):
    workdir = written / "gpt"
    *_, evaluated = metrics(workdir)
    bindings = ["Mesh.simulated_devices=8", *mesh]
    config = load_config(str(workdir / "config.gin"), bindings)
    found = Trainer(config, workdir, read_only=True).evaluate()
    np.testing.assert_allclose(found["eval_loss"], evaluated["eval_loss"], rtol=1e-6)
    longer = ["Train.steps=8", "Train.log_every=1"]
    Trainer(load_config(str(workdir / "config.gin"), bindings + longer), workdir).train()
    resumed = [line for line in metrics(workdir) if "loss" in line]
    assert [line["step"] for line in resumed] == [1, 4, 5, 6, 7, 8]
    # As a run never stopped.
    whole = written / "whole"
    Trainer(load_config(str(workdir / "config.gin"), bindings + longer), whole).train()
    never_stopped = {line["step"]: line["loss"] for line in metrics(whole) if "loss" in line}
    for line in resumed:
        np.testing.assert_allclose(line["loss"], never_stopped[line["step"]], rtol=1e-6)


def test_a_store_gives_the_rows_of_its_text(written):
    data = TextData(source=str(written / "text.txt"), sequence_length=16)
    text = data.open(seed=0)
    store = dataclasses.replace(data, source=str(written / "store")).open(seed=0)
    for found, expected in ((store.train, text.train), (store.heldout, text.heldout)):
        assert len(found) == len(expected) > 0
        for at in range(len(expected)):
            row, same = found.example(at, None), expected.example(at, None)
            jax.tree.map(np.testing.assert_array_equal, row, same)
