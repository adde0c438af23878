"""Over a pipeline's boundaries goes what the table sends and nothing else, compiled for TPUs."""

import collections

import pytest
from conftest import lower_step, make_step, needs_libtpu, text_batch
from test_planning_traffic import LLAMA, LLAMA8, audited, compiled_step, config_of, deep, faults

from jaxtrain.analysis.planning.compiled.collectives import collectives
from jaxtrain.analysis.planning.machines.targets import tpu_devices
from jaxtrain.analysis.planning.textbook.steady import crossings
from jaxtrain.analysis.planning.textbook.traffic import branch_counts
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.t5 import T5
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.mesh import Mesh, make_mesh
from jaxtrain.parallel.sharding import Layout, Sharding
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.pipeline.parts import PairParts
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.pipeline.slots import sends
from jaxtrain.training.pipeline.timetables import make_schedule

pytestmark = needs_libtpu

RANKS, MICROBATCHES, ROWS, LENGTH, EMBED, VOCAB = 4, 8, 16, 128, 256, 128
MODEL = Llama(
    vocab_size=VOCAB, num_layers=RANKS, embed_dim=EMBED, num_heads=2, num_kv_heads=2,
    mlp_dim=512, context_length=LENGTH,
)  # fmt: skip


# Traffic is decided before the compiler searches for fast tilings.
QUICK = {"exec_time_optimization_effort": -1.0}


@pytest.mark.slow_cases("1f1b", "gpipe")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_each_boundary_carries_each_microbatch_once_each_way(schedule):
    table = make_schedule(schedule, ranks=RANKS, microbatches=MICROBATCHES)
    edges, ticks = {}, {}
    for way, by_tick in zip(("forward", "backward"), sends(table), strict=True):
        patterns = collections.Counter(tuple(sorted(tick)) for tick in by_tick)
        for number, pattern in enumerate(sorted(patterns)):
            edges[f"send_{way}_{number}"] = pattern
            ticks[f"send_{way}_{number}"] = patterns[pattern]
    # Each way each of the p - 1 boundaries is crossed by each of the m microbatches.
    for way in ("forward", "backward"):
        crossed = sum(len(edges[n]) * ticks[n] for n in edges if way in n)
        assert crossed == MICROBATCHES * (RANKS - 1)

    mesh = make_mesh(Mesh(pipe=RANKS, fsdp=1), tpu_devices("v5e:2x2"))
    program = make_step(
        MODEL,
        Layout(mesh),
        precision=Precision(compute="bfloat16"),
        execution=Execution(kernel="xla"),
        pipeline=Pipeline(schedule=schedule, microbatches=MICROBATCHES),
    )
    batch = text_batch(rows=ROWS, length=LENGTH, vocab_size=VOCAB)
    compiled = lower_step(program, batch).compile(QUICK)
    found = collectives(compiled.as_text(), mesh, branch_counts=ticks)
    assert {one.axis for one in found} == {"pipe"}
    permutes = [one for one in found if one.kind == "collective-permute"]
    # One permute for every pattern that has edges; its payload is an activation [b, T, D].
    names = {n: [one for one in permutes if f"{n}/" in one.op_name] for n in edges}
    for name, pattern in edges.items():
        assert len(names[name]) == bool(pattern), name
        for one in names[name]:
            assert one.count == ticks[name]
            assert one.bytes == 2 * (ROWS // MICROBATCHES) * LENGTH * EMBED
    assert len(permutes) == sum(bool(pattern) for pattern in edges.values())
    # Beside them, once a step: the tables around the layers (gathered, their gradients reduced).
    rest = [one for one in found if one.kind != "collective-permute"]
    assert {one.count for one in rest} == {1}
    tables = 2 * VOCAB * EMBED + EMBED  # embedding, output matrix, the last norm
    scalars = 64
    gathered = sum(one.bytes * RANKS for one in rest if one.kind == "all-gather")
    assert gathered == 2 * 2 * VOCAB * EMBED
    assert sum(one.bytes for one in rest if one.kind != "all-gather") <= 4 * tables + 4 * scalars


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_was_read_crosses_all_boundaries_and_the_target_the_decoders(schedule):
    """Of an encoder and a decoder with a stage of each on every rank, as `plan` says it."""
    pairs = pytest.importorskip("pairs", reason="PyTorch is what its peers are made of").pairs
    S, T = 256, 128
    table = make_schedule(schedule, ranks=RANKS, microbatches=MICROBATCHES, passes=2)
    counted = crossings(schedule, RANKS, MICROBATCHES, 1, tuple(PairParts.travels.items()))
    ticks = {name: count for patterns in counted.values() for name, count in patterns.items()}
    for first, boundaries in ((0, 2 * RANKS - 1), (RANKS, RANKS - 1)):
        for way in sends(table, first):
            assert sum(map(len, way)) == MICROBATCHES * boundaries

    mesh = make_mesh(Mesh(pipe=RANKS, fsdp=1), tpu_devices("v5e:2x2"))
    program = make_step(
        T5(vocab_size=VOCAB, num_layers=RANKS, embed_dim=EMBED, num_heads=2, head_dim=128,
           mlp_dim=512, context_length=S),
        Layout(mesh),
        precision=Precision(compute="bfloat16"),
        execution=Execution(kernel="xla"),
        pipeline=Pipeline(schedule=schedule, microbatches=MICROBATCHES),
    )  # fmt: skip
    batch = pairs(rows=ROWS, source=S, target=T, vocab_size=VOCAB)
    found = collectives(
        lower_step(program, batch).compile(QUICK).as_text(), mesh, branch_counts=ticks
    )
    permutes = [one for one in found if one.kind == "collective-permute"]
    for name, count in ticks.items():
        (one,) = [one for one in permutes if f"{name}/" in one.op_name]
        length = T if "target" in name else S
        assert (one.count, one.bytes) == (count, 2 * (ROWS // MICROBATCHES) * length * EMBED)
    assert len(permutes) == len(ticks)


@pytest.mark.slow
def test_one_row_a_device_is_scattered_and_what_waits_at_a_rank_stays_there():
    """A TPU's compiler sums whole what has a dimension of 1 before the scattered one; and gathers
    what it is told a layout of."""
    config = config_of(
        deep(LLAMA), {"pipe": 2, "fsdp": 2, "tensor": 2}, rows=8,
        sharding=Sharding(sequence_parallel=True),
        pipeline=Pipeline(microbatches=4, backward="residuals"),
    )  # fmt: skip
    text, sizes = compiled_step(config)
    found = collectives(text, sizes, branch_counts(config, abstract_layout(config, 8)))
    assert [one for one in found if "layout_constraint" in one.op_name] == []
    stream = 2 * LENGTH * LLAMA.embed_dim
    of_stream = [one for one in found if one.axis == "tensor" and one.bytes == stream]
    inside = [one for one in of_stream if "(loss)" not in one.op_name]
    # Of each of 4 microbatches: tokens looked up, and two parts of two layers, both ways.
    assert {one.kind for one in inside} == {"reduce-scatter"}
    assert sum(one.count for one in inside) == 4 * (1 + 2 * 2 * 2)


RINGS = {
    "1f1b": ({"pipe": 2, "context": 2, "data": 2}, Pipeline(microbatches=4)),
    "residuals of virtual stages": (
        {"pipe": 2, "context": 4},
        Pipeline(schedule="interleaved", virtual_stages=2, microbatches=4, backward="residuals"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_inside_stages_moves_what_the_textbook_says(name):
    """Of the microbatches; what ranks without one do with the others lies in the bubble."""
    mesh, pipeline = RINGS[name]
    config = config_of(deep(LLAMA8), mesh, length=256, rows=8, pipeline=pipeline)
    assert faults(audited(config, *compiled_step(config)), set()) == []
