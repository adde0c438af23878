"""`Sharding.accumulate='local'`: weights gathered once a step, gradients scattered once a step.

That losses and gradients are one device's is in tests/test_reduction.py, the compiled traffic in
tests/test_planning_traffic.py.
"""

import dataclasses
import math

import pytest
from conftest import lower_step, needs_libtpu
from test_planning_traffic import config_of
from test_traffic import MODELS

from jaxtrain.analysis.planning.advice import (
    accumulations,
    compare_accumulations,
)
from jaxtrain.analysis.planning.machines.targets import parse_target, tpu_devices
from jaxtrain.analysis.planning.textbook.facts import weights_of
from jaxtrain.analysis.planning.textbook.memory import memory
from jaxtrain.analysis.planning.textbook.traffic import expect_traffic
from jaxtrain.config.errors import UserError
from jaxtrain.parallel.sharding import Sharding
from jaxtrain.training.compose import compose
from jaxtrain.training.exchange.exchange import Exchange
from jaxtrain.training.layouts import abstract_layout, layout
from jaxtrain.training.offload import Offload
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import load_config

# Memory differs by a few percent from that of a run, which compiles ten times as long.
QUICK = {"exec_time_optimization_effort": -1.0}
LLAMA = dataclasses.replace(
    MODELS["llama"], embed_dim=512, num_heads=4, num_kv_heads=4, mlp_dim=2048, num_layers=4
)
K = 8
SHARDED = [weight for weight in weights_of(LLAMA) if weight.is_matrix]
OF_LAYERS = 4 * sum(math.prod(weight.shape) for weight in SHARDED if weight.is_layer)
N = OF_LAYERS + sum(math.prod(weight.shape) for weight in SHARDED if not weight.is_layer)


def configured(accumulate, *, accumulation, zero=3, **sections):
    sharding = Sharding(zero=zero, accumulate=accumulate)
    return config_of(
        LLAMA, {"fsdp": K}, rows=K * accumulation, accumulation=accumulation, sharding=sharding,
        **sections,
    )  # fmt: skip


def moved(config):
    """Kind -> bytes of weights and gradients that a device puts in; vectors left out."""
    found = {}
    for one in expect_traffic(config, abstract_layout(config, K)):
        reason, _, name = one.cause.partition(": ")
        if reason in ("parameters", "gradients", "update") and any(
            name == weight.name for weight in SHARDED
        ):
            found[one.kind] = found.get(one.kind, 0) + one.total_bytes
    return found


@pytest.mark.parametrize("accumulation", [1, 2, 10])
def test_weights_and_gradients_cross_once_whatever_the_number_of_microbatches(accumulation):
    # bfloat16 weights; gradients in float32 where several were summed.
    gradient = 2 if accumulation == 1 else 4
    three = moved(configured("local", accumulation=accumulation))
    assert three == {"all-gather": 2 * N // K, "reduce-scatter": gradient * N}
    two = moved(configured("local", accumulation=accumulation, zero=2))
    # The parameters that were updated are gathered in float32: ZeRO 1's traffic.
    assert two == {"all-gather": 4 * N // K, "reduce-scatter": gradient * N}
    assert two == moved(configured("shard", accumulation=accumulation, zero=1))
    # Against a gather forward, one backward (of what stands around the layers one alone) and a
    # scatter for every microbatch.
    every = moved(configured("shard", accumulation=accumulation))
    gathers = accumulation * 2 * (OF_LAYERS + N) // K
    assert every == {"all-gather": gathers, "reduce-scatter": accumulation * 2 * N}


def test_the_estimate_has_whole_gradients_and_weights():
    local, shard = (
        memory(config, abstract_layout(config, K), "tpu")
        for config in (configured(name, accumulation=2) for name in ("local", "shard"))
    )
    assert local.arguments == shard.arguments
    # Whole sums in float32, twice; sharded ones and one of four layers' gradients in the compute
    # dtype. Norms are whole in any case.
    assert local.gradients == pytest.approx(8 * N, rel=0.05)
    assert shard.gradients == pytest.approx((4 + 2 / 4) * N / K, rel=0.05)
    name = "parameters in the compute dtype"
    assert local.parts[name] - shard.parts[name] == 2 * N * (K - 1) // K


@pytest.mark.slow
@needs_libtpu
@pytest.mark.rotated("schedules")
def test_the_estimated_difference_is_the_compiled_one(monkeypatch):
    """Of temporary buffers, on a TPU; layouts differ in nothing else.

    268M parameters: the sums of fewer fit into the 128 MB of a v5e's vector memory, in part.
    """
    wide = {"embed_dim": 2048, "num_heads": 16, "num_kv_heads": 16, "mlp_dim": 8192}
    monkeypatch.setitem(globals(), "LLAMA", dataclasses.replace(LLAMA, **wide))
    compiled, estimated = {}, {}
    for name in ("local", "shard"):
        config = configured(name, accumulation=2)
        over = layout(config, tpu_devices("v5e:2x4"))
        batch = config.train.data.abstract_batch(config.train.global_batch_size)
        done = lower_step(compose(config, over), batch).compile(QUICK)
        compiled[name] = done.memory_analysis().temp_size_in_bytes
        estimated[name] = memory(config, over, "tpu").temporaries
    difference = compiled["local"] - compiled["shard"]
    assert difference == pytest.approx(estimated["local"] - estimated["shard"], rel=0.25)


def test_plan_says_what_both_cost_and_which_fits():
    target, config = parse_target("v5e:2x4"), configured("shard", accumulation=10)
    over = abstract_layout(config, K)
    now, other = accumulations(config, target, over)
    assert (now.name, other.name) == ("shard", "local")
    norms = 4 * sum(
        math.prod(weight.shape) * (4 if weight.is_layer else 1)
        for weight in weights_of(LLAMA)
        if not weight.is_matrix
    )
    assert other.moved == sum(moved(configured("local", accumulation=10)).values()) + norms
    assert now.moved == sum(moved(config).values()) + 10 * norms
    assert other.memory > now.memory
    said = compare_accumulations(config, target, over)
    assert said is not None
    assert said.startswith("with Sharding.accumulate='shard' ")
    assert "with -b \"Sharding.accumulate='local'\"" in said
    assert said.count("(fits)") == 2
    # The other way round there is more traffic.
    local = configured("local", accumulation=10)
    assert compare_accumulations(local, target, abstract_layout(local, K)) is None
    once = configured("shard", accumulation=1)
    assert compare_accumulations(once, target, abstract_layout(once, K)) is None
    # Gradients that are summed on the hosts are so in their shards alone.
    on_hosts = dataclasses.replace(config, offload=Offload(gradients="host"))
    assert compare_accumulations(on_hosts, target, over) is None


def test_plan_does_not_offer_as_much_traffic_for_more_memory():
    target, sizes = parse_target("v5p:4x4x4"), ["Mesh.fsdp=64", "Train.global_batch_size=256"]
    config = load_config("llama_8b", [*sizes, "Train.accumulation=2"])
    over = abstract_layout(config, 64)
    now, other = accumulations(config, target, over)
    assert now.fits
    assert other.fits
    assert now.memory < other.memory
    assert 0.9 < other.moved / now.moved < 1
    assert compare_accumulations(config, target, over) is None


def test_where_it_does_nothing_it_is_refused():
    one = configured("local", accumulation=2, zero=1)
    with pytest.raises(UserError, match=r"accumulate='local' with Sharding.zero=1: .*zero=3"):
        check(one, device_count=K, platform="cpu")
    replicas = dataclasses.replace(
        configured("local", accumulation=2, exchange=Exchange(method="local_sgd")),
        mesh=dataclasses.replace(one.mesh, data=2, fsdp=4),
    )
    with pytest.raises(UserError, match=r"'local_sgd' with Sharding.accumulate='local'"):
        check(replicas, device_count=K, platform="cpu")
