"""`Sharding.masters='sharded'`: masters and moments in shards, whole weights in the compute dtype.

That gradients are one device's beside pipelines, rings and experts is in tests/test_reduction.py,
that checkpoints are read by other layouts in tests/test_resume.py, the traffic of compiled steps in
tests/test_traffic.py.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from conftest import make_layout, make_step, needs_libtpu
from test_accumulate_local import K, N, configured, moved
from test_planning_traffic import WHOLE, audited, compiled_step, config_of, deep, faults
from test_step import BATCH, MODELS
from test_traffic import MODELS as WIDE

from jaxtrain.analysis.planning.textbook.memory import memory
from jaxtrain.config.errors import UserError
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.precision import Precision
from jaxtrain.nn.remat import POLICIES
from jaxtrain.parallel.sharding import Sharding, by_name, name_of
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.layouts import abstract_layout, notes
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight.preflight import check

STEPS = 3
SHARDED = {"zero": 1, "masters": "sharded"}
MESHES = {
    "fsdp": ({"fsdp": 8}, {}),
    "data x fsdp x tensor, microbatches, remat": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"accumulation": 2, "execution": Execution(kernel="xla", remat=POLICIES["full"])},
    ),
}
CASES = [("gpt", "fsdp"), ("llama", "data x fsdp x tensor, microbatches, remat")]


@functools.cache
def trained(model: str, mesh: str, compute: str, **stage: Any):
    """Losses, masters and moments after STEPS steps, and the shapes of the masters' shards."""
    sizes, changes = MESHES[mesh]
    layout = make_layout(**sizes, **stage)
    program = make_step(MODELS[model], layout, precision=Precision(compute=compute), **changes)
    state, step, losses = program.create(0), CompiledStep(program), []
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with layout.active():
        for _ in range(STEPS):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    arrays = {name: v.get_value() for name, v in by_name(state.params).items()}
    shards = {name: x.addressable_shards[0].data.shape for name, x in arrays.items()}
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    moments = {name_of(path): np.asarray(leaf) for path, leaf in leaves}
    return losses, {name: np.asarray(x) for name, x in arrays.items()}, moments, shards


def assert_same_bits(found, expected):
    assert found[0] == expected[0]
    for mine, theirs in zip(found[1:3], expected[1:3], strict=True):
        assert mine.keys() == theirs.keys()
        for name, one in mine.items():
            np.testing.assert_array_equal(one, theirs[name], err_msg=name)


# A second model and mesh of the same claim.
@pytest.mark.slow_cases("llama-data x fsdp x tensor, microbatches, remat")
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_masters_are_those_of_stage_1_and_of_stage_3_bit_for_bit(model, mesh):
    """In bfloat16: where weights are gathered once a step, whatever is kept of them."""
    found = trained(model, mesh, "bfloat16", **SHARDED)
    assert_same_bits(found, trained(model, mesh, "bfloat16", zero=1))
    assert_same_bits(found, trained(model, mesh, "bfloat16", zero=3, accumulate="local"))
    # As shards of ZeRO 3 on every device, the moments' too.
    three = trained(model, mesh, "bfloat16", zero=3)
    assert found[3] == three[3] != trained(model, mesh, "bfloat16", zero=1)[3]


# The test above has the same bits as stage 3's local sums in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_gathering_each_layer_instead_gives_the_same_sums_in_another_order(model, mesh):
    found = trained(model, mesh, "float32", **SHARDED)
    three = trained(model, mesh, "float32", zero=3)
    np.testing.assert_allclose(found[0], three[0], rtol=2e-6)
    for name, one in found[2].items():
        scale = max(np.abs(one).max(), 1e-12)
        np.testing.assert_allclose(one / scale, three[2][name] / scale, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("accumulation", [1, 2, 10])
def test_weights_cross_once_in_the_compute_dtype(accumulation):
    """N numbers in matrices: 2 N / k bytes where whole masters are gathered as 4 N / k."""
    gradient = 2 if accumulation == 1 else 4
    whole = moved(configured("shard", accumulation=accumulation, zero=1))
    assert whole == {"all-gather": 4 * N // K, "reduce-scatter": gradient * N}
    found = moved(masters(accumulation=accumulation))
    assert found == {"all-gather": 2 * N // K, "reduce-scatter": gradient * N}


def masters(**sections):
    config = configured("shard", zero=1, **sections)
    sharding = dataclasses.replace(config.sharding, masters="sharded")
    return dataclasses.replace(config, sharding=sharding)


COMPILED = {
    "sums in bfloat16": ({"fsdp": 8}, {"precision": Precision(gradients="bfloat16")}),
    "tensor, replicas": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "pipe": ({"pipe": 2, "fsdp": 4}, {"pipeline": Pipeline(microbatches=4)}),
    "pipe, sums in bfloat16": (
        {"pipe": 2, "fsdp": 4},
        {"pipeline": Pipeline(microbatches=4), "precision": Precision(gradients="bfloat16")},
    ),
}


# tests/test_traffic.py has the same closed forms for other meshes.
# Compiles a step; masters bit for bit are in the fast part.
@pytest.mark.slow
@needs_libtpu
@pytest.mark.slow_cases("pipe", "tensor, replicas", "pipe, sums in bfloat16")
@pytest.mark.parametrize("name", COMPILED)
def test_what_a_compiled_step_moves_is_the_closed_form(name):
    """For TPUs, with two microbatches; of one and without other axes: tests/test_traffic.py."""
    sizes, changes = COMPILED[name]
    pipelined = "pipe" in sizes
    config = config_of(
        deep(WIDE["llama"]) if pipelined else WIDE["llama"], sizes, rows=32 if pipelined else 16,
        accumulation=2, sharding=Sharding(zero=1, masters="sharded"), **changes,
    )  # fmt: skip
    rows = audited(config, *compiled_step(config))
    assert faults(rows, {WHOLE} if pipelined else set()) == []


def test_the_estimate_has_shards_of_masters_and_whole_weights():
    sharded = masters(accumulation=2)
    plain = dataclasses.replace(
        sharded, sharding=dataclasses.replace(sharded.sharding, masters="whole")
    )
    one, three, whole = (
        memory(config, abstract_layout(config, K), "gpu")
        for config in (sharded, configured("shard", accumulation=2), plain)
    )
    assert one.arguments == three.arguments
    assert one.arguments.optimizer == whole.arguments.optimizer
    assert whole.arguments.params - one.arguments.params == 4 * N * (K - 1) // K
    name = "parameters in the compute dtype"
    assert one.parts[name] == whole.parts[name]
    # Sums in float32, and one of four layers' gradients in the compute dtype, as of whole masters.
    assert one.gradients == whole.gradients == pytest.approx((4 + 2 / 4) * N, rel=0.05)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_other_stages_are_rejected_with_the_way_out(zero):
    config = masters(accumulation=1)
    config = dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, zero=zero))
    with pytest.raises(UserError, match=f"masters='sharded' with Sharding.zero={zero}: .*zero=1"):
        check(config, device_count=K, platform="cpu")


def test_replicas_that_agree_in_another_way_are_rejected():
    config = masters(accumulation=1, exchange=Exchange(method="local_sgd"))
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=2, fsdp=4))
    with pytest.raises(UserError, match="'local_sgd' with Sharding.masters='sharded'"):
        check(config, device_count=K, platform="cpu")


def test_a_run_that_computes_in_the_masters_dtype_is_told_that_it_saves_nothing():
    config = masters(accumulation=1)
    layout = abstract_layout(config, K)
    assert not any("masters" in note for note in notes(config, layout))
    config = dataclasses.replace(config, precision=Precision(compute="float32"))
    (note,) = (note for note in notes(config, layout) if "masters" in note)
    assert "Sharding.masters='whole' takes less" in note
