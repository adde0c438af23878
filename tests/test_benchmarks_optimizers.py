"""The table of update rules: every rule has its grid, and a training is what a run is."""

import json

import jax
import numpy as np
import pytest

from benchmarks import optimizers, tuning
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.optimizers.rule import rules
from jaxtrain.training.preflight.preflight import check

PAGE = f"before\n\n{optimizers.TABLE.begin}\n{optimizers.TABLE.end}\n\nafter\n"
SMALL = ("Train.global_batch_size = 16", "Train.eval_batches = 2", "MLP.widths = (64, 8, 10)")
TINY = optimizers.Task("mlp_digits", SMALL, target=2.2, factors=(1.0, 3.0), steps=20)


def test_every_rule_has_a_grid_around_its_custom():
    assert set(rules()) <= set(optimizers.GRIDS)
    for rule, grid in optimizers.GRIDS.items():
        assert grid.why
        for task in optimizers.TASKS.values():
            assert len(set(task.rates(rule))) == 3
            assert grid.custom in task.rates(rule)
            config = task.of(rule)
            check(config, device_count=1, platform="cpu")
            assert config.optimizer.name == (grid.name or rule)


@pytest.fixture
def tiny(monkeypatch):
    """Both tasks a few steps of a small MLP."""
    for task in optimizers.TASKS:
        monkeypatch.setitem(optimizers.TASKS, task, TINY)


# Trains; the choice of rates is in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sam", "schedule_free"])
def test_a_training_at_a_rate_is_the_runs(rule):
    config = TINY.of(rule)
    tuned = tuning.Tuned(config, tuning.Course(config))
    rate = config.optimizer.learning_rate
    tuned.train(10 * rate, 10)  # one after another is not changed by it
    trial = tuned.train(rate, 10)
    assert trial.steps == [10, 20]
    run = Trainer(config, devices=jax.devices()[:1])
    run.train(10)
    middle = run.evaluate()["eval_loss"]
    run.train(10)
    np.testing.assert_allclose(trial.heldout, [middle, run.evaluate()["eval_loss"]], rtol=1e-5)


def test_rows_are_written_read_back_and_gone_on_with(tiny, tmp_path):
    page, folder = tmp_path / "page.md", tmp_path / "trials"
    page.write_text(PAGE)
    words = ["sgd", "--page", str(page), "--folder", str(folder)]
    optimizers.main(words)
    cells = optimizers.TABLE.told(page.read_text())["sgd"]
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * len(TINY.factors)
    assert (tmp_path / "page.png").read_bytes()[1:4] == b"PNG"
    losses = {line["rate"]: line["heldout"][-1] for line in lines if line["task"] == "quickstart"}
    assert float(cells[3]) == pytest.approx(min(losses.values()), abs=5e-4)
    assert losses[float(cells[0].strip(optimizers.EDGE))] == min(losses.values())
    # One training was not done yet, and the row not written: that one alone is done.
    kept = lines[:-1]
    (folder / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    page.write_text(PAGE)
    optimizers.main(words)
    again = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert again[:-1] == kept
    assert again[-1]["heldout"] == lines[-1]["heldout"]
    assert optimizers.TABLE.told(page.read_text())["sgd"][:7] == cells[:7]


def test_a_row_says_which_rate_was_best_and_what_was_not_reached():
    def trial(rate: float, losses: list[float]) -> tuning.Trial:
        return tuning.Trial(rate, [10, 20], losses, cpu_seconds=0.5, state_bytes=8.0)

    some = [trial(0.1, [3.0, 2.9]), trial(0.3, [2.7, 2.6]), trial(1.0, [2.5, float("nan")])]
    other = [trial(0.1, [0.3, 0.2]), trial(0.3, [1.0, 0.4])]
    cells = optimizers.cells_of({"quickstart": some, "ResNet-20": other})
    assert cells == ["0.3", "10", "5.0", "2.600", "8.00", "0.1*", "10", "5.0", "0.200", "8.00"]
    missed = optimizers.cells_of({"quickstart": some[:1]})
    assert missed == ["0.1*", "not reached", "", "2.900", "8.00"]


def test_a_rule_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        optimizers.main(["adamv"])
    assert "did you mean 'adam" in capsys.readouterr().err
