"""Collectives read from compiled programs of our own: what was written is what is found."""

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_libtpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.analysis.planning.compiled.collectives import (
    collectives,
    mesh_axes,
    replica_groups,
    summarize,
)
from jaxtrain.analysis.planning.compiled.costs import costs
from jaxtrain.analysis.planning.compiled.hlo import Tensor, parse
from jaxtrain.analysis.planning.compiled.liveness import fullest
from jaxtrain.analysis.planning.machines.targets import tpu_devices

SIZES = {"a": 2, "b": 4}


@pytest.fixture(params=["cpu", pytest.param("tpu", marks=needs_libtpu)])
def mesh(request):
    devices = jax.devices() if request.param == "cpu" else tpu_devices("v5e:2x4")
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), devices=devices)


REPLICATED = P()


def found_in(function, mesh, shape, spec=REPLICATED, branch_counts=None):
    """Collectives of `function`, which runs on every device with its part of a float32 array."""
    run = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    return collectives(run.lower(x).compile().as_text(), mesh, branch_counts)


def rows(found):
    return [(row["kind"], row["axis"], row["count"], row["bytes"]) for row in summarize(found)]


def test_loops_are_multiplied_out(mesh):
    def nested(x):
        def inner(x, _):
            return jnp.sin(jax.lax.psum(x, "b")), None

        def outer(x, _):
            x = jax.lax.psum(jnp.cos(x), "a")
            return jax.lax.scan(inner, x, length=3)[0], None

        return jax.lax.scan(outer, x, length=5)[0]

    found = found_in(nested, mesh, (16, 128))
    payload = 16 * 128 * 4
    assert rows(found) == [
        ("all-reduce", "a", 5, 5 * payload),
        ("all-reduce", "b", 15, 15 * payload),
    ]


def test_kinds_payloads_and_axes(mesh):
    def every_kind(x):
        whole = jax.lax.all_gather(x, "a", tiled=True)  # [64, 128] from [32, 128]
        whole = jnp.sin(jax.lax.psum(whole, ("a", "b")))
        x = jax.lax.ppermute(whole[:32], "b", [(i, (i + 1) % 4) for i in range(4)])
        return jnp.cos(jax.lax.all_to_all(x, "b", 1, 0, tiled=True).reshape(32, 128))

    found = found_in(every_kind, mesh, (64, 128), P("a"))
    part = 32 * 128 * 4
    assert rows(found) == [
        ("all-gather", "a", 1, part),
        ("all-reduce", "a+b", 1, 2 * part),
        ("all-to-all", "b", 1, part),
        ("collective-permute", "b", 1, part),
    ]


@needs_libtpu
def test_a_reduce_scatter_is_found_where_the_tpu_compiler_hides_it():
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), devices=tpu_devices("v5e:2x4"))

    def scatter(x):
        return jax.lax.psum_scatter(jnp.sin(x), "b", tiled=True)

    run = jax.shard_map(scatter, mesh=mesh, in_specs=P(), out_specs=P("b"), check_vma=False)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    text = jax.jit(run).lower(x).compile().as_text()
    assert rows(collectives(text, mesh)) == [("reduce-scatter", "b", 1, 1024 * 256 * 2)]


def test_branches_count_as_taken_unless_the_caller_knows_better(mesh):
    def scheduled(x):
        def tick(x, t):
            def send(x):
                with jax.named_scope("send_1"):
                    return jax.lax.ppermute(x, "b", [(0, 1)])

            def reduce(x):
                with jax.named_scope("send_12"):
                    return jax.lax.psum(x, "b")

            return jnp.sin(jax.lax.switch(t % 3, [send, reduce, jnp.cos], x)), None

        return jax.lax.scan(tick, x, jnp.arange(9))[0]

    def counts(branch_counts):
        found = found_in(scheduled, mesh, (16, 128), branch_counts=branch_counts)
        return {(one.kind, one.count) for one in found}

    assert counts(None) == {("collective-permute", 9), ("all-reduce", 9)}
    assert counts({"send_1": 3}) == {("collective-permute", 3), ("all-reduce", 9)}
    by_scope = {"send_12": 4, "send_1": 3}
    assert counts(by_scope) == {("collective-permute", 3), ("all-reduce", 4)}
    assert counts(lambda scope: 7 if "send_12" in scope else None) == {
        ("collective-permute", 9),
        ("all-reduce", 7),
    }


def test_a_loop_inside_a_branch_multiplies_the_callers_count(mesh):
    """A stage's layers, in each of its ticks."""

    def scheduled(x):
        def layer(x, _):
            return jnp.sin(jax.lax.psum(x, "b")), None

        def tick(x, t):
            def stage(x):
                with jax.named_scope("stage"):
                    return jax.lax.scan(layer, x, None, length=5)[0]

            return jax.lax.cond(t < 3, stage, jnp.cos, x), None

        return jax.lax.scan(tick, x, jnp.arange(9))[0]

    def counts(branch_counts):
        return [
            one.count for one in found_in(scheduled, mesh, (16, 128), REPLICATED, branch_counts)
        ]

    assert counts(None) == [9 * 5]
    assert counts({"stage": 3}) == [3 * 5]


def test_a_loop_that_ends_when_it_likes_is_refused(mesh):
    def until_small(x):
        return jax.lax.while_loop(lambda x: x.sum() > 1.0, lambda x: jax.lax.psum(x, "b") / 8, x)

    with pytest.raises(ValueError, match="does not give its trip count"):
        found_in(until_small, mesh, (16, 128))


# -- forms that a small program does not bring about -----------------------------------------------

HIDDEN = """HloModule step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: f32[64,8], q: bf16[32]) -> (f32[16,8], bf16[8]) {
  %p = f32[64,8]{1,0:T(8,128)S(1)} parameter(0)
  %q = bf16[32]{0:T(256)(128)(2,1)} parameter(1)
  %ar = (f32[64,8]{1,0}, bf16[32]{0}) all-reduce(%p, %q), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slices = (f32[16,8], bf16[8]) custom-call(%ar), custom_call_target="slices"
}

%part.1 (s: bf16[4,8]) -> bf16[16,8] {
  %s = bf16[4,8]{1,0} parameter(0)
  ROOT %ag.1 = bf16[16,8]{1,0} all-gather(%s), channel_id=7, \
replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, dimensions={0}, \
frontend_attributes={chain_id="0"}
}

%part.2 (s: bf16[4,8]) -> bf16[16,8] {
  %s.2 = bf16[4,8]{1,0} parameter(0)
  ROOT %ag.2 = bf16[16,8]{1,0} all-gather(%s.2), channel_id=7, \
replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, dimensions={0}, \
frontend_attributes={chain_id="0"}
}

%later (l: f32[8]) -> f32[16] {
  %l = f32[8]{0} parameter(0)
  ROOT %ag.3 = f32[16]{0} all-gather(%l), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

ENTRY %main (a: f32[64,8], b: bf16[32], c: bf16[4,8], d: f32[8]) -> f32[16] {
  %a = f32[64,8]{1,0} parameter(0)
  %b = bf16[32]{0} parameter(1)
  %c = bf16[4,8]{1,0} parameter(2)
  %d = f32[8]{0} parameter(3)
  %rs = (f32[16,8], bf16[8]) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter.1, \
metadata={op_name="jit(step)/gradients"}
  %begin = bf16[16,8]{1,0} fusion(%c), kind=kLoop, calls=%part.1
  %end = bf16[16,8]{1,0} fusion(%c), kind=kLoop, calls=%part.2
  %alone = f32[64,8]{1,0} all-reduce(%a), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, \
to_apply=%add
  %start = ((f32[8]{0}), f32[16]{0}, u32[]) async-start(%d), calls=%later
  %perm = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%d), \
source_target_pairs={{0,4},{4,0}}
  %perm.done = f32[8]{0} collective-permute-done(%perm)
  %all = f32[8]{0} all-reduce(%d), replica_groups={}, to_apply=%add
  ROOT %done = f32[16]{0} async-done(%start)
}
"""


def test_combined_wrapped_and_spread_collectives_are_found_once():
    found = {(o.kind, o.axis, o.bytes, o.op_name, o.count) for o in collectives(HIDDEN, SIZES)}
    assert found == {
        ("reduce-scatter", "b", 64 * 8 * 4, "jit(step)/gradients", 1),
        ("reduce-scatter", "b", 32 * 2, "jit(step)/gradients", 1),
        ("all-gather", "b", 4 * 8 * 2, "", 1),
        ("all-gather", "a", 8 * 4, "", 1),
        ("collective-permute", "a", 8 * 4, "", 1),
        ("all-reduce", "a+b", 8 * 4, "", 1),
    }
    # The two arrays of the reduce-scatter are launched together.
    assert ("reduce-scatter", "b", 1, 64 * 8 * 4 + 32 * 2) in rows(collectives(HIDDEN, SIZES))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['x'=2,'y'=2] {'x'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['x'=2,'y'=2] {'x','y'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['x'=4] {'x':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['x'=4] {'x':(1)2}", [[0, 2], [1, 3]]),
    ],
)
def test_every_way_of_writing_groups(text, groups):
    assert replica_groups(text, 4) == groups


def test_groups_that_cover_an_axis_in_part_say_so():
    assert mesh_axes([[0, 1], [2, 3], [4, 5], [6, 7]], SIZES) == "part of b"
    assert mesh_axes([[0, 4], [1, 5], [2, 6], [3, 7]], SIZES) == "a"
    assert mesh_axes([[0], [1]], SIZES) == ""


def test_bytes_of_narrow_and_empty_arrays():
    assert Tensor("s4", (3,)).bytes == 2
    assert Tensor("f8e4m3fn", (3, 5)).bytes == 15
    assert Tensor("pred", ()).bytes == 1
    assert Tensor("f32", (0, 8)).bytes == 0


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("module @jit_step { }")


def test_a_kernels_configuration_may_span_lines():
    """Pallas kernels print theirs so, and one of its lines begins with a closing brace."""
    text = """HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %kernel = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={
"metadata":"{\\"block\\": 8}"
}}, metadata={op_name="attention/kernel"}
  ROOT %after = f32[4]{0} all-reduce(%kernel), replica_groups={{0,1}}, to_apply=%sum
}
"""
    main = parse(text).computations["main"]
    assert list(main.instructions) == ["x", "kernel", "after"]
    assert main.instructions["kernel"].op_name == "attention/kernel"
    assert main.instructions["kernel"].operands == ["x"]
    found = collectives(text, {"data": 2})
    assert [(one.kind, one.axis, one.bytes) for one in found] == [("all-reduce", "data", 16)]


ON_A_STREAM = """HloModule jit_f, is_scheduled=true

%update (kept: bf16[12,64], new: bf16[64], at: s32[]) -> bf16[12,64] {
  %kept = bf16[12,64]{1,0} parameter(0)
  %new = bf16[64]{0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = bf16[1,64]{1,0} bitcast(%new)
  ROOT %dynamic_update_slice.1 = bf16[12,64]{1,0} dynamic-update-slice(%kept, %row, %at, %zero)
}

ENTRY %main (kept.1: bf16[12,64], new.1: bf16[64], at.1: s32[]) -> bf16[12,64] {
  %kept.1 = bf16[12,64]{1,0} parameter(0)
  %new.1 = bf16[64]{0} parameter(1)
  %at.1 = s32[] parameter(2)
  %fusion-start = ((bf16[12,64], bf16[64], s32[]), bf16[12,64]{1,0}, u32[]) fusion-start(%kept.1, %new.1, %at.1), kind=kLoop, calls=%update
  ROOT %fusion-done = bf16[12,64]{1,0} fusion-done(%fusion-start)
}
"""  # noqa: E501


def test_a_fusion_on_a_stream_of_its_own_counts_where_it_starts():
    """As GPUs' compilers write what loops keep since jaxlib 0.11: a row of 64 numbers is read and
    written, beside the number of the row, and no array is made."""
    module = parse(ON_A_STREAM)
    start, done = (
        module.computations["main"].instructions[f"fusion-{n}"] for n in ("start", "done")
    )
    assert (start.opcode, done.opcode) == ("fusion", "bitcast")
    assert start.tensors == done.tensors == (Tensor("bf16", (12, 64)),)
    assert {name: one.moved_bytes for name, one in costs(module).items()} == {
        "fusion-start": 2 * 2 * 64 + 4
    }
    assert fullest(ON_A_STREAM) == []
