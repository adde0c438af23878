"""A bad step leaves the state as it was, on every layout and at no cost; the loop never waits."""

import dataclasses
import functools
import io
import math
import re

import jax
import numpy as np
import pytest
from conftest import compile_step, lower_step, make_layout, make_step, text_batch
from rich.console import Console

from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.resnet import ResNet
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.metrics.files import METRICS_FILE, read_lines
from jaxtrain.run.metrics.log import MetricsLog
from jaxtrain.training.guard import Guard, History
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.schedule import Schedule, make_schedule
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.settings import Checkpoint

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
    return make_step(
        MODEL,
        make_layout(**sizes),
        optimizer=make_optimizer(Optimizer(learning_rate=1e-2), SCHEDULE),
        schedule=SCHEDULE,
        guard=guard,
        **changes,
    )


@functools.cache
def compiled(layout: str, guard: Guard = SKIP):
    """The program and its step, compiled: another program would be rejected, not made."""
    program = program_on(layout, guard)
    return program, compile_step(program, FIRST)


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
        state, found = step(state, jax.device_put(batch, program.setup.batch_shardings(batch)))
        metrics.append({name: float(value) for name, value in found.items()})
    return jax.tree.map(np.asarray, jax.device_get(state)), metrics


def assert_same_but_for_the_step(found, expected):
    jax.tree.map(
        np.testing.assert_array_equal,
        dataclasses.replace(found, step=0),
        dataclasses.replace(expected, step=0),
    )


@pytest.mark.slow_cases("accumulation", "pipe", "zero3_tensor")
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


@pytest.mark.slow
def test_running_statistics_too_stay_as_they_were():
    model = ResNet(depth=20, num_classes=4, channels=1, width=4)
    images = Batch(
        inputs=np.random.default_rng(0).standard_normal((4, 8, 8, 1), np.float32),
        targets=np.arange(4, dtype=np.int32),
        loss_mask=np.ones(4, np.float32),
    )
    program = make_step(model, make_layout(), guard=Guard(policy="rewind"))
    step = compile_step(program, images)
    images.inputs[0, 0, 0, 0] = np.inf
    state = program.create(seed=0)
    before = jax.tree.map(np.copy, jax.device_get(state))
    after, metrics = step(state, jax.device_put(images, program.setup.batch_shardings(images)))
    assert metrics["bad"] == 1.0
    assert len(jax.tree.leaves(after.statistics)) > 10
    assert_same_but_for_the_step(jax.device_get(after), before)


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
        text = compiled("zero3_tensor", guard)[1].on_arrays.as_text()
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
    names = ["step", "params", "opt_state", "statistics", "loss_scale", "exchange", "guard",
             "frozen"]  # fmt: skip
    assert [field.name for field in dataclasses.fields(state)] == names


def test_the_history_is_saved_and_comes_back_on_another_mesh(tmp_path):
    program, step = compiled("one")
    state = step(
        program.create(seed=0), jax.device_put(FIRST, program.setup.batch_shardings(FIRST))
    )[0]
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    checkpoints.save(1, state, {})
    checkpoints.wait()
    other, _ = compiled("zero3_tensor")
    found = checkpoints.restore(1, other.abstract_state())
    checkpoints.close()
    assert state.guard.count == 1
    jax.tree.map(np.testing.assert_array_equal, found.guard, state.guard)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(found.guard))


def test_skipped_steps_have_their_lines_and_training_goes_on_without_being_waited_for(tmp_path):
    program, step = compiled("zero3_tensor")
    console = Console(file=io.StringIO(), width=200)
    log = MetricsLog(
        tmp_path, total_steps=100, unit="tokens", units_per_step=64, flops_per_step=None,
        peak_flops=None, first_step=0, log_every=100, terminal=console, guard=SKIP,
    )  # fmt: skip
    state = program.create(seed=0)
    batches = [FIRST, SECOND, BROKEN, FIRST, BROKEN, SECOND]
    placed = [jax.device_put(b, program.setup.batch_shardings(b)) for b in batches]
    with jax.transfer_guard("disallow"):
        for number, batch in enumerate(placed, 1):
            state, metrics = step(state, batch)
            log.later(number, metrics)
        with log.pause():
            pass  # what is saved now is good
        log.close()
    written = read_lines(tmp_path / METRICS_FILE)
    assert [(line["step"], line["bad"]) for line in written] == [(1, 0), (3, 1), (5, 1)]
    assert written[1]["loss"] is None
    assert log.bad_steps == 2
    shown = [line for line in console.file.getvalue().splitlines() if "  skipped (" in line]
    assert shown == [
        "step 3/100  skipped (1 so far): the loss is nan",
        "step 5/100  skipped (2 so far): the loss is nan",
    ]
