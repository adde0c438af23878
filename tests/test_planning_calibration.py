"""Calibration by one measured step: what it scales, what it leaves, and what runs it takes."""

import csv
import dataclasses
import json

import numpy as np
import pytest

from benchmarks.calibrated import by_one_run, calibrated_bars
from benchmarks.fitting import Prediction
from benchmarks.predictions import FILE, read
from jaxtrain import load_config, plan
from jaxtrain.__main__ import main
from jaxtrain.analysis.planning.calibrate import by_measured, by_run
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.plan import _plan, silent
from jaxtrain.analysis.planning.search import search as searching
from jaxtrain.analysis.planning.search import space
from jaxtrain.analysis.planning.search.search import price, search
from jaxtrain.analysis.planning.timing.efficiency_factors import error_bar
from jaxtrain.config.errors import UserError

SMALL = [
    "GPT.num_layers=2",
    "Train.accumulation=1",
    "Train.global_batch_size=32",
    "Attention.kernel='tpu'",
]
TARGET = "v5e:2x2"
EIGHT = ["Mesh.data=1", "Mesh.fsdp=4", "Mesh.tensor=2"]


def small(*bindings):
    return load_config("gpt2_124m", [*SMALL, *bindings])


def seconds(config, target):
    return price(config, target).time.seconds


def test_the_layout_that_was_measured_takes_what_was_measured():
    made = plan(small(), TARGET, compile=False, measured=0.5)
    assert made.time.seconds == pytest.approx(0.5)
    assert made.time.mfu == pytest.approx(
        made.time.model_flops_per_device / 0.5 / made.target.chip.bf16_flops
    )
    assert made.to_json()["time"]["calibration"]["measured"] == 0.5


@pytest.mark.parametrize("name", ["compute", "exposed", "bubble", "hidden", "seconds", "chunks"])
def test_another_layout_is_scaled_in_all_its_parts(name):
    target, other = parse_target(TARGET), small("Mesh.pipe=2", "Pipeline.microbatches=8")
    plain = price(other, target).time
    scaled = price(other, by_measured(small(), target, 3 * seconds(small(), target))).time
    assert getattr(scaled, name) == pytest.approx(3 * getattr(plain, name))
    if name in ("compute", "exposed", "bubble", "seconds"):
        assert getattr(plain, name) > 0


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_search_finds_the_same_layouts_in_scaled_times(factor, monkeypatch):
    """A bound that stays as it was prunes what should be found, or nothing."""
    monkeypatch.setattr(space, "POLICIES", ("none", "full"))
    target = parse_target("v5e:2x4")
    config = small("GPT.num_layers=4", "Train.global_batch_size=64")
    scaled = by_measured(config, target, factor * seconds(config, target))
    plain, found = search(config, target), search(config, scaled)
    assert [one.bindings for one in found.candidates] == [one.bindings for one in plain.candidates]
    assert found.slower == plain.slower > 0
    assert found.candidates[0].price.seconds == pytest.approx(
        factor * plain.candidates[0].price.seconds
    )
    bounds = [
        [layout.least_seconds for layout in searching._list_layouts(config, one, 1, {})]
        for one in (target, scaled)
    ]
    assert bounds[1] == pytest.approx([factor * bound for bound in bounds[0]])


def test_the_time_of_a_compiled_schedule_is_not_scaled():
    """What was compiled then says nothing of the time: the factor is that of closed forms."""
    config, target = small("GPT.num_layers=1"), parse_target(TARGET)
    known = by_measured(config, target, 2 * seconds(config, target))
    made = _plan(config, known, "quick", progress=silent)
    if made.compiled is None:
        pytest.skip(f"libtpu is not there: {made.no_compiler}")
    assert made.time.estimate is None
    assert made.time.seconds == pytest.approx(2 * seconds(config, target))
    assert _plan(config, target, "quick", progress=silent).time.estimate is not None


def test_the_error_bar_is_that_of_a_known_stack_in_its_family_alone():
    target = parse_target(TARGET)
    known = by_measured(small(), target, 0.5)
    assert error_bar(known, "dense") < error_bar(target, "dense")
    assert error_bar(known, "mixture") == error_bar(target, "mixture")
    said = price(small(), known).time
    assert said.error_bar == error_bar(known, "dense")
    assert "--measured=0.5 measured 500" in said.assumptions[-1]
    assert f"within {said.error_bar:.0%}" in said.assumptions[-1]


def write_run(folder, *bindings, lines=6):
    folder.mkdir()
    (folder / "config.gin").write_text(small(*bindings).operative())
    steps = [60.0, 2.0, *([0.7, 0.9, 0.8] * lines)][:lines]
    text = [json.dumps({"step": n, "step_seconds": took}) for n, took in enumerate(steps, 1)]
    text.insert(3, json.dumps({"step": 3, "eval_loss": 1.0}))
    (folder / "metrics.jsonl").write_text("\n".join(text) + "\n")
    return folder


def test_a_run_calibrates_by_its_median_after_the_first_lines(tmp_path):
    """Of another layout on another number of chips: its own prediction on these is the divisor."""
    run = write_run(tmp_path / "run", *EIGHT)
    found = by_run(run, parse_target(TARGET))
    own = seconds(small(*EIGHT), parse_target("v5e:2x4"))
    assert found.name == TARGET
    assert found.calibration.measured == pytest.approx(np.median([0.7, 0.9, 0.8, 0.7]))
    assert found.factor == pytest.approx(found.calibration.measured / own)
    made = plan(small(), TARGET, compile=False, calibrate=run)
    assert made.time.seconds == pytest.approx(found.factor * seconds(small(), parse_target(TARGET)))


@pytest.mark.parametrize(("bindings", "lines", "target", "said"), [
    ([], 4, TARGET, r"metrics.jsonl has 4 lines with step_seconds.*at least 5 are needed"),
    (["Mesh.simulated_devices=8"], 6, TARGET, "trained on simulated CPU devices"),
    (["Mesh.data=1", "Mesh.fsdp=3"], 6, TARGET, "mesh has 3 devices, and there is no v5e machine"),
    (["Attention.kernel='blocked'"], 6, "cpu:4", "no time is predicted for 'cpu:4'"),
    (["Attention.kernel='cudnn'"], 6, TARGET, "the measured configuration cannot run on 'v5e:2x2'"),
])  # fmt: skip
def test_a_run_that_says_nothing_of_the_chip_is_rejected(bindings, lines, target, said, tmp_path):
    run = write_run(tmp_path / "run", *bindings, lines=lines)
    with pytest.raises(UserError, match=said):
        by_run(run, parse_target(target))


@pytest.mark.parametrize(("words", "said"), [
    (["--measured", "0"], "--measured=0; use the seconds of a step"),
    (["--measured", "nan"], "--measured=nan; use the seconds of a step"),
    (["--measured", "1", "--calibrate", "run"], "use one of them"),
    (["--calibrate", "nowhere"], "no run there"),
    (["--measured", "1", "-b", "Mesh.tensor=[1, 2]"], "with several, use --calibrate RUN"),
])  # fmt: skip
def test_mistaken_options_are_rejected(words, said, capsys):
    assert main(["plan", "gpt2_124m", "--target", TARGET, "--no-compile", *words]) == 2
    assert said in capsys.readouterr().err


def test_layouts_side_by_side_are_calibrated_by_one_run(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    file = tmp_path / "plans.json"
    words = [word for binding in (*SMALL, "Mesh.tensor=[1, 2]") for word in ("-b", binding)]
    asked = ["plan", "gpt2_124m", "--target", TARGET, "--no-compile", *words]
    assert main([*asked, "--calibrate", str(run), "--json", str(file)]) == 0
    first, second = json.loads(file.read_text())["plans"]
    assert first["step_seconds"] == pytest.approx(np.median([0.7, 0.9, 0.8, 0.7]))
    factor = first["time"]["calibration"]["factor"]
    plain = seconds(small("Mesh.tensor=2"), parse_target(TARGET))
    assert second["step_seconds"] == pytest.approx(factor * plain)


def test_each_run_is_predicted_by_the_others_of_its_stack_chip_and_family():
    point = read(next(row for row in csv.DictReader(FILE.open()) if row["id"] == "v6e-8b-8"))

    def made(name, ratio, **changes):
        return Prediction(dataclasses.replace(point, name=name, **changes), ratio)

    runs = [
        made("a", 1.2), made("b", 1.5), made("c", 2.0, chip="v5e"), made("d", 3.0, stack="other"),
        made("e", 4.0, family="mixture"),
    ]  # fmt: skip
    pairs = {one.point.name: one.ratio for one in by_one_run(runs)}
    assert pairs == {"a": pytest.approx(1.2 / 1.5), "b": pytest.approx(1.5 / 1.2)}
    table = calibrated_bars(runs)
    assert "| dense | TPU | 2 | 1 | 35.0% | 22.5% |" in table
    assert "mixture" not in table
