"""Long pipeline schedules follow from short ones: equal to their own tables."""

import collections

import pytest

from jaxtrain.analysis.planning.textbook.steady import bubble_fraction, crossings, waiting
from jaxtrain.analysis.planning.timing.timeline import simulate
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.pipeline.slots import sends, slots
from jaxtrain.training.pipeline.timetables import make_schedule


@pytest.mark.parametrize("backward", ["recompute", "residuals"])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("zero_bubble", 1),
        ("interleaved", 2),
        ("interleaved", 5),
        ("dualpipe_v", 2),
    ],
)
@pytest.mark.parametrize(("ranks", "counts"), [(2, (4, 7, 8, 22)), (3, (9, 30)), (8, (24, 56))])
def test_a_long_schedule_is_what_its_table_says(schedule, chunks, backward, ranks, counts):
    for count in counts:
        if schedule == "interleaved" and count % ranks:
            continue
        pipeline = Pipeline(
            schedule=schedule, microbatches=count, virtual_stages=chunks, backward=backward
        )
        table = make_schedule(schedule, ranks=ranks, microbatches=count, virtual_stages=chunks)
        places, found = slots(table, backward=backward), waiting(pipeline, ranks)
        assert (found.inputs, found.gradients, found.residuals) == (
            places.num_input_slots, places.num_gradient_slots, places.num_residual_slots,
        )  # fmt: skip
        again = 1.0 if backward == "recompute" else 0.0
        costs = {"backward": 2 + again, "backward_input": 1 + again}
        whole = simulate(table, lockstep=True, **costs).bubble_fraction
        assert bubble_fraction(pipeline, ranks) == pytest.approx(whole, abs=1e-12)
        for way, ticks in zip(("forward", "backward"), sends(table), strict=True):
            used = collections.Counter(tuple(sorted(edges)) for edges in ticks)
            counted = crossings(schedule, ranks, count, chunks)[way]
            assert counted == {
                f"send_{way}_{number}": used[pattern]
                for number, pattern in enumerate(sorted(used))
                if any(source != to for source, to in pattern)
            }


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (2, 22), (4, 24)])
def test_microbatches_that_go_around_twice(schedule, chunks, ranks, count):
    """The second time through stages that cost more, from which alone one part is sent on."""
    pipeline = Pipeline(schedule=schedule, microbatches=count, virtual_stages=chunks)
    table = pipeline.table(ranks, passes=2)
    places, found = slots(table), waiting(pipeline, ranks, 2)
    assert (found.inputs, found.gradients) == (places.num_input_slots, places.num_gradient_slots)
    stages = ranks * chunks
    each = [1.0] * stages + [1.5] * stages
    whole = simulate(table, lockstep=True, stage_costs=each, backward=3.0).bubble_fraction
    assert bubble_fraction(pipeline, ranks, (1.0, 1.5)) == pytest.approx(whole, abs=1e-12)
    alike = simulate(table, lockstep=True, backward=3.0).bubble_fraction
    assert alike == pytest.approx((ranks - 1) / (2 * chunks * count + ranks - 1))
    assert alike < whole
    travels = (("source", 0), ("target", 1))
    counted = crossings(schedule, ranks, count, chunks, travels)
    assert counted.keys() == {"forward", "backward", "forward_target", "backward_target"}
    for way, boundaries in (("forward", 2 * stages - 1), ("forward_target", stages - 1)):
        edges = sends(table, 0 if way == "forward" else stages)[0]
        assert sum(map(len, edges)) == boundaries * count
        assert sum(counted[way].values()) == sum(map(bool, edges))
