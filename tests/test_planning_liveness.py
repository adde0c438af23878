"""What is alive at the memory peak, against hand-made programs and the TPU compiler's sum."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_libtpu

from jaxtrain.analysis.planning.compiled.liveness import Buffer, fullest, padded_bytes
from jaxtrain.analysis.planning.machines.targets import tpu_devices


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # Minor to major 1, 0, 2: 4096 lies innermost, then 2; both fill their tile of (2, 128).
        ("f32[2,4096,1]{1,0,2:T(2,128)}", [2 * 4096 * 4]),
        # In the plain order 1 would be padded to 128 and 4096 is whole already.
        ("f32[2,4096,1]{2,1,0:T(8,128)}", [2 * 4096 * 128 * 4]),
        ("f32[3,100]{1,0:T(8,128)}", [8 * 128 * 4]),
        # 20 rows to 24, 200 columns to 256; the second tile only interleaves pairs of rows.
        ("bf16[20,200]{1,0:T(8,128)(2,1)}", [24 * 256 * 2]),
        # The other way round 200 is whole in 8s and 20 becomes 128.
        ("bf16[20,200]{0,1:T(8,128)(2,1)}", [200 * 128 * 2]),
        ("bf16[5,20,200]{2,1,0:T(8,128)(2,1)}", [5 * 24 * 256 * 2]),
        ("f32[130]{0:T(128)}", [256 * 4]),
        ("f32[8,128]{1,0:T(8,128)S(1)}", [0]),
        ("f32[5,3]{1,0}", [60]),
        ("f32[5,3]", [60]),
        ("f32[]", [4]),
        ("pred[7]", [7]),
        ("s4[3]", [2]),
        ("(f32[4]{0}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=2*/bf16[8,128]{1,0})",
         [16, 0, 2048]),
    ],
)  # fmt: skip
def test_bytes_with_the_padding_of_tiles(written, expected):
    assert padded_bytes(written) == expected


def names(buffers: list[Buffer]) -> list[tuple[str, int]]:
    return [(buffer.type, buffer.bytes) for buffer in buffers]


CHAIN = """HloModule chain, is_scheduled=true

ENTRY %main (x: f32[9999]) -> f32[1024] {
  %x = f32[9999]{0} parameter(0)
  %a = f32[2048]{0} custom-call(%x), custom_call_target="a", metadata={op_name="jit(f)/mlp/a"}
  %b = f32[4096]{0} custom-call(%a), custom_call_target="b"
  %c = f32[512]{0} custom-call(%b), custom_call_target="c"
  ROOT %d = f32[1024]{0} custom-call(%c), custom_call_target="d"
}
"""


def test_a_chain_keeps_an_operand_and_its_result():
    """Bytes are 8192, 16384, 2048, 4096: the first two meet; arguments do not count."""
    found = fullest(CHAIN)
    assert names(found) == [("f32[4096]", 16384), ("f32[2048]", 8192)]
    assert [buffer.op_name for buffer in found] == ["", "jit(f)/mlp/a"]


def test_what_is_used_again_stays():
    """`a` is read at the end too, so that it meets `b` and `c`."""
    text = CHAIN.replace("custom-call(%c)", "custom-call(%c, %a)")
    assert sum(buffer.bytes for buffer in fullest(text)) == 8192 + 16384 + 2048


def test_a_view_keeps_what_it_looks_at():
    """`b` is read through a bitcast that lives to the end, where 16384 + 2048 + 4096 meet less
    than `a` and `b` did, unless `d` is larger."""
    text = CHAIN.replace("f32[1024]", "f32[8192]").replace(
        "  %c =", "  %v = f32[64,64]{1,0} bitcast(%b)\n  %c ="
    )
    held = text.replace("custom-call(%c)", "custom-call(%c, %v)")
    assert sum(buffer.bytes for buffer in fullest(text)) == 2048 + 32768
    assert sum(buffer.bytes for buffer in fullest(held)) == 16384 + 2048 + 32768


def test_an_asynchronous_copy_is_one_array():
    text = """HloModule copies, is_scheduled=true

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %s = (f32[1024]{0}, f32[1024]{0}, u32[]) copy-start(%x)
  ROOT %e = f32[1024]{0} copy-done(%s)
}
"""
    assert sum(buffer.bytes for buffer in fullest(text)) == 4096


LOOP = """HloModule loop, is_scheduled=true

%update (p: f32[64,16], q: f32[1,16], i: s32[]) -> f32[64,16] {
  %p = f32[64,16]{1,0} parameter(0)
  %q = f32[1,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %u = f32[64,16]{1,0} dynamic-update-slice(%p, %q, %i, %z)
}

%body (carried: (s32[], f32[64,16], f32[256])) -> (s32[], f32[64,16], f32[256]) {
  %carried = (s32[], f32[64,16]{1,0}, f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%carried), index=0
  %stack = f32[64,16]{1,0} get-tuple-element(%carried), index=1
  %kept = f32[256]{0} get-tuple-element(%carried), index=2
  %t = f32[2048]{0} custom-call(%kept), custom_call_target="t"
  %row = f32[1,16]{1,0} custom-call(%t), custom_call_target="row"
  %new = f32[64,16]{1,0} fusion(%stack, %row, %n), kind=kLoop, calls=%update
  ROOT %out = (s32[], f32[64,16]{1,0}, f32[256]{0}) tuple(%n, %new, %kept)
}

%condition (state: (s32[], f32[64,16], f32[256])) -> pred[] {
  %state = (s32[], f32[64,16]{1,0}, f32[256]{0}) parameter(0)
  %m = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(64)
  ROOT %less = pred[] compare(%m, %end), direction=LT
}

ENTRY %main (x: f32[256]) -> f32[100] {
  %x = f32[256]{0} parameter(0)
  %zero = s32[] constant(0)
  %empty = f32[64,16]{1,0} custom-call(%x), custom_call_target="empty"
  %copied = f32[256]{0} custom-call(%x), custom_call_target="copied"
  %start = (s32[], f32[64,16]{1,0}, f32[256]{0}) tuple(%zero, %empty, %copied)
  %loop = (s32[], f32[64,16]{1,0}, f32[256]{0}) while(%start), condition=%condition, body=%body
  %filled = f32[64,16]{1,0} get-tuple-element(%loop), index=1
  ROOT %last = f32[100]{0} custom-call(%filled), custom_call_target="last"
}
"""


def test_a_loop_carries_its_arrays_once_beside_what_its_body_makes():
    """Carried: 4096 and 1024 bytes; in the body a temporary of 8192 while a row of 64 is made,
    which is written into the carried array in place."""
    assert names(fullest(LOOP)) == [
        ("f32[2048]", 8192),
        ("f32[64,16]", 4096),
        ("f32[256]", 1024),
        ("f32[1,16]", 64),
    ]


def test_a_fusion_that_writes_elsewhere_makes_an_array():
    """The same with `row` in the other array's place: `new` lives beside what is carried, and
    `t` to the end so that all meet."""
    text = LOOP.replace("ROOT %u = f32[64,16]{1,0} dynamic-update-slice(%p, %q, %i, %z)",
                        "ROOT %u = f32[64,16]{1,0} add(%p, %p)")  # fmt: skip
    text = text.replace("fusion(%stack, %row, %n)", "fusion(%stack, %row, %t)")
    assert sum(buffer.bytes for buffer in fullest(text)) == 4096 + 1024 + 8192 + 64 + 4096


def test_of_a_tuple_only_the_part_that_is_used_stays():
    """After the loop 4096 bytes are read; the other carried array (1024) is gone. What comes last
    is made larger than the body's temporaries, so that the memory peak is there."""
    text = LOOP.replace("f32[100]", "f32[10000]")
    assert names(fullest(text)) == [("f32[10000]", 40000), ("f32[64,16]", 4096)]


@needs_libtpu
def test_a_compiled_scans_fullest_moment_is_the_compilers():
    """Residuals of 1.5 GiB beside gradients of 384 MiB, far more than a chip's vector memory.

    The compiler's own figure, peak less arguments, comes from its buffer assignment, and counts
    the vector memory too.
    """
    layers, rows, width = 48, 8192, 2048

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ weight), None

        return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).sum()

    device = jax.sharding.SingleDeviceSharding(tpu_devices("v5e:1x1")[0])
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16, sharding=device)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16, sharding=device)
    compiled = jax.jit(jax.grad(loss)).lower(weights, x).compile()
    stats: Any = compiled.memory_analysis()
    live = stats.peak_memory_in_bytes - stats.argument_size_in_bytes
    residuals = layers * rows * width * 2
    found = fullest(compiled.as_text() or "")
    assert live > residuals
    assert sum(buffer.bytes for buffer in found) == pytest.approx(live, rel=0.15)
    assert found[0].bytes >= residuals
