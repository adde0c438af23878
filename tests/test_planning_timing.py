"""The predicted time of a step: its FLOPs, its links, and how the pieces add up."""

import dataclasses

import pytest
from test_planning_memory import TINY_GPT, T, config_of

from jaxtrain.attention import Attention
from jaxtrain.mesh import Mesh
from jaxtrain.pipeline.schedules import Pipeline, make_schedule
from jaxtrain.pipeline.timeline import simulate
from jaxtrain.planning.targets import parse_target
from jaxtrain.planning.timing import (
    EFFICIENCY,
    bandwidth,
    executed_flops,
    row_flops,
    slow_axes,
    step_time,
)
from jaxtrain.planning.traffic import Expected
from jaxtrain.precision import Precision
from jaxtrain.preflight import abstract_layout
from jaxtrain.remat import Remat

V5E, CPU = parse_target("v5e:2x4"), parse_target("cpu:8")
ROWS = 8
BFLOAT16 = Precision(compute="bfloat16")
MIB = 2**20


def config(mesh: dict, **sections):
    return config_of(TINY_GPT, mesh, rows=ROWS, **{"precision": BFLOAT16, **sections})


def closed_form_row() -> int:
    """6 N a token, and attention with the whole square of scores: 12 L T D a token, where the
    model's own figure has half of it."""
    layers, width, vocabulary = TINY_GPT.num_layers, TINY_GPT.embed_dim, TINY_GPT.vocab_size
    parameters = layers * 12 * width**2 + vocabulary * width
    return T * (6 * parameters + 12 * layers * T * width)


def moved(kind: str, axis: str, count: int, size: int) -> Expected:
    return Expected(kind, axis, count, size, "a cause", "")


# -- FLOPs -----------------------------------------------------------------------------------------


def test_a_row_costs_the_closed_form():
    found = row_flops(config({"fsdp": 8}))
    assert found.executed == closed_form_row()
    assert found.scores == 12 * TINY_GPT.num_layers * T * TINY_GPT.embed_dim * T


def test_recomputation_and_masks_that_kernels_skip():
    """Full remat makes qkv, out and up again, and the scores: 2 (3 + 1 + 4) D^2 + 4 T D."""
    layers, width = TINY_GPT.num_layers, TINY_GPT.embed_dim
    again = layers * T * (2 * 8 * width**2 + 4 * T * width)
    full = row_flops(config({"fsdp": 8}, remat=Remat(policy="full")))
    assert full.executed == closed_form_row() + again
    layout = abstract_layout(config({"fsdp": 8}), 8)
    plain = executed_flops(config({"fsdp": 8}), layout)
    skipping = executed_flops(config({"fsdp": 8}, attention=Attention(kernel="tpu")), layout)
    assert plain == closed_form_row() * ROWS / 8
    assert plain - skipping == 6 * layers * T * width * T * ROWS / 8


@pytest.mark.parametrize(
    ("matmul", "products", "target", "peaks", "assumption"),
    [
        ("float8", 3, "h100:1x8", (989e12, 1979e12), "1979 TFLOP/s (float8, weights inside"),
        # The gradients of the weights are computed in bfloat16.
        ("int8", 2, "v5e:2x4", (197e12, 393e12), "393 TFLOP/s (int8, weights, not their gradients"),
    ],
)
def test_products_of_8_bits_are_those_inside_the_layers_and_take_half_the_time(
    matmul, products, target, peaks, assumption
):
    narrow = Precision(compute="bfloat16", matmul=matmul)
    row = row_flops(config({"fsdp": 8}, precision=narrow))
    inside = 2 * products * T * TINY_GPT.num_layers * 12 * TINY_GPT.embed_dim**2
    assert (row.executed, row.narrow) == (closed_form_row(), inside)
    assert row_flops(config({"fsdp": 8})).narrow == 0
    took = []
    for precision in (BFLOAT16, narrow):
        one = config({"fsdp": 8}, precision=precision, attention=Attention(kernel="reference"))
        took.append(
            step_time(one, abstract_layout(one, 8), parse_target(target), [], update_bytes=0)
        )
    saved = inside * ROWS / 8 * (1 / peaks[0] - 1 / peaks[1]) / EFFICIENCY
    assert took[0].compute - took[1].compute == pytest.approx(saved, rel=1e-9)
    assert assumption in took[1].assumptions[0]


# -- links -----------------------------------------------------------------------------------------


def test_a_torus_is_shared_by_the_axes_that_use_it():
    """v5e: two directions of 45 GB/s each way; both ways round each ring."""
    link = V5E.chip.link_bandwidth
    alone = {"data": 1, "fsdp": 8, "tensor": 1}
    assert bandwidth("fsdp", alone, V5E, set()) == 2 * 2 * link
    both = {"data": 1, "fsdp": 4, "tensor": 2}
    assert bandwidth("fsdp", both, V5E, set()) == 2 * 1 * link
    assert bandwidth("fsdp+tensor", both, V5E, set()) == 2 * 2 * link
    assert bandwidth("part of tensor", both, V5E, set()) == 2 * 1 * link
    three = {"data": 2, "fsdp": 2, "tensor": 2}
    assert bandwidth("data", three, V5E, set()) == pytest.approx(2 * link * 2 / 3)
    # An axis that leaves the slice has the network, and leaves the torus to the others.
    assert bandwidth("data", three, V5E, {"data"}) == V5E.chip.dcn_bandwidth
    assert bandwidth("data+fsdp", three, V5E, {"data"}) == V5E.chip.dcn_bandwidth
    assert bandwidth("fsdp", three, V5E, {"data"}) == 2 * 1 * link


def test_gpus_have_the_full_rate_inside_a_host_and_the_network_outside():
    target = parse_target("h100:2x8")
    inside = config({"data": 2, "fsdp": 8})
    slow = slow_axes(inside, abstract_layout(inside, 16), target)
    assert slow == {"data"}
    sizes = {"data": 2, "fsdp": 8}
    assert bandwidth("fsdp", sizes, target, slow) == target.chip.link_bandwidth
    assert bandwidth("data", sizes, target, slow) == target.chip.dcn_bandwidth
    across = config({"fsdp": 16}, accumulation=1)
    assert slow_axes(across, abstract_layout(across, 16), target) == {"fsdp"}
    one = config({"data": 2, "fsdp": 4})
    assert slow_axes(one, abstract_layout(one, 8), parse_target("h100:1x8")) == set()


def test_slices_of_tpus_are_what_the_mesh_says():
    joined = dataclasses.replace(
        config({"fsdp": 1}), mesh=Mesh(data=2, fsdp=8, dcn={"data": 2, "fsdp": 1})
    )
    assert slow_axes(joined, abstract_layout(joined, 16), V5E) == {"data"}
    plain = config({"data": 2, "fsdp": 4})
    assert slow_axes(plain, abstract_layout(plain, 8), V5E) == set()
    assert slow_axes(plain, abstract_layout(plain, 8), CPU) == set()


# -- the pieces ------------------------------------------------------------------------------------


def timed(mesh: dict, traffic: list[Expected], target=V5E, *, update: int = 0, **sections):
    one = config(mesh, **sections)
    return step_time(one, abstract_layout(one, 8), target, traffic, update_bytes=update)


def test_computation_is_products_and_the_update():
    found = timed({"fsdp": 8}, [], update=8 * MIB)
    products = closed_form_row() / (197e12 * EFFICIENCY)
    assert found.compute == pytest.approx(products + 2 * 8 * MIB / 819e9)
    assert found.seconds == found.compute
    assert (found.exposed, found.bubble, found.hidden) == (0, 0, 0)
    assert found.mfu == pytest.approx(found.model_flops_per_device / 197e12 / found.compute)
    assert found.model_flops_per_device == TINY_GPT.flops_per_token(T) * T


def test_weights_hide_behind_computation_as_far_as_it_lasts():
    """A gather of shards of n over 8 devices sends 7 n, at 180 GB/s."""
    shard = MIB
    seconds = 7 * shard / (4 * 45e9)
    some = timed({"fsdp": 8}, [moved("all-gather", "fsdp", 1, shard)], update=100 * MIB)
    assert some.compute > seconds
    assert some.hidden == pytest.approx(seconds)
    assert some.exposed == 0
    assert some.seconds == some.compute
    assert some.by_axis == {"fsdp": pytest.approx(seconds)}
    many = timed({"fsdp": 8}, [moved("all-gather", "fsdp", 1000, shard)], update=100 * MIB)
    assert many.hidden == many.compute == some.compute
    assert many.exposed == pytest.approx(1000 * seconds - many.compute)
    assert many.seconds == pytest.approx(1000 * seconds)
    assert many.mfu < some.mfu


@pytest.mark.parametrize(
    ("axis", "kind", "waits"),
    [
        ("fsdp", "all-reduce", False),
        ("data", "all-reduce", False),
        ("data+fsdp", "all-reduce", False),
        ("tensor", "all-reduce", True),
        ("fsdp+tensor", "all-reduce", True),
        ("tensor", "collective-permute", False),
    ],
)
def test_activations_wait_for_what_is_sent(axis, kind, waits):
    found = timed(
        {"data": 2, "fsdp": 2, "tensor": 2}, [moved(kind, axis, 3, MIB)], update=1000 * MIB
    )
    sent = found.by_axis[axis]
    assert sent > 0
    assert (found.exposed, found.hidden) == ((sent, 0) if waits else (0, sent))
    assert found.seconds == found.compute + found.exposed


@pytest.mark.parametrize(
    ("backward", "times"), [("residuals", (2, 1)), ("recompute", (3, 2))], ids=str
)
def test_the_bubble_is_the_timelines(backward, times):
    pipeline = Pipeline(schedule="1f1b", microbatches=4, backward=backward)
    found = timed(
        {"pipe": 2, "tensor": 4},
        [moved("all-reduce", "tensor", 1, MIB)],
        pipeline=pipeline,
        update=MIB,
    )
    timeline = simulate(
        make_schedule("1f1b", ranks=2, microbatches=4), backward=times[0], backward_input=times[1]
    )
    assert found.exposed > 0
    assert found.seconds == pytest.approx(found.compute + found.exposed + found.bubble)
    assert found.bubble / found.seconds == pytest.approx(timeline.bubble_fraction)
    # (p - 1) / (m + p - 1) of the time, whatever a backward costs (arXiv 2104.04473).
    assert timeline.bubble_fraction == pytest.approx(1 / 5)


def test_a_chip_without_figures_has_no_time_and_says_so():
    found = timed({"fsdp": 8}, [moved("all-gather", "fsdp", 1, MIB)], CPU)
    nothing = (found.seconds, found.compute, found.exposed, found.bubble, found.hidden, found.mfu)
    assert nothing == (None,) * 6
    assert found.flops_per_device == closed_form_row() * ROWS / 8
    assert found.assumptions == ("no peak FLOP/s are known of cpu: no time is predicted",)
