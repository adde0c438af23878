"""`plan --goodput`: simulated runs against the closed form, exact bytes, and the command."""

import dataclasses
import itertools
import json
import random

import jax
import numpy as np
import pytest

from jaxtrain import Trainer, load_config, plan
from jaxtrain.__main__ import main
from jaxtrain.analysis.planning.goodput.goodput import simulate
from jaxtrain.analysis.planning.goodput.recovery import seconds_to_notice, state_bytes
from jaxtrain.run.checkpoint.save_schedule import DEFAULT_MTBF_HOURS, Costs
from jaxtrain.training.settings import Timeouts

# The keys that the contract promises.
KEYS = {"fraction", "p10", "p90", "save_every", "days", "interruptions", "simulated_fraction"}
BINDINGS = ["Train.global_batch_size=64", "Mesh.data=-1", "Mesh.fsdp=1", "Mesh.tensor=1"]
CONFIG = ["gpt_quickstart", "--no-compile", *(f"-b={binding}" for binding in BINDINGS)]


def planned(tmp_path, *more, target="h100:8x8"):
    file = tmp_path / "plan.json"
    assert main(["plan", *CONFIG, "--target", target, "--json", str(file), *more]) == 0
    return json.loads(file.read_text())["goodput"]


# -- the simulation ------------------------------------------------------------------------------

CASES = [
    (Costs(step=step, save=save, write=write, recovery=recovery, mtbf=mtbf, startup=100.0), every)
    for step, save, write, recovery, mtbf, every in itertools.product(
        (2.0, 15.0), (1.0, 30.0), (0.0, 120.0), (30.0, 900.0), (5e3, 5e4), (20, 150)
    )
]


@pytest.mark.parametrize(("costs", "every"), CASES, ids=str)
def test_simulated_runs_take_what_the_closed_form_says(costs, every):
    """To 1 %, and three standard errors of what was drawn."""
    steps = 30_000
    drawn = simulate(costs, steps, every, np.full(300, costs.mtbf), seed=1).seconds
    expected = costs.run_seconds(steps, every)
    error = 3 * drawn.std() / np.sqrt(len(drawn))
    assert abs(drawn.mean() - expected) <= max(0.01 * expected, error)
    assert error < 0.02 * expected  # so that the comparison says something


def test_a_run_without_failures_takes_its_steps_and_saves():
    costs = Costs(step=2.0, save=1.0, write=5.0, recovery=600.0, mtbf=1e30, startup=100.0)
    found = simulate(costs, 105, 10, np.full(3, costs.mtbf))
    assert found.seconds.tolist() == [100 + 105 * 2 + 11 + 5] * 3
    assert found.failures.tolist() == [0] * 3


def step_by_step(costs, steps, every, mtbf, draw):
    """One run, a step at a time, as a person would do it with pencil and paper."""
    clock, failures, saved, launch = 0.0, 0, 0, costs.startup
    while True:
        fails = clock + draw.expovariate(1 / mtbf)
        now, done, writing = clock + launch, saved, []
        while now <= fails and done < steps:
            now += costs.step
            done += 1
            if done % every == 0 or done == steps:
                now += costs.save
                writing.append((now + costs.write, done))
        complete = [step for when, step in writing if when <= fails]
        if complete and complete[-1] == steps:
            return now + costs.write, failures
        saved = max([saved, *complete])
        clock, failures, launch = fails, failures + 1, costs.recovery


def test_simulated_runs_are_those_done_step_by_step():
    costs = Costs(step=3.0, save=2.0, write=25.0, recovery=40.0, mtbf=400.0, startup=20.0)
    draw = random.Random(0)
    slow = np.array([step_by_step(costs, 205, 10, costs.mtbf, draw) for _ in range(3000)])
    fast = simulate(costs, 205, 10, np.full(3000, costs.mtbf), seed=3)
    for one, other in ((slow[:, 0], fast.seconds), (slow[:, 1], fast.failures)):
        error = np.hypot(one.std(), other.std()) / np.sqrt(3000)
        assert abs(one.mean() - other.mean()) < 4 * error
        for percent in (10, 50, 90):
            assert np.percentile(one, percent) == pytest.approx(
                np.percentile(other, percent), rel=0.05
            )


def test_a_seed_gives_the_same_runs_again():
    costs, every = CASES[0]
    rates = np.full(20, costs.mtbf)
    again = [simulate(costs, 500, every, rates, seed=seed).seconds for seed in (4, 4, 5)]
    assert (again[0] == again[1]).all()
    assert (again[0] != again[2]).any()


# -- what a failure costs ------------------------------------------------------------------------


def test_bytes_of_a_checkpoint_are_those_of_the_state(tiny_config):
    trainer = Trainer(load_config(tiny_config))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
    assert state_bytes(trainer.config, len(jax.devices())) == held


def test_a_hung_step_is_noticed_by_its_deadline():
    """30 s of silence in 38,236 of 44,184 failures, the deadline in the others."""
    silent = 5948 / 44184
    for deadlines, step, deadline in (
        (Timeouts(), 20.0, 200.0),  # ten times the median
        (Timeouts(), 1.0, 60.0),  # at least a minute
        (Timeouts(factor=3.0), 100.0, 300.0),
    ):
        expected = (1 - silent) * 30 + silent * deadline
        assert seconds_to_notice(deadlines, step) == pytest.approx(expected)
    # Without a deadline somebody has to look.
    assert seconds_to_notice(Timeouts(step=0.0), 1.0) > 1000


# -- the plan ------------------------------------------------------------------------------------


def test_the_section_of_a_plan(tmp_path, capsys):
    found = planned(tmp_path, "--goodput", "--price", "2")
    assert set(found) >= KEYS
    assert 0 < found["p10"] <= found["fraction"] <= found["p90"] < 1
    assert found["simulated_fraction"] == pytest.approx(found["fraction"], rel=0.01)
    assert found["mtbf_device_hours"] == DEFAULT_MTBF_HOURS
    assert found["mtbf_job_seconds"] == pytest.approx(DEFAULT_MTBF_HOURS * 3600 / 64)
    assert found["dollars"] == pytest.approx(found["days"] * 24 * 64 * 2)
    assert sum(found["losses"].values()) == pytest.approx(1 - found["fraction"])
    printed = capsys.readouterr().out
    for words in ("Llama 3 405B", "median of the table", "Best Train.save_every", "spare host"):
        assert words in printed


def test_a_given_rate_replaces_the_table(tmp_path, capsys):
    often = planned(tmp_path, "--mtbf", "40", "--tokens", "1e12")
    assert often["mtbf_job_seconds"] == pytest.approx(40 * 3600 / 64)
    assert "Llama 3 405B" not in capsys.readouterr().out
    seldom = planned(tmp_path, "--mtbf", "4000", "--tokens", "1e12")
    assert often["fraction"] < seldom["fraction"]
    assert often["save_every"] < seldom["save_every"]
    assert often["interruptions"] > 50 * seldom["interruptions"]
    assert often["simulated_fraction"] == pytest.approx(often["fraction"], rel=0.01)
    # A run of a hundred failures scatters less than the rates of others.
    assert often["p90"] - often["p10"] < 0.2
    names = {change["name"]: change["fraction"] for change in often["changes"]}
    gains = [fraction for name, fraction in names.items() if "by hand" not in name]
    assert min(gains) > often["fraction"] > names["restarts by hand instead"]


def test_the_interval_of_the_plan_is_the_best_and_the_configured_one_is_told(tmp_path, capsys):
    found = planned(tmp_path, "--mtbf", "40", "--tokens", "1e12", "-b", "Train.save_every=1000000")
    assert found["configured_save_every"] == 1_000_000
    assert found["configured_fraction"] < found["fraction"]
    assert "With Train.save_every=1000000 as configured" in capsys.readouterr().out


def test_storage_is_what_a_checkpoint_is_written_over(tmp_path):
    for size in (1.0, 4.0):
        found = planned(tmp_path, "--goodput", "--storage", str(size))["checkpoint"]
        # 8 hosts write a part each; the quickstart's devices hold the whole state.
        seconds = found["state_bytes"] / 8 / (size * 1e9)
        assert found["write_seconds"] == pytest.approx(seconds)
        assert found["restore_seconds"] == pytest.approx(found["host_bytes"] / (size * 1e9))


def test_a_save_that_waits_for_the_disk_takes_its_time_from_the_steps():
    fast = plan(load_config("gpt_quickstart", BINDINGS), "h100:1x8", compile=False, goodput=True)
    config = load_config("gpt_quickstart", [*BINDINGS, "Checkpoint.asynchronous=False"])
    slow = plan(config, "h100:1x8", compile=False, goodput=True)
    assert fast.goodput is not None
    assert slow.goodput is not None
    one, other = fast.goodput.saving, slow.goodput.saving
    assert other.write_seconds == 0
    assert other.step_seconds == pytest.approx(one.step_seconds + one.write_seconds)


def test_large_targets_have_a_line_unasked_and_small_ones_nothing(tmp_path, capsys):
    assert planned(tmp_path) is not None
    printed = capsys.readouterr().out
    assert "Goodput: about" in printed
    assert "Published failure rates" not in printed
    assert planned(tmp_path, target="h100:4x8") is None
    assert "oodput" not in capsys.readouterr().out


def test_a_machine_without_a_known_speed_has_no_goodput(tmp_path, capsys):
    assert planned(tmp_path, "--goodput", target="cpu:8") is None
    assert "Goodput: not known without the time of a step" in capsys.readouterr().out


def test_a_run_that_cannot_end_is_told_so(tmp_path, capsys):
    found = planned(tmp_path, "--mtbf", "0.1")
    assert found["days"] is None
    assert found["simulated_fraction"] is None
    assert "makes almost no progress" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--mtbf", "0"], "--mtbf=0; use device-hours per interruption"),
        (["--mtbf", "nan"], "--mtbf=nan; use device-hours per interruption"),
        (["--storage", "-1"], "--storage=-1; use GB/s of a host"),
    ],
)
def test_bad_amounts_are_rejected(more, words, capsys):
    assert main(["plan", *CONFIG, "--target", "h100:1x8", *more]) == 2
    assert words in capsys.readouterr().err


def test_a_budget_takes_none_of_them(capsys):
    assert main(["plan", "--budget", "1e17", "--goodput"]) == 2
    assert "leave out --goodput" in capsys.readouterr().err


def test_rates_that_stop_the_run_count_as_such():
    """Of the table's rates the highest leaves a run of this size no progress."""
    report = plan(
        load_config("gpt_quickstart", [*BINDINGS, "Train.global_batch_size=65536"]), "h100:8192x8",
        compile=False, tokens=1e15,
    )  # fmt: skip
    assert report.goodput is not None
    slow = dataclasses.replace(
        report.goodput, recovery=dataclasses.replace(report.goodput.recovery, replace=5000.0)
    )
    assert slow.bounds[0] < slow.fraction < slow.bounds[1]
    assert slow.bounds[0] < 0.02


def test_plans_side_by_side_have_a_column_of_it(capsys):
    assert main(["plan", *CONFIG, "--target", "h100:1x8", "--target", "h100:2x8", "--goodput"]) == 0
    printed = capsys.readouterr().out
    assert "goodput" in printed
    assert "days with" in printed
