"""Gradients that cross the mesh once a step are one device's, in every mode that has microbatches.

How often they cross is counted in tests/test_traffic.py and tests/test_planning_traffic.py.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import make_layout, make_step
from parity import assert_equal, evaluate
from test_resnet import assert_same, step_on
from test_step import BATCH, MODELS

from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.remat import POLICIES
from jaxtrain.parallel.sharding import Layout, mean_over_batch, on_each_device, size_of_batch
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.reduction import _sum, reduce_once_axes

P = jax.P
LLAMA = MODELS["llama"]
MODEL = {
    "llama": dataclasses.replace(LLAMA, num_layers=4, num_kv_heads=8),
    # With a capacity, drops depend on the rows and not on where they lie.
    "mixture": Mixtral(
        vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=4, mlp_dim=48,
        num_experts=4, capacity_factor=1.0, context_length=16,
    ),
    "dropless": Mixtral(
        vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=4, mlp_dim=48,
        num_experts=4, capacity_factor=None, context_length=16,
    ),
}  # fmt: skip
FULL = Execution(kernel="xla", remat=POLICIES["full"])
ULYSSES = Execution(kernel="xla", context_parallel="ulysses")
BUBBLE = Pipeline(schedule="zero_bubble", microbatches=2)
CASES = {
    "experts": ("mixture", {"data": 2, "expert": 2, "tensor": 2}, {"accumulation": 2}),
    "hsdp, residuals": (
        "llama", {"data": 2, "fsdp": 2, "pipe": 2},
        {"pipeline": Pipeline(microbatches=4, backward="residuals")},
    ),
    "zero 3, local": (
        "llama", {"data": 2, "fsdp": 4, "accumulate": "local"}, {"accumulation": 2},
    ),
    "zero 2, local, pipe": (
        "llama", {"data": 2, "fsdp": 2, "pipe": 2, "zero": 2, "accumulate": "local"},
        {"accumulation": 2, "pipeline": BUBBLE},
    ),
    "masters, tensor, chunks, remat": (
        "llama", {"data": 2, "fsdp": 2, "tensor": 2, "zero": 1, "masters": "sharded"},
        {"accumulation": 2, "loss": Loss(chunk_size=4), "execution": FULL},
    ),
    "masters, dropless": (
        "dropless", {"expert": 2, "fsdp": 4, "zero": 1, "masters": "sharded"}, {},
    ),
    "masters, zero bubble": (
        "llama", {"fsdp": 4, "pipe": 2, "zero": 1, "masters": "sharded"},
        {"accumulation": 2, "pipeline": BUBBLE},
    ),
    "ring, experts, chunks, remat": (
        "dropless", {"context": 2, "expert": 2, "fsdp": 2},
        {"accumulation": 2, "loss": Loss(chunk_size=4), "execution": FULL},
    ),
    "experts, context, pipe": (
        "dropless", {"context": 2, "expert": 2, "pipe": 2},
        {"pipeline": BUBBLE, "execution": ULYSSES},
    ),
}  # fmt: skip


@functools.cache
def one_device(model):
    return evaluate(make_step(MODEL[model], make_layout()), BATCH)


FAST = "masters, zero bubble"


@pytest.mark.parametrize(
    "name",
    [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_gradients_of_many_microbatches_are_one_devices(name, capfd):
    model, sizes, changes = CASES[name]
    expected = one_device(model)
    capfd.readouterr()
    found = evaluate(make_step(MODEL[model], make_layout(**sizes), **changes), BATCH, expected)
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err
    assert_equal(found, expected)


def test_statistics_of_a_microbatch_are_those_of_all_its_rows():
    """On brightness that grows with the row: a device's own mean is not the microbatch's."""
    found = step_on(make_layout(1, data=2, fsdp=2), accumulation=2)
    assert_same(found, step_on(make_layout(), accumulation=2))


def test_a_mean_over_the_batch_is_over_the_rows_of_all_its_devices():
    layout = make_layout(data=4)
    rows = np.arange(8.0, dtype=np.float32)

    def one(x):
        one_batch = dataclasses.replace(layout, one_batch=frozenset({"data"}))
        with one_batch.current():
            assert size_of_batch(x.size) == 8
            return mean_over_batch(x.mean(keepdims=True))

    with layout.active():
        placed = jax.device_put(rows, layout.sharding_of(P("data")))
        means = jax.jit(lambda x: on_each_device(one, (P("data"),), P("data"))(x))(placed)
    np.testing.assert_array_equal(means, [3.5] * 4)
    assert mean_over_batch(rows) is rows  # on explicit axes a mean is that of all rows already


# tests/test_precision.py has the dtypes of a step in the fast part.
@pytest.mark.slow
def test_half_precision_gradients_are_summed_between_devices():
    """In the dtype of the computation where there is one microbatch: near float32's."""
    program = make_step(
        LLAMA, make_layout(2, data=2, fsdp=4), precision=Precision(compute="bfloat16")
    )
    found, exact = evaluate(program, BATCH), evaluate(make_step(LLAMA, make_layout()), BATCH)

    def norm(tree):
        return np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))

    off = jax.tree.map(np.subtract, found["gradients"], exact["gradients"])
    assert norm(off) < 2e-2 * norm(exact["gradients"])


@pytest.mark.parametrize(
    ("layout", "passes", "axes"),
    [
        ({"zero": 0, "data": 2, "fsdp": 4}, 2, ("data", "fsdp")),
        ({"zero": 1, "data": 2, "fsdp": 4}, 2, ("data", "fsdp")),
        ({"zero": 2, "data": 2, "fsdp": 4}, 2, ("data",)),
        ({"zero": 3, "data": 2, "fsdp": 4}, 2, ("data",)),
        ({"zero": 3, "fsdp": 8}, 2, ()),
        ({"zero": 1, "data": 2, "expert": 4}, 2, ("data", "expert")),
        ({"zero": 3, "fsdp": 4, "context": 2}, 2, ("context",)),
        ({"zero": 0, "data": 2, "context": 4}, 2, ("data", "context")),
        # One pass: where a scatter would be left to the compiler.
        ({"zero": 0, "data": 2, "fsdp": 4}, 1, ()),
        ({"zero": 1, "fsdp": 8}, 1, ("fsdp",)),
        ({"zero": 1, "data": 8}, 1, ()),
        ({"zero": 3, "data": 2, "fsdp": 4}, 1, ("data",)),
        ({"zero": 3, "fsdp": 4, "context": 2}, 1, ("context",)),
        ({"zero": 3, "data": 4, "context": 2}, 1, ()),
    ],
    ids=str,
)
def test_which_axes_gradients_cross_once(layout, passes, axes):
    assert reduce_once_axes(make_layout(**layout), passes) == axes


def test_replicas_that_agree_in_another_way_sum_as_they_did():
    layout: Layout = dataclasses.replace(make_layout(1, data=2, fsdp=4), manual=frozenset({"data"}))
    assert reduce_once_axes(layout, 2) == ()


def test_rows_of_less_than_a_tile_are_cut_and_stay_in_place():
    """A device's row of each layer's [H, D N] is eight rows, a tile of float32, of an eighth."""
    layout = make_layout(1, fsdp=8)
    x = (
        np.random.default_rng(0).normal(size=(8, 2, 64, 16, 8)).astype(np.float32)
    )  # [k, L, D, N, H]
    with layout.active():
        x = jax.device_put(x, layout.sharding_of(P("fsdp")))
        run = jax.jit(
            on_each_device(
                lambda x: _sum(x[0], ("fsdp",), 3, 1), P("fsdp"), P(None, None, None, "fsdp")
            )
        )
        assert "f32[2,64,128]" in str(jax.make_jaxpr(run)(x))
        np.testing.assert_allclose(run(x), np.asarray(x).sum(0), rtol=0, atol=1e-5)
