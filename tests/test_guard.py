"""Bad steps leave the state as it was on every layout; spikes are numpy's; what the host does."""

import dataclasses
import functools
import io
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lower_step, make_layout, make_program, text_batch
from rich.console import Console

from jaxtrain import guard as guarding
from jaxtrain.checkpoint import Checkpoint, Checkpoints
from jaxtrain.errors import UserError
from jaxtrain.guard import BadStepError, Guard, History, Rewind, judge
from jaxtrain.metrics import MetricsLog
from jaxtrain.models.gpt import GPT
from jaxtrain.optimizer import Optimizer, Schedule, make_optimizer, make_schedule
from jaxtrain.pipeline.schedules import Pipeline

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, context_length=8)
FIRST, BROKEN, SECOND = (text_batch(rows=8, length=8, vocab_size=32, seed=n) for n in range(3))
BROKEN.loss_mask[3, 5] = np.nan
# A learning rate that moves, so that it shows whose steps it counts.
SCHEDULE = make_schedule(Schedule(name="linear"), 1e-2, 100)
SKIP = Guard(policy="skip", spike_sigma=1e4, window=4)
LAYOUTS = {
    "one": ({}, {}),
    "accumulation": ({}, {"accumulation": 2}),
    "zero3_tensor": ({"fsdp": 4, "tensor": 2}, {}),
    "pipe": ({"pipe": 2, "data": 2}, {"pipeline": Pipeline(microbatches=2)}),
}


def program_on(layout: str, guard: Guard):
    sizes, changes = LAYOUTS[layout]
    return make_program(
        MODEL,
        make_layout(**sizes),
        optimizer=make_optimizer(Optimizer(learning_rate=1e-2), SCHEDULE),
        schedule=SCHEDULE,
        guard=guard,
        **changes,
    )


@functools.cache
def compiled(layout: str, guard: Guard = SKIP):
    """The program and its step, compiled: another program would be refused, not made."""
    program = program_on(layout, guard)
    return program, lower_step(program, FIRST).compile()


@functools.cache
def fresh(layout: str):
    """The first state, as numpy arrays."""
    return jax.tree.map(np.asarray, jax.device_get(compiled(layout)[0].create(seed=0)))


def run(layout: str, batches, state=None):
    """The state after these batches as numpy arrays, and the metrics of each."""
    program, step = compiled(layout)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state())
    # A copy: on CPU devices the step, which takes its state over, would write into numpy's array.
    state = jax.tree.map(np.copy, fresh(layout) if state is None else state)
    state = jax.device_put(state, shardings, may_alias=False)
    metrics = []
    for batch in batches:
        state, found = step(state, jax.device_put(batch, program.batch_shardings(batch)))
        metrics.append({name: float(value) for name, value in found.items()})
    return jax.tree.map(np.asarray, jax.device_get(state)), metrics


def assert_same_but_for_the_step(found, expected):
    jax.tree.map(
        np.testing.assert_array_equal,
        dataclasses.replace(found, step=0),
        dataclasses.replace(expected, step=0),
    )


# -- the compiled step -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_step_changes_nothing_and_the_next_is_as_if_it_had_not_been(layout):
    bad_first, (metrics,) = run(layout, [BROKEN])
    assert metrics["bad"] == 1.0
    assert math.isnan(metrics["loss"])
    assert_same_but_for_the_step(bad_first, fresh(layout))
    assert bad_first.step == 1

    after, (one, bad, two) = run(layout, [FIRST, BROKEN, SECOND])
    expected, (alone_one, alone_two) = run(layout, [FIRST, SECOND])
    assert [one["bad"], bad["bad"], two["bad"]] == [0.0, 1.0, 0.0]
    assert_same_but_for_the_step(after, expected)
    assert (after.step, expected.step) == (3, 2)
    assert after.guard.count == 2
    # The learning rate too is the one that the optimizer used.
    assert (one, two) == (alone_one, alone_two)
    assert two["learning_rate"] == pytest.approx(float(SCHEDULE(1)))


def test_a_bad_step_leaves_the_same_bits_on_every_mesh():
    one = run("one", [BROKEN])[0]
    many = run("zero3_tensor", [BROKEN])[0]
    jax.tree.map(np.testing.assert_array_equal, many, one)


@pytest.mark.parametrize(("name", "other"), [("losses", "grad_norms"), ("grad_norms", "losses")])
def test_a_step_above_the_threshold_is_left_out(name, other):
    layout = "zero3_tensor"
    _, (usual,) = run(layout, [FIRST])
    low = np.float32([0.010, 0.011, 0.012, 0.013])

    def with_history(count: int):
        values = {name: low, other: np.float32([1e3, 2e3, 3e3, 4e3])}
        return dataclasses.replace(fresh(layout), guard=History(**values, count=np.int32(count)))

    metric = {"losses": "loss", "grad_norms": "grad_norm"}[name]
    for count, values in ((3, low[:3]), (4, low), (11, low)):
        _, (metrics,) = run(layout, [FIRST], with_history(count))
        expected = np.mean(values, dtype=np.float64) + 1e4 * np.std(values, dtype=np.float64)
        assert metrics[f"{metric}_threshold"] == pytest.approx(expected, rel=1e-5)
        assert metrics[metric] == usual[metric] < expected, "not a spike"
        assert metrics["bad"] == 0.0

    # Without spread the threshold is the mean: ordinary numbers are a spike.
    low[:] = 0.01
    state, (metrics,) = run(layout, [FIRST], with_history(11))
    assert metrics["bad"] == 1.0
    assert metrics[f"{metric}_threshold"] == pytest.approx(0.01)
    assert_same_but_for_the_step(state, with_history(11))
    # Too few steps to tell.
    state, (metrics,) = run(layout, [FIRST], with_history(1))
    assert metrics["bad"] == 0.0
    assert metrics[f"{metric}_threshold"] == math.inf


def test_the_verdict_moves_nothing_between_devices():
    def collectives(guard: Guard) -> dict[str, int]:
        text = compiled("zero3_tensor", guard)[1].as_text()
        kinds = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
        return {kind: len(re.findall(rf"= \S+ {kind}(?:-start)?\(", text)) for kind in kinds}

    stop, skip = collectives(Guard()), collectives(SKIP)
    assert stop["all-gather"] > 0
    assert skip == stop


def test_without_a_guard_the_state_and_the_step_have_nothing_of_it():
    program = program_on("one", Guard())
    state = program.abstract_state()
    assert state.guard == ()
    assert "is_finite" not in lower_step(program, FIRST).as_text()
    assert "is_finite" in lower_step(program_on("one", Guard(policy="rewind")), FIRST).as_text()
    assert program_on("one", Guard(policy="skip")).abstract_state().guard == ()
    names = ["step", "params", "opt_state", "statistics", "loss_scale", "exchange", "guard"]
    assert [field.name for field in dataclasses.fields(state)] == names


def test_the_history_is_saved_and_comes_back_on_another_mesh(tmp_path):
    program, step = compiled("one")
    state = step(program.create(seed=0), jax.device_put(FIRST, program.batch_shardings(FIRST)))[0]
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    checkpoints.save(1, state, {})
    checkpoints.wait()
    other, _ = compiled("zero3_tensor")
    found = checkpoints.restore(1, other.abstract_state())
    checkpoints.close()
    assert state.guard.count == 1
    jax.tree.map(np.testing.assert_array_equal, found.guard, state.guard)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(found.guard))


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
    console = Console(file=io.StringIO(), width=300)
    settings = {
        "total_steps": 100, "unit": "tokens", "units_per_step": 64, "flops_per_step": None,
        "peak_flops": None, "first_step": 0, "log_every": 100, "terminal": console,
    }  # fmt: skip
    return MetricsLog(workdir, **(settings | changes), guard=guard), console


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_skipped_steps_have_their_lines_and_training_goes_on_without_being_waited_for(tmp_path):
    program, step = compiled("zero3_tensor")
    log, console = make_log(tmp_path, SKIP)
    state = program.create(seed=0)
    batches = [FIRST, SECOND, BROKEN, FIRST, BROKEN, SECOND]
    placed = [jax.device_put(b, program.batch_shardings(b)) for b in batches]
    with jax.transfer_guard("disallow"):
        for number, batch in enumerate(placed, 1):
            state, metrics = step(state, batch)
            log.later(number, metrics)
        with log.paused():
            pass  # what is saved now is good
        log.close()
    assert [(line["step"], line["bad"]) for line in lines(tmp_path)] == [(1, 0), (3, 1), (5, 1)]
    assert lines(tmp_path)[1]["loss"] is None
    assert log.bad_steps == 2
    shown = [line for line in console.file.getvalue().splitlines() if "left out" in line]
    assert shown == [
        "step 3/100  left out (1 so far): the loss is nan",
        "step 5/100  left out (2 so far): the loss is nan",
    ]


def numbers(loss=2.0, norm=1.0, bad=None, **more):
    values = {"loss": loss, "grad_norm": norm, "learning_rate": 0.1, **more}
    values |= {} if bad is None else {"bad": bad}
    return {name: jnp.float32(value) for name, value in values.items()}


def test_so_many_bad_steps_in_a_row_stop_the_run(tmp_path):
    log, _ = make_log(tmp_path, Guard(policy="skip", max_bad_steps=3))
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
    log, _ = make_log(tmp_path, Guard(policy=policy))
    log.later(1, numbers())
    log.later(7, metrics)
    with pytest.raises(BadStepError if policy == "stop" else Rewind) as raised, log.paused():
        pytest.fail("the state of a bad step would have been saved")
    log.close()
    assert raised.value.step == 7
    assert f"step 7 is bad, {why}" in str(raised.value)
    assert [line["step"] for line in lines(tmp_path)] == [1, 7]


def test_an_overflow_that_the_loss_scale_takes_care_of_is_not_bad(tmp_path):
    log, _ = make_log(tmp_path, Guard())
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
            "Guard.skip_batches=50 is below Guard.rewind_steps=100: the bad batch would come "
            "again; use at least 100",
        ),
        (
            {"policy": "skip", "rewind_steps": 50},
            "Guard.rewind_steps=50 does nothing for Guard.policy='skip' and Guard.spike_sigma="
            "None; leave it at 100 or set Guard.policy='rewind'",
        ),
        (
            {"policy": "skip", "window": 64},
            "Guard.window=64 does nothing for Guard.policy='skip' and Guard.spike_sigma=None; "
            "leave it at 128 or set Guard.spike_sigma",
        ),
        (
            {"max_bad_steps": 3},
            "Guard.max_bad_steps=3 does nothing for Guard.policy='stop' and Guard.spike_sigma="
            "None; leave it at 10 or set Guard.policy to 'skip' or 'rewind'",
        ),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(UserError) as refusal:
        Guard(**changes)
    assert str(refusal.value) == sentence


def test_replicas_with_steps_of_their_own_are_refused():
    assert list(guarding.refuse(Guard(), "diloco")) == []
    assert list(guarding.refuse(SKIP, "synchronous")) == []
    (sentence,) = guarding.refuse(Guard(policy="rewind"), "int8")
    assert sentence.startswith("Guard.policy='rewind' with Exchange.method='int8': ")
    (sentence,) = guarding.refuse(Guard(spike_sigma=6.0), "gossip")
    assert "set Guard.spike_sigma=None or Exchange.method='synchronous'" in sentence
