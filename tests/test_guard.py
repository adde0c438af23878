"""The verdict over a step is numpy's, and what the host does about it; settings."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxtrain.config.errors import UserError
from jaxtrain.run.metrics.log import MetricsLog
from jaxtrain.training import guard as guarding
from jaxtrain.training.guard import BadStepError, Guard, History, Rewind, Rewinds, judge

# -- the verdict -----------------------------------------------------------------------------------


def test_thresholds_are_numpys_over_the_good_steps_of_the_window():
    settings = Guard(policy="skip", spike_sigma=2.5, window=8)

    @jax.jit
    def step(metrics, history):
        scale = jnp.ones(2)
        found = judge(settings, metrics, history=history, loss_scale=scale, dynamic=False)
        return found.good, found.history, found.metrics

    rng = np.random.default_rng(0)
    losses = (3.0 + rng.standard_normal(40) * 0.3).astype(np.float32)
    norms = (1.0 + rng.standard_normal(40) * 0.1).astype(np.float32)
    losses[[2, 20]], norms[[15, 27]] = [np.nan, 9.0], [np.inf, 5.0]
    history, good = History.empty(8), []
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        said_good, history, found = step({"loss": loss, "grad_norm": norm}, history)
        expected = [math.inf] * 2
        if len(good) >= 4:
            last = np.array(good[-8:], np.float64)
            expected = (last.mean(0) + 2.5 * last.std(0)).tolist()
        thresholds = [float(found[f"{name}_threshold"]) for name in ("loss", "grad_norm")]
        assert thresholds == pytest.approx(expected, rel=1e-5)
        finite = np.isfinite([loss, norm]).all()
        is_good = bool(finite and loss <= expected[0] and norm <= expected[1])
        assert bool(said_good) == is_good == (found["bad"] == 0.0), number
        if is_good:
            good.append((loss, norm))
    assert int(history.count) == len(good) <= 36


def rescaled(scale, loss=1.0, norm=1.0, good_steps=0.0):
    verdict = judge(
        Guard(),
        {"loss": jnp.float32(loss), "grad_norm": jnp.float32(norm)},
        history=(),
        loss_scale=jnp.float32([scale, good_steps]),
        dynamic=True,
    )
    told = {name: float(verdict.metrics[name]) for name in ("skipped", "bad")}
    return bool(verdict.good), told, verdict.loss_scale.tolist()


def test_an_overflow_halves_the_scale_until_there_is_nothing_left_to_halve():
    scale, halvings = 2.0**15, 0
    while True:
        good, told, (after, _) = rescaled(scale, norm=math.inf)
        assert not good
        if told["bad"]:
            break
        assert told["skipped"] == 1.0
        assert after == scale / 2
        scale, halvings = after, halvings + 1
    assert (scale, halvings, told["skipped"]) == (1.0, 15, 0.0)


def test_a_loss_that_is_not_finite_is_not_the_scales_business():
    for loss in (math.nan, math.inf):
        good, told, after = rescaled(2.0**15, loss=loss, norm=math.nan, good_steps=7.0)
        assert (good, told) == (False, {"skipped": 0.0, "bad": 1.0})
        assert after == [2.0**15, 7.0]


def test_the_scale_does_not_grow_past_what_float16_can_use():
    last = guarding.GOOD_STEPS_TO_DOUBLE - 1.0
    assert rescaled(2.0**23, good_steps=last)[2] == [2.0**24, 0.0]
    assert rescaled(2.0**24, good_steps=last)[2] == [2.0**24, 0.0]


# -- the host --------------------------------------------------------------------------------------


def make_log(workdir, guard: Guard, **changes):
    settings = {
        "total_steps": 100, "unit": "tokens", "units_per_step": 64, "flops_per_step": None,
        "peak_flops": None, "first_step": 0, "log_every": 100, "terminal": Console(quiet=True),
    }  # fmt: skip
    return MetricsLog(workdir, **(settings | changes), guard=guard)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def numbers(loss=2.0, norm=1.0, bad=None, **more):
    values = {"loss": loss, "grad_norm": norm, "learning_rate": 0.1, **more}
    values |= {} if bad is None else {"bad": bad}
    return {name: jnp.float32(value) for name, value in values.items()}


def test_so_many_bad_steps_in_a_row_stop_the_run(tmp_path):
    log = make_log(tmp_path, Guard(policy="skip", max_bad_steps=3))
    verdicts = [1, 1, 0, 1, 1, 1]
    for step, bad in enumerate(verdicts, 1):
        log.later(step, numbers(math.nan if bad else 2.0, bad=bad))
    with pytest.raises(BadStepError, match=r"after 3 in a row \(Guard.max_bad_steps\)") as raised:
        log.flush()
    log.close()
    assert raised.value.step == 6
    assert isinstance(raised.value, FloatingPointError)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 4, 5, 6]


SPIKE = {"loss_threshold": 3.0, "grad_norm_threshold": 1.5}


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (numbers(math.inf), "the loss is inf"),
        (numbers(norm=math.nan), "the gradient norm is nan"),
        (numbers(9.0, bad=1, **SPIKE), "the loss spikes to 9, above 3 (Guard.spike_sigma)"),
        (numbers(norm=2.0, bad=1, **SPIKE), "the gradient norm spikes to 2, above 1.5"),
    ],
)
@pytest.mark.parametrize("policy", ["stop", "rewind"])
def test_stop_and_rewind_say_which_step_and_why(tmp_path, policy, metrics, why):
    log = make_log(tmp_path, Guard(policy=policy))
    log.later(1, numbers())
    log.later(7, metrics)
    with pytest.raises(BadStepError if policy == "stop" else Rewind) as raised, log.pause():
        pytest.fail("the state of a bad step would have been saved")
    log.close()
    assert raised.value.step == 7
    assert f"step 7 is bad, {why}" in str(raised.value)
    assert [line["step"] for line in lines(tmp_path)] == [1, 7]


def test_an_overflow_that_the_loss_scale_takes_care_of_is_not_bad(tmp_path):
    log = make_log(tmp_path, Guard())
    log.later(2, numbers(norm=math.inf, bad=0, skipped=1.0))
    log.close()
    assert lines(tmp_path) == []


def test_a_rewind_always_passes_over_the_bad_batch():
    settings = Guard(policy="rewind", rewind_steps=100, skip_batches=200)
    assert settings.batches_to_skip(bad_step=450, restored_step=300) == 200
    assert settings.batches_to_skip(bad_step=450, restored_step=0) == 450


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spike_sigma": 0.0}, "Guard.spike_sigma=0.0; use None or a number above 0"),
        ({"spike_sigma": 3.0, "window": 3}, "Guard.window=3; use at least 4 steps"),
        ({"policy": "skip", "max_bad_steps": 0}, "Guard.max_bad_steps=0; use at least 1"),
        (
            {"policy": "rewind", "skip_batches": 50},
            "Guard.skip_batches=50 is below Guard.rewind_steps=100: the bad batch would be read "
            "again; use at least 100",
        ),
        (
            {"policy": "skip", "rewind_steps": 50},
            "Guard.rewind_steps=50 has no effect for Guard.policy='skip' and Guard.spike_sigma="
            "None; leave it at 100 or set Guard.policy='rewind'",
        ),
        (
            {"policy": "skip", "window": 64},
            "Guard.window=64 has no effect for Guard.policy='skip' and Guard.spike_sigma=None; "
            "leave it at 128 or set Guard.spike_sigma",
        ),
        (
            {"max_bad_steps": 3},
            "Guard.max_bad_steps=3 has no effect for Guard.policy='stop' and Guard.spike_sigma="
            "None; leave it at 10 or set Guard.policy to 'skip' or 'rewind'",
        ),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(UserError) as refusal:
        Guard(**changes)
    assert str(refusal.value) == sentence


def test_rewinds_from_one_step_end_and_a_later_step_counts_anew():
    rewinds = Rewinds(Guard(policy="rewind", rewind_steps=5, max_bad_steps=2))
    first, later = Rewind(20, "loss is NaN"), Rewind(21, "loss is NaN")
    assert [rewinds.target(first), rewinds.target(first), rewinds.target(later)] == [15, 15, 16]
    assert rewinds.target(later) == 16
    with pytest.raises(BadStepError, match="step 20 is bad"):
        rewinds.target(first)  # an earlier bad step does not get past step 21
