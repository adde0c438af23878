"""Whole runs over bad numbers, bad records and corrupt replicas, through the loop as it is."""

import dataclasses
import errno
import io
import json
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from test_corruption import flip_bit, with_parameter
from test_train import arrays, lines

from jaxtrain import Trainer, load_config
from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.bad_records import BadRecordError
from jaxtrain.data.loader import batches
from jaxtrain.run.attempts.lock import RunLock
from jaxtrain.training.corruption import CorruptionError
from jaxtrain.training.guard import BadStepError


class Touched:
    """Examples of which some are touched: `touch` is called with each that is named."""

    def __init__(self, whole, indices, touch):
        self.whole, self.indices, self.touch = whole, set(indices), touch

    def __len__(self):
        return len(self.whole)

    def example(self, index, rng):
        one = self.whole.example(index, rng)
        return self.touch(one) if index in self.indices else one


def poison(example):
    """Its loss is infinite, and so are its gradients."""
    return dataclasses.replace(example, loss_mask=np.full_like(example.loss_mask, np.inf))


def unreadable(_):
    raise OSError("the disk has a hole")


def touch(trainer, batch_numbers, what):
    """Touches the first example of these batches of the stream, which no other batch has."""
    dataset = trainer.dataset
    order = record_order(trainer)
    indices = [order[number * 8] for number in batch_numbers]
    train = Touched(dataset.train, indices, what)
    trainer._loop.dataset = dataclasses.replace(dataset, train=train)
    return indices


def record_order(trainer):
    """Which example stands at each place of the stream's beginning."""
    seen = []

    class Spy:
        def __len__(self):
            return len(trainer.dataset.train)

        def example(self, index, rng):
            seen.append(index)
            return trainer.dataset.train.example(index, rng)

    stream = batches(Spy(), global_batch_size=8, seed=0, threads=0)
    for _ in range(20):
        next(stream)
    assert len(set(seen)) == len(seen), "the test's batches lie in one epoch"
    return seen


def saved_extra(workdir, step):
    return json.loads((workdir / f"checkpoints/{step}/extra/metadata").read_text())


# tests/test_guard_step.py skips bad steps in the fast part.
@pytest.mark.slow
def test_skip_leaves_a_bad_batch_out_and_goes_on(tiny_config, tmp_path):
    bindings = ["Guard.policy = 'skip'", "Train.log_every = 4"]
    trainer = Trainer(load_config(tiny_config, bindings), tmp_path)
    touch(trainer, [2, 5], poison)
    trainer.train()
    trainer.close()
    assert all(np.isfinite(x).all() for x in arrays(trainer.state))
    # Lines of the bad steps are written out of turn, with a null where JSON has no number.
    found = {line["step"]: line for line in lines(tmp_path) if "grad_norm" in line}
    assert sorted(found) == [1, 3, 4, 6, 8]
    assert [step for step, line in found.items() if line["bad"] == 1.0] == [3, 6]
    # The state is that of a run over the six good batches.
    other = Trainer(load_config(tiny_config, bindings))
    stream = batches(other.dataset.train, global_batch_size=8, seed=0, threads=0)
    for number in range(8):
        batch = next(stream)
        if number not in (2, 5):
            other.step(batch)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, other.state.params)


def test_stop_keeps_the_last_good_checkpoint(tiny_config, tmp_path):
    trainer = Trainer(load_config(tiny_config, ["Train.save_every = 2"]), tmp_path)
    touch(trainer, [4], poison)
    with pytest.raises(BadStepError, match="step 5 is bad, the loss is (inf|nan)"):
        trainer.train()
    trainer.close()
    again = Trainer(trainer.config, tmp_path)
    assert again.steps_done == 4
    assert all(np.isfinite(x).all() for x in arrays(again.state))


# Two runs; tests/test_checkpoint_damage.py has damaged files in the fast part.
@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_neither_begins_anew_nor_is_looked_at(
    tiny_config, tmp_path, capfd
):
    words = ["train", str(tiny_config), "--workdir", str(tmp_path), "-b", "Train.save_every = 4"]
    assert main(words) == 0
    for step in (4, 8):
        folder = tmp_path / "checkpoints" / str(step)
        victim = max((f for f in folder.rglob("*") if "/d/" in str(f)), key=lambda f: f.name)
        victim.write_bytes(victim.read_bytes()[:-1])
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    # The second start, as a supervisor's, finds what the first one found.
    for again in (words, words, ["eval", "--workdir", str(tmp_path)]):
        assert main([*again]) == 1
        told = capfd.readouterr()
        assert "the checkpoint of step 8 in" in told.err
        assert "nor can that of step 4: no good one is left, and nothing was changed" in told.err
        assert "Traceback" not in told.err
        assert "eval_loss" not in told.out
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "8"]


# Another file of the run, the same handler.
@pytest.mark.slow_cases(".loss.png-jaxtrain: --workdir {run}: Permission denied ({run}/.loss.png.")
@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ("", "jaxtrain: the checkpoint of step 3 could not be written to {run}/checkpoints (["),
        (".loss.png", "jaxtrain: --workdir {run}: Permission denied ({run}/.loss.png."),
    ],
)
def test_a_folder_taken_from_under_a_run_ends_it_with_a_sentence(
    refused, told, tiny_config, tmp_path, monkeypatch, capsys
):
    """As a network's ticket that runs out does, after the first save."""
    run, opened, mkdir = tmp_path / "run", io.open, os.mkdir
    lost = []

    def check(path):
        if (run / "checkpoints" / "1" / "manifest.json").exists():
            lost.append(path)
        if lost and str(path).startswith(f"{run}/") and Path(path).name.startswith(refused):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def opening(path, mode="r", *arguments, **named):
        if isinstance(path, str | Path) and "w" in mode:
            check(path)
        return opened(path, mode, *arguments, **named)

    def making(path, *arguments, **named):
        check(path)
        return mkdir(path, *arguments, **named)

    monkeypatch.setattr(io, "open", opening)
    monkeypatch.setattr(os, "mkdir", making)
    words = ["Train.save_every = 1", "Train.eval_every = 1", "Checkpoint.max_failed_saves = 2"]
    words = [word for binding in words for word in ("-b", binding)]
    assert main(["train", str(tiny_config), "--workdir", str(run), *words]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(told.format(run=run))
    assert "Traceback" not in error


REWIND = [
    "Guard.policy = 'rewind'",
    "Guard.rewind_steps = 1",
    "Guard.skip_batches = 3",
    "Train.save_every = 2",
    "Train.eval_every = 2",
    "Schedule.name = 'constant'",
]


# Two runs; stopping at a bad step is in the fast part.
@pytest.mark.slow
def test_rewind_restores_an_earlier_state_and_passes_over_the_batches(tiny_config, tmp_path):
    """Bad in step 7 (batch 6): back to step 6, on with batch 6 + 3, and a resume goes on so."""
    trainer = Trainer(load_config(tiny_config, REWIND), tmp_path)
    touch(trainer, [6], poison)
    trainer.train()
    trainer.close()
    assert trainer.steps_done == 8
    other = Trainer(load_config(tiny_config, REWIND))
    stream = batches(other.dataset.train, global_batch_size=8, seed=0, threads=0)
    made = [next(stream) for _ in range(13)]
    losses = [float(other.step(made[number])["loss"]) for number in (0, 1, 2, 3, 4, 5, 9, 10)]
    found = {line["step"]: line["loss"] for line in lines(tmp_path) if "loss" in line}
    assert list(found) == list(range(1, 9))
    assert list(found.values()) == losses
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, other.state.params)
    assert saved_extra(tmp_path, 8)["data"]["next_batch"] == 11
    longer = Trainer(load_config(tiny_config, [*REWIND, "Train.steps = 10"]), tmp_path)
    longer.train()
    longer.close()
    other.step(made[11])
    other.step(made[12])
    jax.tree.map(np.testing.assert_array_equal, longer.state.params, other.state.params)


@pytest.mark.slow
def test_a_rewind_passes_checkpoints_that_are_too_new(tiny_config, tmp_path):
    """Three steps back from step 5 is step 2: the checkpoint of step 4 goes."""
    bindings = [*REWIND, "Guard.rewind_steps = 3", "Guard.skip_batches = 4"]
    trainer = Trainer(load_config(tiny_config, bindings), tmp_path)
    touch(trainer, [4], poison)
    trainer.train()
    trainer.close()
    assert saved_extra(tmp_path, 8)["data"]["next_batch"] == 12
    account = trainer._attempt.goodput.account()
    assert account.seconds["replay"] > 0


def test_a_run_that_cannot_get_past_a_bad_step_stops(tiny_config, tmp_path):
    bindings = [*REWIND, "Guard.max_bad_steps = 2"]
    trainer = Trainer(load_config(tiny_config, bindings), tmp_path)
    touch(trainer, range(2, 20), poison)
    with pytest.raises(BadStepError, match="step 3 is bad.* after 3 in a row"):
        trainer.train()
    trainer.close()


# A run; tests/test_data_bad_records.py counts records in the fast part.
@pytest.mark.slow
def test_bad_records_are_left_out_up_to_the_limit(tiny_config):
    allowed = Trainer(load_config(tiny_config, ["Train.bad_records = 2"]))
    indices = touch(allowed, [1, 3], unreadable)
    allowed.train()
    # Threads make batches side by side: which of two meets its bad example first is not said.
    assert {record.index for record in allowed.bad_records.found} == set(indices)
    assert len(allowed.bad_records.found) == 2
    refused = Trainer(load_config(tiny_config, ["Train.bad_records = 1"]))
    touch(refused, [1, 3], unreadable)
    with pytest.raises(BadRecordError, match="the disk has a hole.*Train.bad_records = 1 allows 1"):
        refused.train()


# Two runs; tests/test_corruption.py has the checks in the fast part.
@pytest.mark.slow
def test_checks_for_corruption_change_nothing_and_find_a_flipped_bit(tiny_config):
    bindings = ["Corruption.replay_every = 3", "Corruption.compare_replicas_every = 2"]
    shown = io.StringIO()
    checked = Trainer(load_config(tiny_config, bindings), console=Console(file=shown))
    checked.show()
    assert "Replicas: 0% of the state's bytes" not in shown.getvalue()
    assert re.search(r"Replicas: \d+% of the state's bytes have copies", shown.getvalue())
    checked.train()
    plain = Trainer(load_config(tiny_config))
    plain.train()
    jax.tree.map(np.testing.assert_array_equal, checked.state, plain.state)
    more = Trainer(load_config(tiny_config, [*bindings, "Train.steps = 10"]))
    more.train(steps=2)
    more.state = with_parameter(more.state, "attention_norm_scale", lambda x: flip_bit(x, 5))
    with pytest.raises(
        CorruptionError, match=r"step 4: .*attention_norm_scale on device 5 \(alone"
    ):
        more.train()


def test_one_folder_has_one_writer(tiny_config, tmp_path, capsys):
    """From the command line, and from Python, which takes no lock of its own."""
    with RunLock.acquire(tmp_path / "run"):
        assert main(["train", str(tiny_config), "--workdir", str(tmp_path / "run")]) == 2
        with pytest.raises(UserError, match="is writing there"):
            Trainer(load_config(tiny_config), tmp_path / "run")
    error = capsys.readouterr().err
    assert "is writing there; wait for it, stop it with 'kill" in error
    assert "Traceback" not in error
    assert not (tmp_path / "run" / "config.gin").exists()


@pytest.mark.parametrize("name", ["1000", "7.orbax-checkpoint-tmp"])
def test_checkpoints_of_another_program_stay(name, tiny_config, tmp_path, capsys):
    """What looks like the remains of a save is removed where a run was, and nowhere else."""
    theirs = tmp_path / "model" / "checkpoints" / name / "model.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"weights")
    for _ in range(2):  # the first one leaves nothing that makes it a run's
        assert main(["train", str(tiny_config), "--workdir", str(tmp_path / "model")]) == 2
        error = capsys.readouterr().err
        assert f"{theirs.parent} is not a jaxtrain checkpoint" in error
        assert "Traceback" not in error
    with pytest.raises(UserError, match="no config.gin to mark this folder as a run"):
        Trainer(load_config(tiny_config), tmp_path / "model")
    assert theirs.read_bytes() == b"weights"
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["checkpoints"]

    Trainer(load_config(tiny_config), tmp_path / "model", read_only=True)
    (tmp_path / "model" / "config.gin").write_text("")  # as after a run's first save was killed
    Trainer(load_config(tiny_config), tmp_path / "model")
    assert not theirs.exists()


def test_settings_that_cannot_work_are_refused(tiny_config):
    bindings = ["Guard.policy = 'skip'", "Exchange.method = 'local_sgd'", "Exchange.period = 2"]
    with pytest.raises(UserError, match="Guard.policy='skip' with Exchange.method='local_sgd'"):
        Trainer(load_config(tiny_config, bindings))
