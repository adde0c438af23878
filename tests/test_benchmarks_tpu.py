"""What the TPU benchmark reads out of a compiled program: cycles, loops, collectives that wait."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import needs_libtpu
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.overlap import ROWS  # noqa: E402 - after the path
from benchmarks.pipeline_cycles import Tick, tick_of  # noqa: E402
from benchmarks.tpu_cycles import expected  # noqa: E402
from jaxtrain.analysis.planning.compiled.schedule import PEAK, Scheduled  # noqa: E402
from jaxtrain.analysis.planning.machines.targets import parse_target, target_devices  # noqa: E402
from jaxtrain.analysis.planning.search.variants import rejection_reason  # noqa: E402
from jaxtrain.parallel.compilation import xla_options  # noqa: E402
from jaxtrain.training.pipeline.timetables import Work, make_schedule  # noqa: E402
from jaxtrain.training.settings import load_config  # noqa: E402

pytestmark = needs_libtpu
WIDTH = 1024


def looped(turns: int) -> Scheduled:
    """Of `turns` products of [WIDTH, WIDTH] and an addition to what each gives."""
    target = parse_target("v5e:2x2")
    device = target_devices(target)[0]
    shape = jax.ShapeDtypeStruct(
        (WIDTH, WIDTH), jnp.bfloat16, sharding=SingleDeviceSharding(device)
    )

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ x + x, None), x, length=turns)[0]

    return expected(jax.jit(loop).lower(shape).compile().as_text(), target)


def test_products_of_a_loop_count_as_often_as_it_turns() -> None:
    few, many = looped(5), looped(9)
    one = 2 * WIDTH**3
    assert (few.flops, many.flops) == (5 * one, 9 * one)
    assert many.products * 5 == few.products * 9
    # No faster than the matrix units, and of their order.
    assert 1 < few.products * PEAK["v5e"] / few.flops < 2
    assert (few.waits, few.kernels) == (0, 0)


@pytest.mark.slow_cases("7x", "v4", "v5p", "v6e")
@pytest.mark.parametrize("name", PEAK)
def test_a_large_product_takes_about_what_the_data_sheets_promise(name: str) -> None:
    """The clock that the published peak and the matrix units' size make."""
    target = parse_target(f"{name}:2x2" if name in ("v5e", "v6e") else f"{name}:2x2x1")
    device = target_devices(target)[0]
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    text = jax.jit(jnp.matmul).lower(shape, shape).compile().as_text()
    step = expected(text, target)
    assert step.flops == 2 * 4096**3
    assert 0.8 < step.flops / step.products / PEAK[name] <= 1
    assert target.chip.bf16_flops is not None
    assert target.chip.bf16_flops / PEAK[name] == pytest.approx(
        {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "7x": 2.2e9}[name], rel=0.005
    )


def test_a_collective_with_nothing_beside_it_is_waited_for() -> None:
    target = parse_target("v5p:2x2x1")
    mesh = Mesh(np.array(target_devices(target)), ("data",))
    rows = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def summed(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.psum(x, "data") * 0.5, None

        return jax.lax.scan(turn, x, length=3)[0]

    run = jax.shard_map(summed, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    step = expected(jax.jit(run).lower(rows).compile().as_text(), target)
    payload = (64 // 4) * 512 * 4
    assert step.waits == 3
    assert step.waits_bytes == 3 * payload
    assert step.flops == step.products == 0
    assert step.rest > 0
    # A ring all-reduce sends 2 n (k-1)/k; 90 GB/s a link, both ways round; 1.75 GHz.
    seconds = 2 * payload * 3 / 4 / (2 * 90e9)
    assert step.waited == pytest.approx(3 * seconds * 459e12 / 2**18, abs=3)


@functools.cache
def of_two_gathered_weights(name: str, *, ours: bool = False) -> tuple[Scheduled, int, int]:
    """Layers of two products, both weights gathered: the step, its layers, a weight's elements."""
    target = parse_target(name)
    devices = np.array(target_devices(target))
    mesh = Mesh(devices.ravel(), ("fsdp",), axis_types=(AxisType.Explicit,))
    layers, embed, mlp, rows = 6, 1024, 2048, 8192

    def forward(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            up, down = (jax.sharding.reshard(weight, P(None, None)) for weight in weights)
            return jnp.maximum(x @ up, 0) @ down, None

        return jax.lax.scan(layer, x, (up, down))[0]

    def shape(sizes: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        lowered = jax.jit(forward).lower(
            shape((rows * devices.size, embed), P("fsdp", None)),
            shape((layers, embed, mlp), P(None, "fsdp", None)),
            shape((layers, mlp, embed), P(None, "fsdp", None)),
        )
    options = xla_options("tpu", kind=target.chip.device_kinds[0]) if ours else {}
    step = expected(lowered.compile(options).as_text(), target)
    assert step.flops == layers * 2 * 2 * rows * embed * mlp
    return step, layers, embed * mlp


@pytest.mark.slow_cases("v6e:2x2-2", "v5p:2x2x1-2")
@pytest.mark.parametrize(("name", "waits"), [("v5e:2x2", 1), ("v5p:2x2x1", 2), ("v6e:2x2", 2)])
def test_a_gather_inside_a_product_is_not_waited_for(name: str, waits: int) -> None:
    """On v5e the second weight is gathered while the first one is multiplied, which libtpu does
    nowhere else by itself."""
    step, layers, elements = of_two_gathered_weights(name)
    assert step.waits == waits * layers
    assert step.waits_bytes == waits * layers * elements * 2


# On larger machines gathers are gathers too: tests/test_torus_collectives.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5p:2x2x1", "v6e:2x2"])
def test_with_our_options_products_run_beside_gathers(name: str) -> None:
    """SparseCores gather the second weight beside the first one's product; the first is wanted at
    once."""
    plain, _, _ = of_two_gathered_weights(name)
    ours, _, _ = of_two_gathered_weights(name, ours=True)
    assert ours.waits == 0 < plain.waits
    assert 0 < ours.waited < 0.6 * plain.waited
    assert total(ours) < 0.95 * total(plain)


def total(step: Scheduled) -> float:
    """All cycles that are known."""
    return step.products + step.rest + step.waited


@pytest.mark.slow
@pytest.mark.rotated("options of long runs")
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_our_options_of_long_runs_keep_the_matrix_units_busier(name: str) -> None:
    target = parse_target(name)
    device, kind = target_devices(target)[0], target.chip.device_kinds[0]
    sharding = SingleDeviceSharding(device)
    shape = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=sharding)
    lowered = jax.jit(jnp.matmul).lower(shape, shape)
    short, long = (
        expected(lowered.compile(xla_options("tpu", steps, kind)).as_text(), target)
        for steps in (9_999, 10_000)
    )
    assert long.flops == short.flops
    assert long.products < 0.97 * short.products


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_a_pipelines_lockstep_is_the_ideal_and_what_stands_between_actions(name):
    schedule = make_schedule(
        name, ranks=4, microbatches=16, virtual_stages=12 if name == "interleaved" else 1
    )
    costs = {
        Work.IDLE: 3, Work.FORWARD: 1000, Work.BACKWARD: 3500, Work.BACKWARD_INPUT: 2200,
        Work.BACKWARD_WEIGHT: 900,
    }  # fmt: skip
    tick = Tick(costs, between=17)
    assert tick.lockstep(schedule) == tick.ideal(schedule) + 17 * len(schedule.ticks)
    work = {"zero_bubble": 16 * 4100 + 3 * 2300, "interleaved": (12 * 16 + 3) * 4500}
    assert tick.ideal(schedule) == work.get(name, 19 * 4500)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_overlap_table_can_run(name):
    row = ROWS[name]
    text = ("SOURCE = '.'", "TOKENIZER = 'byte'", "TextData.separate_documents = False")
    config = load_config(row.config, [*text, *row.bindings])
    assert rejection_reason(config, parse_target(row.target)) is None


_TICK = """HloModule tick
%idle (p: s32[]) -> s32[] {
  ROOT %p = s32[] parameter(0)
}
%forward (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %f = s32[] negate(%p), backend_config={"estimated_cycles":"100"}
}
%backward (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %b = s32[] negate(%p), backend_config={"estimated_cycles":"250"}
}
ENTRY %main (k: s32[], p: s32[]) -> s32[] {
  %k = s32[] parameter(0)
  %p = s32[] parameter(1)
  %c = s32[] conditional(%k, %p, %p, %p), branch_computations={%idle, %forward, %backward}, \
metadata={op_name="jit(train_step)/shard_map/while/body/closed_call/stage/cond"}
  ROOT %n = s32[] negate(%c), backend_config={"estimated_cycles":"7"}
}
"""


def test_the_actions_of_a_tick_are_found_in_a_program():
    found = tick_of(_TICK, make_schedule("1f1b", ranks=2, microbatches=2))
    assert found == Tick({Work.IDLE: 0, Work.FORWARD: 100, Work.BACKWARD: 250}, between=7)
