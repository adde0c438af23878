"""Compressed gradients: rounding, what is left, and what it all adds up to; and whole programs."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch, with_exchange
from test_exchange import (
    BATCHES,
    MODEL,
    SMALL,
    compiled,
    program_on,
    run,
    stopped_and_not,
    synchronous,
    values,
)

from jaxtrain import load_config
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.sharding import on_each_device
from jaxtrain.training.exchange.compression import BLOCK, Int8, TopK, dequantize, quantize
from jaxtrain.training.exchange.exchange import Exchange

P = jax.P
REPLICAS = 4
SHAPES = [(7, 5), (300,), (1,)]  # less than a block, more than one, a single number


@functools.cache
def exchange(codec):
    """Compiled: numbers to send and what was left, both [k, ...], to what arrived and is left."""
    layout = make_layout(data=REPLICAS)

    def on_one(pending):
        sent, left = codec.exchange([x[0] for x in pending])
        return [x[None] for x in sent], [x[None] for x in left]

    @jax.jit
    def tell(numbers, left):
        pending = [a + b for a, b in zip(numbers, left, strict=True)]
        run = on_each_device(on_one, ([P("data")] * len(pending),), P("data"))
        return run(pending)

    def call(numbers, left):
        with layout.active():
            place = functools.partial(jax.device_put, device=layout.sharding_of(P("data")))
            found = tell([place(x) for x in numbers], [place(x) for x in left])
        return jax.tree.map(np.asarray, found)

    return call


def draw(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((REPLICAS, *shape), np.float32) for shape in SHAPES]


def nothing() -> list[np.ndarray]:
    return [np.zeros((REPLICAS, *shape), np.float32) for shape in SHAPES]


def test_a_rounded_number_is_off_by_at_most_half_a_step():
    x = np.float32(
        np.random.default_rng(0).standard_normal((5, BLOCK)) * [[1e-8], [1], [9], [0], [1e8]]
    )
    codes, scales = quantize(jnp.asarray(x))
    assert codes.dtype == jnp.int8
    np.testing.assert_allclose(scales, np.abs(x).max(-1) / 127, rtol=1e-6)
    error = np.abs(np.asarray(dequantize(codes, scales)) - x)
    assert (error <= np.asarray(scales)[:, None] * 0.5001).all()
    assert np.abs(np.asarray(codes)).max() == 127


@pytest.mark.parametrize("codec", [Int8(), TopK(0.1)], ids=str)
def test_everything_arrives_in_the_end_the_same_for_all(codec):
    tell = exchange(codec)
    left, arrived, true = nothing(), nothing(), nothing()
    for step in range(20):
        numbers = draw(step)
        sent, left = tell(numbers, left)
        for x in sent:
            np.testing.assert_array_equal(x, np.stack([x[0]] * REPLICAS))
        arrived = [a + b for a, b in zip(arrived, sent, strict=True)]
        true = [a + b.sum(0) for a, b in zip(true, numbers, strict=True)]
    for a, b, rest in zip(arrived, true, left, strict=True):
        # What was sent is what was to be sent less what is left, to float32 rounding.
        np.testing.assert_allclose(a[0], b[0] - rest.sum(0), rtol=0, atol=1e-4)
    if isinstance(codec, Int8):
        # Half a step of a replica's own block, and for a part's owner half a step of the sum's:
        # magnitudes here are below 6 and their sums over replicas below 4 * 6.
        bound = 0.5 * 6 / 127 + 0.5 * 4 * 6 / 127
        assert max(np.abs(rest).max() for rest in left) < bound


def of_largest(x: np.ndarray, keep: float) -> np.ndarray:
    """A part with its largest entries alone."""
    told = np.zeros_like(x)
    at = np.argsort(-np.abs(x), kind="stable")[: max(1, math.ceil(keep * x.size))]
    told[at] = x[at]
    return told


def test_top_k_tells_owners_and_owners_all_each_with_a_rest_of_its_own():
    """Replicas and owners one by one; an owner's rest joins what it is told, not what it tells."""
    tell, left = exchange(TopK(0.1)), nothing()
    sizes = [-(-math.prod(shape) // REPLICAS) for shape in SHAPES]  # of a part, its end padded
    of_workers = [np.zeros((REPLICAS, REPLICAS, size), np.float32) for size in sizes]
    of_owners = [np.zeros((REPLICAS, size), np.float32) for size in sizes]
    for step in range(6):
        numbers = draw(step)
        sent, left = tell(numbers, left)
        for i, size in enumerate(sizes):
            flat = numbers[i].reshape(REPLICAS, -1)
            flat = np.pad(flat, ((0, 0), (0, REPLICAS * size - flat.shape[1])))
            parts = flat.reshape(REPLICAS, REPLICAS, size) + of_workers[i]
            arrived = np.zeros_like(of_owners[i])
            for owner in range(REPLICAS):
                total = of_owners[i][owner] + parts[owner, owner]
                of_workers[i][owner, owner] = 0  # told itself whole
                for worker in set(range(REPLICAS)) - {owner}:
                    told = of_largest(parts[worker, owner], 0.1)
                    of_workers[i][worker, owner] = parts[worker, owner] - told
                    total = total + told
                arrived[owner] = of_largest(total, 0.1)
                of_owners[i][owner] = total - arrived[owner]
            count = numbers[i][0].size
            flat = arrived.reshape(-1)[:count]
            assert np.count_nonzero(sent[i][0]) == np.count_nonzero(flat)
            np.testing.assert_allclose(sent[i][0].reshape(-1), flat, atol=1e-6)
            rest = of_workers[i].copy()
            rest[range(REPLICAS), range(REPLICAS)] = of_owners[i]
            rest = rest.reshape(REPLICAS, -1)[:, :count]
            np.testing.assert_allclose(left[i].reshape(REPLICAS, -1), rest, atol=1e-5)


def test_small_numbers_beside_large_ones_only_arrive_with_error_feedback():
    """100, then -100, ... beside a steady 0.1, which is less than half of the step 100/127."""
    tell = exchange(Int8())
    with_feedback, without, left = 0.0, 0.0, nothing()
    for step in range(40):
        numbers = nothing()
        numbers[1][:, 0] = 100.0 * (-1) ** step
        numbers[1][:, 1] = 0.1
        sent, left = tell(numbers, left)
        with_feedback += sent[1][0, 1]
        without += tell(numbers, nothing())[0][1][0, 1]
    true = 40 * 0.1 * REPLICAS
    assert without == 0.0
    # Half a step of each replica's block and of the sum's: what can be left.
    assert abs(with_feedback - true) <= 0.5 * REPLICAS * 100.2 / 127 + 0.5 * REPLICAS * 101 / 127


# -- programs ----------------------------------------------------------------------------------

LAYOUTS = [{"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2, "zero": 2}]


# Compiles two steps; int8 against the synchronous step is in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_sending_every_entry_is_the_synchronous_step(sizes):
    params, metrics = synchronous()
    state, found = run(program_on(sizes, Exchange(method="top_k", keep=1.0)), BATCHES)
    for mine, theirs in zip(found, metrics, strict=True):
        assert mine == pytest.approx(theirs, abs=5e-6)
    for mine, theirs in zip(values(state.params), params, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=5e-6)
    assert all((x == 0).all() for x in values(state.exchange))


@pytest.mark.slow_cases("{'data': 2, 'fsdp': 2, 'tensor': 2, 'zero': 2}")
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_int8_is_the_synchronous_step_to_its_rounding(sizes):
    params, metrics = synchronous()
    program = program_on(sizes, Exchange(method="int8"))
    before = jax.tree.map(lambda x: x.sharding, program.create(seed=0))
    state, found = run(program, BATCHES)
    assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding, state)) == jax.tree.leaves(before)
    for mine, theirs in zip(found, metrics, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-3)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    moved = [np.abs(a - b).max() for a, b in zip(values(state.params), params, strict=True)]
    assert 0 < max(moved) < 5e-3
    assert any((x != 0).any() for x in values(state.exchange))


def train(settings: Exchange, steps: int = 60) -> tuple[float, float]:
    """First and last loss of a run that learns a few rows by heart, with AdamW and clipping."""
    program = with_exchange(settings, make_step(MODEL, make_layout(data=4)))
    rows = text_batch(rows=8, length=8, vocab_size=32)
    _, metrics = run(program, [rows] * steps)
    return metrics[0]["loss"], metrics[-1]["loss"]


@pytest.mark.slow
def test_compressed_training_ends_where_synchronous_training_does():
    first, synchronous_loss = train(Exchange())
    _, int8 = train(Exchange(method="int8"))
    _, top_k = train(Exchange(method="top_k", keep=0.05))
    assert synchronous_loss < 0.2 * first
    assert int8 == pytest.approx(synchronous_loss, abs=0.05)
    assert top_k < 0.5 * first


@pytest.mark.slow
def test_a_run_resumed_with_a_rest_is_the_run_never_stopped(tiny_config, tmp_path):
    def some(state):
        assert all((x != 0).any() for x in values(state.exchange))

    said = [*SMALL, "Exchange.method = 'top_k'", "Mesh.tensor = 1", "Mesh.data = 4"]
    stopped_and_not(load_config(tiny_config, said), tmp_path, some)


# tests/test_int8.py and tests/test_precision.py skip steps that overflow.
@pytest.mark.slow
def test_a_gradient_that_overflows_is_skipped_and_not_kept():
    program = with_exchange(
        Exchange(method="int8"),
        make_step(
            MODEL, make_layout(data=2), precision=Precision(compute="float16", loss_scale="dynamic")
        ),
    )
    state, (good,) = run(program, BATCHES[:1])
    before = values((state.params, state.exchange))
    huge = jax.device_put(np.float32([2.0**40, 0.0]), state.loss_scale.sharding)
    state, (bad,) = run(program, BATCHES[1:2], dataclasses.replace(state, loss_scale=huge))
    assert (good["skipped"], bad["skipped"]) == (0.0, 1.0)
    for a, b in zip(values((state.params, state.exchange)), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(state.loss_scale[0]) == 2.0**39
    assert compiled(program).on_arrays._cache_size() == 1
