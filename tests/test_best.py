"""The best checkpoint stays beside the newest, a run without a better one ends; both restart."""

import argparse
import math
import shlex

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.run.checkpoint.sealing import sealed_steps
from jaxtrain.run.commands.train import _command
from jaxtrain.run.evaluation import Record
from jaxtrain.run.loop import Loop
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Best, load_config

# By step: the best are those of 1, 2 and 5; three evaluations after 5 are none.
LOSSES = {1: 5.0, 2: 4.0, 3: 6.0, 4: 4.0, 5: 3.0, 6: math.nan, 7: 3.5, 8: 9.0, 9: 1.0, 10: 8.0}


def seen(settings: Best, values: list[float]) -> Record:
    record = Record(settings)
    for step, value in enumerate(values):
        record.see(step, {settings.metric: value})
    return record


def test_what_is_not_better_than_the_best_is_waited_for():
    record = seen(Best(metric="eval_loss", patience=3), list(LOSSES.values())[:7])
    assert (record.steps, record.value, record.since) == ((0, 1, 4), 3.0, 2)
    assert not record.ends_run
    assert not record.see(7, {"eval_loss": 3.0})
    assert record.ends_run
    assert not seen(Best(metric="eval_loss"), [1.0, *[2.0] * 99]).ends_run


def test_the_highest_is_the_best_where_that_is_said():
    record = seen(Best(metric="eval_accuracy", order="highest"), [0.5, 0.7, 0.6, 0.8])
    assert record.steps == (0, 1, 3)


def test_metrics_lines_up_to_a_step_say_the_same():
    settings = Best(metric="eval_loss", patience=3)
    lines = [{"step": 0, "loss": 1.0}]
    for step, value in LOSSES.items():
        lines += [{"step": step, "loss": 0.0}, {"step": step, "eval_loss": value}]
    lines[12]["eval_loss"] = None  # what JSON makes of a NaN
    for last in LOSSES:
        record = Record.of(settings, lines, last)
        expected = Record(settings)
        for step in range(1, last + 1):
            expected.see(step, {"eval_loss": LOSSES[step]})
        assert record == expected, last
    nothing = Record.of(settings, [], 5)
    assert nothing.steps == ()
    assert math.isnan(nothing.value)


@pytest.fixture
def losses(monkeypatch):
    """Evaluations whose losses are LOSSES."""
    monkeypatch.setattr(Loop, "evaluate", lambda self, log: {"eval_loss": LOSSES[self.steps_done]})


def config_of(tiny_config, *bindings: str):  # noqa: ANN201
    return load_config(
        tiny_config,
        ["Train.steps=10", "Train.eval_every=1", "Train.save_every=1", "Checkpoint.keep=1",
         "Best.metric='eval_loss'", *bindings],
    )  # fmt: skip


# Four starts of a run; the next tests have one each.
@pytest.mark.slow
def test_a_restarted_run_keeps_the_best_and_ends_where_it_should(tiny_config, tmp_path, losses):
    config = config_of(tiny_config, "Best.patience=3")
    kept = []
    for steps in (3, None, None):
        trainer = Trainer(config, tmp_path / "run")
        trainer.train(steps)
        trainer.close()
        kept.append((trainer.steps_done, sealed_steps(tmp_path / "run" / "checkpoints")))
    assert kept == [(3, [2, 3]), (8, [5, 8]), (8, [5, 8])]
    patient = Trainer(config_of(tiny_config, "Best.patience=4"), tmp_path / "run")
    patient.train()
    patient.close()
    assert patient.steps_done == 10
    assert sealed_steps(tmp_path / "run" / "checkpoints") == [9, 10]


@pytest.mark.parametrize(("done", "ended"), [(8, True), (10, False)])
def test_the_command_that_goes_on_after_an_early_end_has_no_patience(
    done, ended, tiny_config, tmp_path
):
    said = argparse.Namespace(gin_bindings=["Best.patience=3"], allow_imports=False)
    config = config_of(tiny_config, "Best.patience=3")
    words = shlex.split(_command(said, "tiny", tmp_path, config, done))
    assert words[-1] == f"Train.steps = {2 * done}"
    assert ("Best.patience = 0" in words[words.index("Best.patience=3") :]) == ended


def test_a_better_evaluation_is_saved_though_no_save_is_due(tiny_config, tmp_path, losses):
    config = config_of(tiny_config, "Train.save_every=0", "Train.steps=8", "Checkpoint.keep=2")
    trainer = Trainer(config, tmp_path / "run")
    trainer.train()
    trainer.close()
    assert sealed_steps(tmp_path / "run" / "checkpoints") == [5, 8]


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["Train.eval_every=0"], r"set Train\.eval_every"),
        (["Best.metric=None", "Best.patience=2"], "nothing is compared"),
        (["Best.metric='eval_accuracy'"], r"Best\.order='highest'"),
    ],
)
def test_what_cannot_be_compared_is_refused(bindings, said, tiny_config):
    with pytest.raises(UserError, match=said):
        preflight.check(config_of(tiny_config, *bindings), device_count=8, platform="cpu")


def test_an_unknown_value_is_named_with_the_nearest():
    record = Record(Best(metric="eval_los"))
    with pytest.raises(UserError, match="did you mean 'eval_loss'"):
        record.see(1, {"eval_loss": 1.0, "eval_accuracy": 0.5})


def test_a_run_tells_so_before_its_first_step(tiny_config, tmp_path):
    trainer = Trainer(config_of(tiny_config, "Best.metric='eval_los'"), tmp_path / "run")
    with pytest.raises(UserError, match="did you mean 'eval_loss'"):
        trainer.train()
    assert trainer.steps_done == 0
    trainer.close()
