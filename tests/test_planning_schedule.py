"""What a compiled program's schedule says of a step: prices of operations, what waits for what."""

import pytest
from conftest import lower_step, make_layout, make_step, text_batch

from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.compiled.schedule import PEAK, by_launch, seconds_of, waits, walk
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama

# A loop of three turns: a gather that a product hides, then an all-reduce that nothing hides, and a
# kernel; around it a branch that is taken or not.
_PROGRAM = """HloModule step

%condition (p: (s32[], f32[256,256])) -> pred[] {
  %p = (s32[], f32[256,256]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[], f32[256,256])) -> (s32[], f32[256,256]) {
  %p = (s32[], f32[256,256]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[256,256] get-tuple-element(%p), index=1
  %gather = (f32[64,256], f32[256,256]) all-gather-start(%x), channel_id=1, \
replica_groups={{0,1,2,3}}, dimensions={0}
  %dot = f32[256,256] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gathered = f32[256,256] all-gather-done(%gather)
  %attention = f32[256,256] custom-call(%dot, %gathered), \
custom_call_target="__cudnn$fmhaSoftmax"
  %sum = f32[256,256] all-reduce(%attention), channel_id=2, \
replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %next = (s32[], f32[256,256]) tuple(%i, %sum)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%cheap (x: f32[256,256]) -> f32[256,256] {
  %x = f32[256,256] parameter(0)
  ROOT %same = f32[256,256] copy(%x)
}

%expensive (x: f32[256,256]) -> f32[256,256] {
  %x = f32[256,256] parameter(0)
  %once = f32[256,256] negate(%x)
  ROOT %twice = f32[256,256] negate(%once)
}

ENTRY %main (i: s32[], x: f32[256,256], which: s32[]) -> f32[256,256] {
  %i = s32[] parameter(0)
  %x = f32[256,256] parameter(1)
  %which = s32[] parameter(2)
  %start = (s32[], f32[256,256]) tuple(%i, %x)
  %loop = (s32[], f32[256,256]) while(%start), condition=%condition, body=%body
  %out = f32[256,256] get-tuple-element(%loop), index=1
  ROOT %branch = f32[256,256] conditional(%which, %out, %out), \
branch_computations={%cheap, %expensive}
}
"""
_BYTES = 4 * 256 * 256


def run(link_seconds: float, kernel: float = 0.0):
    target = parse_target("h100:1x4")
    moved = by_launch(collectives(_PROGRAM, {"fsdp": 4}), lambda one: link_seconds)
    return walk(
        _PROGRAM, seconds_of(target, products=0.5, memory=0.8, thorough=False), moved, kernel=kernel
    )


def test_an_operation_takes_its_flops_or_its_bytes():
    """The data sheet's 989 TFLOP/s and 3.35 TB/s; of a branch the dearer one counts."""
    found = run(0.0)
    product = max(2 * 256**3 / (0.5 * 989e12), 3 * _BYTES / (0.8 * 3.35e12))
    assert found.flops == 3 * 2 * 256**3
    assert found.products == pytest.approx(3 * product)
    assert found.rest == pytest.approx(2 * 2 * _BYTES / (0.8 * 3.35e12))
    assert (found.kernels, found.waits, found.waited) == (3, 3, 0)
    assert found.waits_bytes == 3 * _BYTES


def test_a_collective_waits_for_what_does_not_run_beside_it():
    product = run(0.0).products / 3
    short, long = run(0.25 * product), run(4 * product)
    # The product hides the gather; nothing hides the reduction, nor what is left of a gather.
    assert short.waited == pytest.approx(3 * 0.25 * product)
    assert long.waited == pytest.approx(3 * (4 + 3) * product)
    assert short.sent == pytest.approx(3 * 2 * 0.25 * product)
    assert (short.products, short.rest) == (long.products, long.rest)


def test_each_kind_of_collective_waits_for_its_own_part():
    product = run(0.0).products / 3
    of = collectives(_PROGRAM, {"fsdp": 4})
    for takes, gather in ((0.25 * product, 0.0), (4 * product, 3 * product)):
        found = waits(run(takes), of, lambda one, takes=takes: takes)
        assert found["all-gather", "fsdp"] == pytest.approx((3 * gather, 3 * takes))
        assert found["all-reduce", "fsdp"] == pytest.approx((3 * takes, 3 * takes))


def test_what_stands_in_a_branch_of_a_pipeline_runs_as_often_as_is_given():
    """A scope with a count of its own, in which a loop multiplies."""
    text = _PROGRAM.replace(
        "branch_computations={%cheap, %expensive}",
        'branch_computations={%cheap, %expensive}, metadata={op_name="jit(step)/stage/cond"}',
    ).replace("body=%body", 'body=%body, metadata={op_name="jit(step)/stage/while"}')
    target = parse_target("h100:1x4")
    moved = by_launch(collectives(text, {"fsdp": 4}, {"stage": 5}), lambda one: 0.0)
    price = seconds_of(target, products=0.5, memory=0.8, thorough=False)
    found = walk(text, price, moved, {"stage": 5})
    one = 2 * _BYTES / (0.8 * 3.35e12)
    assert found.rest == pytest.approx(5 * 3 * one)
    assert found.flops == 5 * 3 * 2 * 256**3
    assert found.kernels == 5 * 3


def test_cycles_of_a_tpu_bound_products_from_below_and_other_work_from_above():
    target = parse_target("v5p:2x2x1")
    clock = 459e12 / PEAK["v5p"]

    def text(product: int, other: int) -> str:
        estimate = ', backend_config={{"estimated_cycles":"{}"}}'.format
        return _PROGRAM.replace(
            "rhs_contracting_dims={0}", "rhs_contracting_dims={0}" + estimate(product)
        ).replace("negate(%x)", "negate(%x)" + estimate(other))

    def took(product: int, other: int, *, thorough: bool = True):
        price = seconds_of(target, products=0.9, memory=0.8, thorough=thorough)
        return walk(text(product, other), price, {})

    slow, fast = took(10**6, 10**6), took(1, 1)
    assert slow.products == pytest.approx(3 * 10**6 / clock)
    assert fast.products == pytest.approx(3 * 2 * 256**3 / (0.9 * 459e12))
    # What was compiled quickly fills the units worse than a run's: its bytes count.
    quick = took(10**6, 10**6, thorough=False)
    flops, moved = 2 * 256**3 / (0.9 * 459e12), 3 * _BYTES / (0.8 * 2765e9)
    assert quick.products == pytest.approx(3 * max(flops, moved))
    # An operation of which libtpu says nothing takes no time: only one of the two negations counts.
    assert slow.rest == pytest.approx(2 * _BYTES / (0.8 * 2765e9))
    assert fast.rest == pytest.approx(1 / clock)


@pytest.mark.slow_cases("gpt-1", "gpt-2", "llama-1")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "sizes",
    [
        GPT(vocab_size=96, num_layers=2, embed_dim=32, num_heads=4, context_length=16),
        Llama(vocab_size=96, num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48,
              context_length=16),
    ],
    ids=["gpt", "llama"],
)  # fmt: skip
def test_products_of_a_compiled_step_are_the_closed_form_to_the_flop(sizes, accumulation):
    """6 N of every token, and 12 T D a layer of attention that computes every pair."""
    rows, length = 4, 16
    program = make_step(sizes, make_layout(), accumulation=accumulation)
    batch = text_batch(rows=rows, length=length, vocab_size=96)
    price = seconds_of(parse_target("h100:1x1"), products=0.5, memory=0.8, thorough=False)
    found = walk(lower_step(program, batch).compile().as_text(), price, {})
    pairs = 12 * sizes.num_layers * length * sizes.embed_dim
    assert found.flops == rows * length * (6 * sizes.matmul_parameters() + pairs)
