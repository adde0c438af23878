"""Calibration by one measured step: what it scales, what it leaves, and what runs it takes."""

import csv
import dataclasses
import json

import numpy as np
import pytest

from benchmarks.calibrated import by_one_run, calibrated_bars, fit_exponents, pairs_of
from benchmarks.fitting import Prediction
from benchmarks.predictions import FILE, read
from jaxtrain import load_config, plan
from jaxtrain.__main__ import main
from jaxtrain.analysis.planning.calibrate import by_measured, by_run
from jaxtrain.analysis.planning.machines.calibration import Calibration, StepProfile
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.plan import _plan, silent
from jaxtrain.analysis.planning.search import search as searching
from jaxtrain.analysis.planning.search import space
from jaxtrain.analysis.planning.search.search import price, search
from jaxtrain.analysis.planning.timing.efficiency_factors import error_bar
from jaxtrain.config.errors import UserError
from jaxtrain.training.flops import flops_per_step

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


def test_the_exponent_falls_with_the_distance_and_with_each_difference():
    """By hand: half of the differences of the fractions, the model's class, and two axes."""
    measured = StepProfile("Mixtral", frozenset({"pipe"}), {"matmuls": 0.7, "bubble": 0.3})
    other = StepProfile("dense", frozenset({"tensor"}), {"matmuls": 0.6, "tensor": 0.4})
    assert measured.distance(other) == pytest.approx((0.1 + 0.3 + 0.4) / 2)
    assert measured.differences(other) == 3
    assert measured.exponent(other) == pytest.approx(1 / (1 + 5.0 * 0.4 + 5.4 * 3))
    assert measured.exponent(measured) == 1.0
    known = Calibration(1.2, 0.8, "", "dense", measured)
    assert known.factor(measured) == pytest.approx(1.5)
    assert 1 < known.factor(other) == pytest.approx(1.5 ** (1 / 19.2))
    # Of all steps of such a kind: at a distance of 1, or of 0 if the factor is below 1.
    kind = ("dense", frozenset({"tensor"}))
    assert known.least_factor(*kind) == pytest.approx(1.5 ** (1 / (1 + 5.0 + 16.2)))
    less = dataclasses.replace(known, measured=0.4)
    assert less.least_factor(*kind) == pytest.approx(0.5 ** (1 / (1 + 16.2)))


PIPELINE = ("Mesh.pipe=2", "Pipeline.microbatches=8")


@pytest.mark.parametrize("name", ["compute", "exposed", "bubble", "hidden", "seconds", "chunks"])
def test_another_layout_is_scaled_in_all_its_parts(name):
    target, other = parse_target(TARGET), small(*PIPELINE)
    plain, own = price(other, target).time, price(small(), target).time
    scaled = price(other, by_measured(small(), target, 3 * own.seconds)).time
    # A pipeline, and as much as its bubble and traffic take.
    distance = own.profile.distance(plain.profile)
    assert 0.11 < distance < 0.2
    factor = 3 ** (1 / (1 + 5.0 * distance + 5.4))
    assert getattr(scaled, name) == pytest.approx(factor * getattr(plain, name))
    if name in ("compute", "exposed", "bubble", "seconds"):
        assert getattr(plain, name) > 0


# The cases that are left run the same code.
@pytest.mark.slow_cases("llama_1b-dense")
@pytest.mark.parametrize(("name", "kind"), [
    ("gpt2_124m", "dense"), ("llama_1b", "dense"), ("mixtral_8x7b", "Mixtral"),
])  # fmt: skip
def test_the_kind_of_a_model_is_its_family_or_the_class_of_a_mixture(name, kind):
    config = load_config(name, ["Attention.kernel='tpu'"])
    assert price(config, parse_target("v5p:4x4x4")).time.profile.model == kind


def test_fractions_of_the_step_sum_to_one():
    made = price(small(*PIPELINE), parse_target(TARGET)).time
    parts = made.profile.composition
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["bubble"] == pytest.approx(made.bubble / made.seconds)
    exposed = ("weights", "tensor", "other collectives", "slices and hosts")
    assert sum(parts[name] for name in exposed) == pytest.approx(made.exposed / made.seconds)


# A whole search; tests/test_planning_search.py has another in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.7, 5.0])
@pytest.mark.rotated("searches")
def test_no_layout_of_a_calibrated_search_is_faster_than_its_bound(factor, monkeypatch):
    """With a bound above its time a layout could be skipped that is the best."""
    monkeypatch.setattr(space, "POLICIES", ("none",))
    monkeypatch.setattr(searching, "_may_be_shown", lambda *_: True)
    target = parse_target(TARGET)
    config = small("Train.accumulation=2")
    measured = small(*PIPELINE)
    scaled = by_measured(measured, target, factor * seconds(measured, target))
    over = []

    def fastest(config, layout, target, fewest):
        found, tried = make(config, layout, target, fewest)
        over.append(found.price.seconds / layout.least_seconds)
        return found, tried

    make = searching._fastest
    monkeypatch.setattr(searching, "_fastest", fastest)
    found = search(config, scaled)
    assert found.slower == 0
    assert len(over) >= 10
    assert 1 <= min(over) < 2


# Compiles for TPUs; closed forms are scaled in the fast part.
@pytest.mark.slow
@pytest.mark.rotated("schedules")
def test_the_time_of_a_compiled_schedule_is_not_scaled():
    """What was compiled then says nothing of the time: the factor is that of closed forms."""
    few = ["GPT.num_layers=1", "GPT.embed_dim=256", "GPT.num_heads=2", "GPT.vocab_size=1024"]
    few += ["GPT.context_length=256", "TextData.sequence_length=256"]
    config, target = small(*few, "TextData.tokenizer='byte'"), parse_target(TARGET)
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
    assert "this step is the measured one" in said.assumptions[-1]
    other = price(small(*PIPELINE), known).time
    assert "similar to the measured one to the power of 0.1" in other.assumptions[-1]
    assert f"its times are multiplied by {other.factor:.3g}" in other.assumptions[-1]
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
    own = price(small(*EIGHT), parse_target("v5e:2x4")).time
    assert found.name == TARGET
    assert found.calibration.measured == pytest.approx(np.median([0.7, 0.9, 0.8, 0.7]))
    assert found.calibration.ratio == pytest.approx(found.calibration.measured / own.seconds)
    made = plan(small(), TARGET, compile=False, calibrate=run)
    plain = price(small(), parse_target(TARGET)).time
    exponent = 1 / (1 + 5.0 * own.profile.distance(plain.profile) + 5.4)  # it has a tensor axis
    factor = found.calibration.ratio**exponent
    assert made.time.seconds == pytest.approx(factor * plain.seconds)


def test_no_step_is_faster_than_the_peak_of_its_chips():
    config, target = small(), parse_target(TARGET)
    at_peak = flops_per_step(config) / (4 * 197e12)  # v5e's bfloat16, by Google
    assert by_measured(config, target, 1.01 * at_peak).calibration is not None
    with pytest.raises(UserError, match=r"less than the .* at the peak of 'v5e:2x2'"):
        by_measured(config, target, 0.99 * at_peak)


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
    (["--measured", "1e-4"], "the target and the configuration must be those of the measured run"),
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
    known, other = (one["time"]["calibration"] for one in (first, second))
    assert known["factor"] == pytest.approx(known["measured"] / known["predicted"])
    assert known["exponent"] == 1
    assert other["factor"] == pytest.approx(known["ratio"] ** other["exponent"])
    assert 0 < other["exponent"] < 1 / (1 + 5.4)
    plain = seconds(small("Mesh.tensor=2"), parse_target(TARGET))
    assert second["step_seconds"] == pytest.approx(other["factor"] * plain)


def test_each_run_is_predicted_by_the_others_of_its_stack_chip_and_family():
    point = read(next(row for row in csv.DictReader(FILE.open()) if row["id"] == "v6e-8b-8"))

    def made(name, ratio, **changes):
        return Prediction(dataclasses.replace(point, name=name, **changes), ratio)

    runs = [
        made("a", 1.2), made("b", 1.5), made("c", 2.0, chip="v5e"), made("d", 3.0, stack="other"),
        made("e", 4.0, family="mixture"),
    ]  # fmt: skip
    pairs = {one.point.name: one.ratio for one in by_one_run(runs, lambda stack: None)}
    assert pairs == {"a": pytest.approx(1.2 / 1.5), "b": pytest.approx(1.5 / 1.2)}
    runs += [made("f", 1.2, chip="v5p", stack="f"), made("g", 1.5, chip="v5p", stack="f")]
    table = calibrated_bars(runs)
    assert "| dense | TPU | 4 | 2 | 35.0% | 22.5% | 22.5% |" in table
    assert "mixture" not in table


def test_constants_of_the_exponent_come_from_other_stacks():
    """Pairs at distance 0.5 of which another run shares a third of the logarithm, or nothing."""
    point = read(next(row for row in csv.DictReader(FILE.open()) if row["id"] == "v6e-8b-8"))

    def pair(stack, first, second):
        for name, ratio, mixed in (("a", first, 0.0), ("b", second, 0.5)):
            profile = StepProfile("dense", frozenset(), {"matmuls": 1 - mixed, "tensor": mixed})
            one = dataclasses.replace(point, name=f"{stack}{name}", stack=stack, profile=profile)
            yield Prediction(one, ratio)

    alike = [*pair("one", 8.0, 2.0), *pair("two", 8.0, 2.0)]
    # 8 and 2: the factor of 8 to the power of 1/3 is right, that of 2 is too small as it is.
    per_distance, per_difference = fit_exponents(pairs_of(alike)[:1])
    assert 1 / (1 + 0.5 * per_distance) == pytest.approx(1 / 3, abs=0.02)
    assert per_difference == pytest.approx(5.4)
    other = [*pair("three", 8.0, 1.0)]
    known = {one.point.name: one.ratio for one in by_one_run([*alike, *other])}
    own, _ = fit_exponents(pairs_of(other)[:1])
    assert own > 50
    assert known["threeb"] < 0.9
