"""The loop: resume, evaluation, signals, files of a run, and one compilation."""

import json
import logging
import os
import re
import signal

import jax
import numpy as np
import pytest
from PIL import Image

from jaxtrain import Trainer, load_config
from jaxtrain.config.errors import UserError
from jaxtrain.data.loader import batches
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.run.attempts.attempt import Preempted
from jaxtrain.run.checkpoint import manifest, sealing
from jaxtrain.training.guard import BadStepError

TIMES = {"step_seconds", "tokens_per_second", "mfu"}
ACCOUNT = {"goodput", "goodput_seconds", "attempts", "restarts"}


def lines(workdir) -> list[dict]:
    """metrics.jsonl without what a clock measured."""
    text = (workdir / "metrics.jsonl").read_text()
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMES | ACCOUNT}
        for line in text.splitlines()
    ]


def arrays(state) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """8 steps without interruption: the trainer and its folder."""
    workdir = tmp_path_factory.mktemp("whole")
    trainer = Trainer(load_config(tiny_config, ["Train.eval_every = 4"]), workdir)
    trainer.train()
    trainer.close()
    return trainer, workdir


def test_a_run_leaves_the_files_of_the_contract(whole):
    trainer, workdir = whole
    names = {path.name for path in workdir.iterdir()}
    assert {"config.gin", "metrics.jsonl", "checkpoints", "tensorboard", "loss.png"} <= names
    assert Image.open(workdir / "loss.png").size[0] > 300
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in found if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    wanted = {"step", "loss", "grad_norm", "learning_rate", *TIMES}
    assert all(wanted <= set(line) for line in steps)
    assert [line["step"] for line in found if "eval_loss" in line] == [4, 8]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert load_config(workdir / "config.gin") == trainer.config


def test_a_checkpoint_s_metrics_are_on_the_disk_before_it_is(tiny_config, tmp_path, monkeypatch):
    """Not only in the system's memory, which goes with the machine."""
    metrics = tmp_path / "metrics.jsonl"
    synced, found, fsync, seal = [], {}, os.fsync, manifest.seal

    def noting(number):
        fsync(number)
        synced.append((os.fstat(number).st_ino, os.fstat(number).st_size))

    def sealing(folder, step, leaves):
        # Its number is its own as long as it is there.
        on_disk = [size for inode, size in synced if inode == metrics.stat().st_ino]
        content = metrics.read_bytes()[: max(on_disk, default=0)]
        found[step] = [json.loads(line)["step"] for line in content.splitlines()]
        return seal(folder, step, leaves)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(manifest, "seal", sealing)
    Trainer(load_config(tiny_config, ["Train.save_every = 4"]), tmp_path).train()
    assert found.keys() == {4, 8}
    for step, steps in found.items():
        assert set(range(1, step + 1)) <= set(steps)


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("stop", [3, 4])
def test_stopped_and_continued_equals_never_stopped_bit_for_bit(stop, whole, tiny_config, tmp_path):
    trainer, workdir = whole
    bindings = ["Train.eval_every = 4"]
    first = Trainer(load_config(tiny_config, bindings), tmp_path)
    # The stop of a signal: the run's length, and with it the schedule, stays as it is.
    stop_at(first, stop)
    with pytest.raises(Preempted) as stopped:
        first.train()
    assert stopped.value.step == stop
    first.close()
    second = Trainer(load_config(tiny_config, bindings), tmp_path)
    assert second.steps_done == stop
    second.train()
    second.close()
    for a, b in zip(arrays(second.state), arrays(trainer.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert lines(tmp_path) == lines(workdir)


def stop_at(trainer: Trainer, step: int) -> None:
    """Sends this process SIGTERM while `step` is being dispatched."""
    train_step = trainer._stepper.train_step

    def signalling(arrays, batch):
        if trainer.steps_done + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(arrays, batch)

    trainer._stepper.train_step = signalling


# tests/test_resume.py goes on from other layouts in the fast part.
@pytest.mark.slow
def test_a_resume_on_another_mesh_goes_on_with_the_same_data(whole, tiny_config, tmp_path):
    _, workdir = whole
    first = Trainer(load_config(tiny_config), tmp_path)
    stop_at(first, 4)
    with pytest.raises(Preempted):
        first.train()
    first.close()
    bindings = ["Mesh.data = 1", "Mesh.fsdp = 8", "Mesh.tensor = 1", "Sharding.zero = 1"]
    second = Trainer(load_config(tiny_config, bindings), tmp_path)
    second.train()
    second.close()
    found = {line["step"]: line["loss"] for line in lines(tmp_path) if "loss" in line}
    expected = {line["step"]: line["loss"] for line in lines(workdir) if "loss" in line}
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        # Another order of float32 sums, amplified by Adam over four steps.
        assert found[step] == pytest.approx(loss, rel=1e-4), step


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("GPT.embed_dim = 64", "written by a different model"),
        ("GPT.num_layers = 3", "written by a different model"),
        (
            "Optimizer.name = 'lamb'",  # whose moments have AdamW's names and shapes
            "with Optimizer.name = 'adamw', this configuration has 'lamb', whose moments",
        ),
        ("Train.seed = 1", "written with Train.seed = 0, this configuration has 1"),
        ("Train.global_batch_size = 16", "with Train.global_batch_size = 8, this configuration"),
        (
            "TextData.heldout_fraction = 0.2",
            "with TextData.heldout_fraction = 0.05, this configuration has 0.2: the data",
        ),
        (
            "TextData.sequence_length = 16",
            "with TextData.sequence_length = 32, this configuration has 16: the data",
        ),
    ],
)
def test_another_run_in_the_same_folder_is_refused(binding, words, whole, tiny_config):
    _, workdir = whole
    before = (workdir / "config.gin").read_text()
    with pytest.raises(UserError, match=words):
        Trainer(load_config(tiny_config, ["Train.eval_every = 4", binding]), workdir)
    assert (workdir / "config.gin").read_text() == before


# Two runs; a resumed one is in the fast part.
@pytest.mark.slow
def test_a_run_with_a_relative_source_goes_on_from_any_folder(tiny_config, tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "text.txt").write_text("sum = x + y\n" * 400)
    bindings = ["TextData.source = 'text.txt'", "Train.steps = 1"]
    monkeypatch.chdir(here)
    first = Trainer(load_config(tiny_config, bindings), tmp_path / "run")
    values = first.train()
    first.close()
    repeated = load_config(tmp_path / "run" / "config.gin")
    assert repeated.train.data.source == str(here / "text.txt")
    (here / "text.txt").write_text("dif = x - y\n" * 400)
    with pytest.raises(UserError, match="the data's sha256 = .*; restore them"):
        Trainer(repeated, tmp_path / "run")
    told = Trainer(repeated, tmp_path / "run", read_only=True).other_data()
    assert told is not None
    assert re.fullmatch("the data's sha256 was [0-9a-f]{16}, is [0-9a-f]{16}", told)
    (here / "text.txt").write_text("sum = x + y\n" * 400)
    for folder, config in ((elsewhere, repeated), (here, load_config(tiny_config, bindings))):
        monkeypatch.chdir(folder)
        again = Trainer(config, tmp_path / "run")
        assert again.steps_done == 1
        assert again.evaluate() == values
        again.close()
    assert load_config(tmp_path / "run" / "config.gin") == repeated


def test_the_whole_run_compiles_once_and_never_moves_data_implicitly(tiny_config, caplog):
    trainer = Trainer(load_config(tiny_config, ["Train.eval_every = 2"]))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        trainer.train()
    compiled = [
        r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()
    ]
    of_step = [message for message in compiled if "train_step" in message]
    of_evaluation = [message for message in compiled if "eval_step" in message]
    assert (len(of_step), len(of_evaluation)) == (1, 1)
    assert trainer._stepper.train_step._cache_size() == 1


def test_a_run_builds_its_model_for_its_parts_and_not_for_every_program(tiny_config, monkeypatch):
    """Preflight, the state's shapes twice, the state, the step and its evaluation."""
    built, build = [], GPT.build
    monkeypatch.setattr(GPT, "build", lambda self, key: built.append(self) or build(self, key))
    trainer = Trainer(load_config(tiny_config))
    trainer.train(2)
    before = len(built)
    assert before <= 6
    trainer.evaluate()
    assert len(built) == before


def test_evaluation_counts_every_heldout_target_once(tiny_config):
    """Against the losses of all held-out rows computed in one batch, padding left out."""
    trainer = Trainer(load_config(tiny_config, ["Train.eval_batches = None"]))
    heldout = trainer.dataset.heldout
    assert len(heldout) % 8, "the last batch must be a partial one"
    rows = [heldout.example(i, None) for i in range(len(heldout))]
    pad = -len(rows) % 4
    stacked = jax.tree.map(lambda *x: np.stack([*x, *[x[-1]] * pad]), *rows)
    stacked.loss_mask[len(rows) :] = 0
    with trainer.layout.active():
        placed = jax.device_put(stacked, trainer.program.setup.batch_shardings(stacked))
        zeros = trainer.program.setup.no_sums(trainer.state, placed)
        sums = jax.jit(trainer.program.setup.eval_step)(trainer.state, placed, zeros)
    values = trainer.evaluate()
    assert values["eval_loss"] == pytest.approx(float(sums["loss"] / sums["weight"]), rel=1e-6)
    assert values["eval_perplexity"] == pytest.approx(np.exp(values["eval_loss"]))


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(tiny_config, tmp_path):
    bindings = ["Optimizer.learning_rate = 1e30", "Optimizer.clip_norm = None"]
    trainer = Trainer(load_config(tiny_config, bindings), tmp_path)
    with pytest.raises(BadStepError, match="step"):
        trainer.train()
    trainer.close()
    assert sealing.sealed_steps(tmp_path / "checkpoints") == []


def test_the_pieces_work_for_people_who_look_inside(tiny_config):
    trainer = Trainer(load_config(tiny_config))
    stream = batches(trainer.dataset.train, global_batch_size=8, seed=0)
    first = float(trainer.step(next(stream))["loss"])
    for _ in range(5):
        metrics = trainer.step(next(stream))
    stream.close()
    assert trainer.steps_done == int(trainer.state.step) == 6
    assert float(metrics["loss"]) < first
    assert {axis: n for axis, n in trainer.mesh.shape.items() if n > 1} == {
        "data": 2, "fsdp": 2, "tensor": 2,
    }  # fmt: skip
    assert trainer.lower().compile().memory_analysis().argument_size_in_bytes > 0
    trainer.train(steps=2)
    assert trainer.steps_done == 8


def test_simulated_devices_of_the_config_are_in_the_saved_one(tiny_config):
    config = load_config(tiny_config, ["Mesh.simulated_devices = 8"])
    assert "Mesh.simulated_devices = 8" in config.to_gin()
    assert Trainer(config).mesh.size == 8
