"""The gradient noise scale: estimates without bias, and a run's against a plain loop."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, transformed

from jaxtrain.data.batch import Batch
from jaxtrain.models.feed_forward.mlp import MLP
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.elementwise import SGD
from jaxtrain.training.optimizers.rules.sophia import SophiaH
from jaxtrain.training.setup import split_microbatches
from jaxtrain.training.transforms import estimate_of, measure_noise, signal_and_noise

WIDTHS, PARTS, ROWS, STEPS, EVERY, DECAY = (8, 16, 4), 4, 16, 5, 2, 0.95
MODEL = MLP(widths=WIDTHS, activation="tanh")


def test_estimates_are_without_bias():
    """Examples' gradients are normal around G: the means over many batches are |G|^2 and tr(S)."""
    rng = np.random.default_rng(0)
    G, deviations = np.array([1.0, -2.0, 0.5]), np.array([3.0, 1.0, 2.0])
    examples = G + deviations * rng.standard_normal((20_000, ROWS, 3))
    small = np.square(examples[:, :4].mean(1)).sum(-1)
    large = np.square(examples.mean(1)).sum(-1)
    found = [np.asarray(x).mean() for x in signal_and_noise(small, large, 4, ROWS)]
    # Their own deviations over so many batches are 0.04 and 0.12.
    np.testing.assert_allclose(found, [5.25, 14.0], atol=0.5)


def batches() -> list[Batch]:
    rng, found = np.random.default_rng(0), []
    for _ in range(STEPS):
        inputs = rng.normal(size=(ROWS, WIDTHS[0])).astype(np.float32)
        targets = rng.integers(0, WIDTHS[-1], ROWS).astype(np.int32)
        found.append(Batch(inputs, targets, np.ones(ROWS, np.float32)))
    return found


def program_on(accumulation: int, **sizes: int) -> Any:
    settings = Optimizer(
        rule=SGD(momentum=0.0), learning_rate=0.1, weight_decay=0.0, clip_norm=None
    )
    optimizer = make_optimizer(settings, optax.constant_schedule(0.1))
    return make_step(MODEL, make_layout(**sizes), optimizer=optimizer, accumulation=accumulation)


def expected() -> list[float]:
    """The quotients after each step, from gradients of whole batches and of first microbatches."""
    plain = program_on(1, fsdp=1)
    state, gradients = plain.create(0), jax.jit(plain.setup.gradients)
    step, means, found = jax.jit(plain.train_step), np.zeros(2), []

    def square(batch: Batch) -> float:
        return float(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(
            gradients(state, batch)[0])))  # fmt: skip

    with plain.setup.layout.active():
        for number, batch in enumerate(batches()):
            if number % EVERY == 0:
                small = square(jax.tree.map(lambda x: x[0], split_microbatches(batch, PARTS)))
                large = square(batch)
                few = ROWS // PARTS
                estimates = [
                    (ROWS * large - few * small) / (ROWS - few),
                    (small - large) / (1 / few - 1 / ROWS),
                ]
                means = DECAY * means + (1 - DECAY) * np.array(estimates)
            found.append(means[1] / means[0])
            state, *_ = step(state, batch)
    return found


@pytest.mark.parametrize(
    "sizes", [pytest.param({"fsdp": 1}, marks=pytest.mark.slow), {"data": 2, "fsdp": 2}], ids=str
)
def test_a_runs_scale_is_that_of_a_loop_over_its_batches(sizes):
    program = transformed(program_on(PARTS, **sizes), measure_noise(EVERY))
    step, state, found = CompiledStep(program), program.create(0), []
    with program.setup.layout.active():
        for batch in batches():
            placed = jax.device_put(batch, program.setup.batch_shardings(batch))
            state, metrics = step(state, placed)
            found.append(float(metrics["noise_scale"]))
    np.testing.assert_allclose(found, expected(), rtol=1e-3)


# Compiles two steps with curvature; test_compose.py has the order of both transforms.
@pytest.mark.slow
def test_a_rule_that_is_given_the_curvature_is_given_it_here_too():
    rule = SophiaH(every=1)
    optimizer = make_optimizer(Optimizer(rule=rule), optax.constant_schedule(0.1))
    plain = make_step(
        MODEL, make_layout(data=2), optimizer=optimizer, accumulation=PARTS,
        curvature=estimate_of(rule),
    )  # fmt: skip
    (batch, *_), found = batches(), []
    for program in (plain, transformed(plain, measure_noise(EVERY))):
        with program.setup.layout.active():
            placed = jax.device_put(batch, program.setup.batch_shardings(batch))
            state, _ = CompiledStep(program)(program.create(0), placed)
        found.append(jax.device_get(state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert any(np.any(h) for h in jax.tree.leaves(found[0][1].nu))
