"""Schedules against their closed forms, and an engine of tags run through every table."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config.errors import UserError
from jaxtrain.training.pipeline.engine import _of_all_ranks
from jaxtrain.training.pipeline.schedules import SCHEDULES, Pipeline, cut_layers
from jaxtrain.training.pipeline.slots import sends, slots
from jaxtrain.training.pipeline.timetables import (
    Action,
    Timetable,
    Work,
    check,
    forward_only,
    make_schedule,
    stage_on,
)

GRID = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 6, 8, 16)]


@st.composite
def schedules(draw):
    """Any schedule that can be asked for, training or evaluation."""
    name = draw(st.sampled_from([*SCHEDULES, "forward"]))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    if name == "forward":
        chunks = draw(st.integers(1, 3))
        return forward_only(ranks, microbatches, chunks, folded=chunks == 2 and draw(st.booleans()))
    if name == "dualpipe_v":
        return make_schedule(name, ranks=ranks, microbatches=microbatches, virtual_stages=2)
    if name == "interleaved":
        rounds, chunks = draw(st.integers(1, 4)), draw(st.integers(2, 4))
        return make_schedule(name, ranks=ranks, microbatches=rounds * ranks, virtual_stages=chunks)
    if name != "zero_bubble" and draw(st.booleans()):
        rounds = draw(st.integers(1, 4))
        return make_schedule(name, ranks=ranks, microbatches=rounds * ranks, passes=2)
    return make_schedule(name, ranks=ranks, microbatches=microbatches)


# -- closed forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), GRID)
def test_ticks_are_the_papers(p, m):
    def ticks(name, **kwargs):
        return len(make_schedule(name, ranks=p, **{"microbatches": m, **kwargs}).ticks)

    assert ticks("gpipe") == 2 * (m + p - 1)
    assert ticks("1f1b") == 2 * (m + p - 1)
    for v in (2, 3):
        assert ticks("interleaved", microbatches=m * p, virtual_stages=v) == 2 * (v * m * p + p - 1)
        assert len(forward_only(p, m * p, v).ticks) == v * m * p + p - 1
        # Each pass around the ring is one more stage on each rank.
        for name in ("gpipe", "1f1b"):
            assert ticks(name, microbatches=m * p, passes=v) == 2 * (v * m * p + p - 1)
    assert len(forward_only(p, m).ticks) == m + p - 1
    if m >= 2 * p - 1:
        assert ticks("zero_bubble") == 3 * m + p - 1
    elif m >= p:
        assert ticks("zero_bubble") == 2 * (m + p - 1) + p
    else:  # 1F1B's, and a tick for each weight gradient
        assert ticks("zero_bubble") == 2 * (m + p - 1) + m


@given(schedule=schedules())
@settings(max_examples=100, deadline=None)
def test_all_ranks_do_the_same_in_one_tick_but_for_weight_gradients(schedule):
    """Then no rank waits for a longer action of another: a tick lasts as long as each of its own.

    A weight gradient may stand where a rank has nothing else to do.
    """
    for row in schedule.ticks:
        kinds = {action.kind for action in row if action is not None}
        assert kinds
        assert len(kinds) == 1 or (len(kinds) == 2 and Work.BACKWARD_WEIGHT in kinds)


@pytest.mark.parametrize(("p", "m"), GRID)
def test_buffers_are_as_small_as_the_schedule_promises(p, m):
    for name in ("1f1b", "zero_bubble"):
        table = slots(make_schedule(name, ranks=p, microbatches=m))
        # Rank 0 reads tokens; rank 1's inputs wait for a way to the last rank and back.
        assert table.num_input_slots == min(2 * p - 2, m)
        assert table.num_gradient_slots <= 1
        assert table.num_stash_slots <= (min(2 * p - 1, m) if name == "zero_bubble" else 0)
        assert table.num_residual_slots == 0
        kept = slots(make_schedule(name, ranks=p, microbatches=m), backward="residuals")
        assert kept.num_residual_slots == min(2 * p - 1, m)
    gpipe = make_schedule("gpipe", ranks=p, microbatches=m)
    assert slots(gpipe).num_input_slots == (m if p > 1 else 0)
    assert slots(gpipe, backward="residuals").num_residual_slots == m
    assert slots(gpipe, backward="residuals").num_input_slots <= 1
    assert slots(forward_only(p, m)).num_input_slots <= 1


def test_1f1b_is_the_textbooks_table():
    found = make_schedule("1f1b", ranks=2, microbatches=3)
    letters = {Work.FORWARD: "F", Work.BACKWARD: "B"}
    rows = [
        " ".join("--" if a is None else f"{letters[a.kind]}{a.microbatch}" for a in column)
        for column in zip(*found.ticks, strict=True)
    ]
    assert rows == ["F0 F1 -- F2 B0 -- B1 B2", "-- F0 B0 F1 B1 F2 B2 --"]


def test_zero_bubble_is_the_table_by_hand():
    # ZB-H1 of arXiv 2401.10241 (figure 2, top: 3m + p - 1 places, p - 1 of them idle on each rank)
    # in ticks that are alike: a forward and an input gradient of rank 0 are 2(p - 1) forwards and
    # backwards apart, and of its 8 weight gradients the three of idle places come before the last.
    found = make_schedule("zero_bubble", ranks=4, microbatches=8)
    letters = {Work.FORWARD: "F", Work.BACKWARD_INPUT: "B", Work.BACKWARD_WEIGHT: "W"}
    columns = [
        "".join("-" if a is None else letters[a.kind] for a in column)
        for column in zip(*found.ticks, strict=True)
    ]
    assert columns[0] == "FFFF-F-F-FBWFBWBWBWBWBWBWBW"
    assert columns[3] == "---FBFBFBFBWFBFBFBFBWWWWWWW"


def test_dualpipe_v_is_the_table_by_hand():
    # Stages 0 1 2 3 on ranks 0 1 1 0; capitals on the way down. A microbatch every two forwards.
    found = make_schedule("dualpipe_v", ranks=2, microbatches=3, virtual_stages=2)
    letters = {Work.FORWARD: "Ff", Work.BACKWARD_INPUT: "Bb", Work.BACKWARD_WEIGHT: "Ww"}
    rows = [
        " ".join(
            "--" if a is None else f"{letters[a.kind][a.stage > 1]}{a.microbatch}" for a in column
        )
        for column in zip(*found.ticks, strict=True)
    ]
    assert rows == [
        "F0 -- F1 f0 b0 F2 w0 f1 b1 w1 -- B0 f2 b2 B1 W0 B2 w2 W1 W2",
        "-- F0 f0 F1 -- f1 b0 F2 B0 w0 f2 b1 W0 B1 b2 B2 w1 W1 w2 W2",
    ]


# -- an engine of tags -----------------------------------------------------------------------------


@given(schedule=schedules(), backward=st.sampled_from(["recompute", "residuals"]))
@settings(max_examples=150, deadline=None)
def test_an_engine_that_trusts_the_slots_finds_the_right_things(schedule, backward):
    """Runs the arrays as the engine does, on tags instead of activations.

    Nothing here looks at the schedule's actions: what is computed follows from the tags found.
    """
    table = slots(schedule, backward=backward)
    p, stages = schedule.ranks, schedule.num_stages
    buffers = {
        name: [[None] * getattr(table, f"num_{name}_slots") for _ in range(p)]
        for name in ("input", "gradient", "stash", "residual")
    }
    forward_edges, backward_edges = sends(schedule)
    assert len(forward_edges) == len(backward_edges) == len(table.kind) == len(schedule.ticks)
    done = []
    for tick in range(len(table.kind)):
        activations, gradients = {}, {}
        for rank in range(p):
            at = (tick, rank)
            kind, microbatch = Work(table.kind[at]), int(table.microbatch[at])
            stage = stage_on(rank, int(table.chunk[at]), p, folded=schedule.folded)

            def held(name, at=at, rank=rank):
                slot = getattr(table, f"{name}_slot")[at]
                assert slot >= 0, f"{name} has no slot"
                return buffers[name][rank][slot]

            def hold(name, tag, at=at, rank=rank):
                slot = getattr(table, f"{name}_slot")[at]
                assert slot >= 0, f"{name} has no slot"
                buffers[name][rank][slot] = tag

            def check_input(stage=stage, microbatch=microbatch, held=held):
                if stage > 0:
                    assert held("input") == ("activation", stage - 1, microbatch)

            if kind == Work.IDLE:
                continue
            done.append((kind, stage, microbatch))
            if kind == Work.FORWARD:
                check_input()
                if backward == "residuals" and schedule.has_backward:
                    hold("residual", ("residual", stage, microbatch))
                if stage + 1 < stages:
                    activations[rank] = ("activation", stage, microbatch)
                continue
            if backward == "residuals":
                assert held("residual") == ("residual", stage, microbatch)
            if kind == Work.BACKWARD_WEIGHT:
                assert held("stash") == ("stash", stage, microbatch)
                continue
            if backward == "recompute":
                check_input()
            if stage + 1 < stages:
                assert held("gradient") == ("gradient", stage + 1, microbatch)
            if kind == Work.BACKWARD_INPUT:
                hold("stash", ("stash", stage, microbatch))
            if stage > 0:
                gradients[rank] = ("gradient", stage, microbatch)
        for name, sent, edges in (
            ("input", activations, forward_edges[tick]),
            ("gradient", gradients, backward_edges[tick]),
        ):
            assert sorted(sent) == [source for source, _ in edges]
            arrived = {destination: sent[source] for source, destination in edges}
            assert len(arrived) == len(edges)
            for rank in range(p):
                slot = getattr(table, f"receive_{name}_slot")[tick, rank]
                assert (slot >= 0) == (rank in arrived)
                if slot >= 0:
                    buffers[name][rank][slot] = arrived[rank]
    kinds = {"zero_bubble": [1, 3, 4], "dualpipe_v": [1, 3, 4], "forward": [1]}
    kinds = kinds.get(schedule.name, [1, 2])
    every = itertools.product(kinds, range(stages), range(schedule.microbatches))
    assert sorted(done) == sorted(every)


@given(schedule=schedules())
@settings(max_examples=50, deadline=None)
def test_slots_are_int32_and_edges_join_neighbours(schedule):
    table = slots(schedule)
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if isinstance(value, np.ndarray):
            assert value.dtype == np.int32
            assert value.shape == (len(schedule.ticks), schedule.ranks)
    forward, backward = sends(schedule)
    if schedule.folded:
        # Pairs of ranks exchange what goes down for what comes back; the last keeps what turns.
        last = schedule.ranks - 1
        for a, b in itertools.chain(*forward, *backward):
            assert abs(a - b) == 1 or a == b == last
        assert sum(a == b for tick in forward for a, b in tick) == schedule.microbatches
        return
    assert all((a + 1) % schedule.ranks == b for tick in forward for a, b in tick)
    assert all((b + 1) % schedule.ranks == a for tick in backward for a, b in tick)
    assert table.has_backward == (schedule.name != "forward")


@given(schedule=schedules())
@settings(max_examples=50, deadline=None)
def test_gradients_are_added_in_the_order_of_microbatches(schedule):
    for stage, kind in itertools.product(range(schedule.num_stages), Work):
        order = [
            action.microbatch
            for _, _, action in schedule.actions()
            if action.stage == stage and action.kind == kind
        ]
        assert order == sorted(order)


# -- broken tables ---------------------------------------------------------------------------------


def by_hand(*ranks):
    """A table of one stage a rank: F, I and W with the number of a microbatch, -- where idle."""
    kinds = {"F": Work.FORWARD, "I": Work.BACKWARD_INPUT, "W": Work.BACKWARD_WEIGHT}
    columns = [
        [None if word == "--" else Action(kinds[word[0]], int(word[1:]), rank) for word in words]
        for rank, words in enumerate(line.split() for line in ranks)
    ]
    return Timetable("by hand", len(ranks), 1, 2, tuple(zip(*columns, strict=True)))


def edit(schedule, changes):
    """The schedule with {(tick, rank): action} written over it."""
    ticks = [list(row) for row in schedule.ticks]
    for (tick, rank), action in changes.items():
        ticks[tick][rank] = action
    return dataclasses.replace(schedule, ticks=tuple(map(tuple, ticks)))


@given(schedule=schedules(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_table_without_one_of_its_actions_is_refused(schedule, data):
    tick, rank, _ = data.draw(st.sampled_from(list(schedule.actions())))
    with pytest.raises(ValueError, match=r"rank \d+, tick \d+.*stage"):
        check(edit(schedule, {(tick, rank): None}))


@given(schedule=schedules(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_an_action_moved_before_what_it_needs_is_refused(schedule, data):
    """Any action but a first stage's forward, moved into the tick of what it waits for."""
    done = {(a.kind, a.stage, a.microbatch): t for t, _, a in schedule.actions()}
    movable = [(t, r, a) for t, r, a in schedule.actions() if a.kind != Work.FORWARD or a.stage > 0]
    if not movable:
        return
    tick, rank, action = data.draw(st.sampled_from(movable))
    before = {
        Work.FORWARD: (Work.FORWARD, action.stage - 1, action.microbatch),
        Work.BACKWARD: (Work.FORWARD, action.stage, action.microbatch),
        Work.BACKWARD_INPUT: (Work.FORWARD, action.stage, action.microbatch),
        Work.BACKWARD_WEIGHT: (Work.BACKWARD_INPUT, action.stage, action.microbatch),
    }[action.kind]
    earlier = done[before]
    # The two actions change places on this rank; on another rank's tick, whatever stood there.
    other = schedule.ticks[earlier][rank]
    with pytest.raises(ValueError, match=r"rank \d+, tick \d+: \w+ of microbatch \d+ on stage"):
        check(edit(schedule, {(earlier, rank): action, (tick, rank): other}))


def test_each_mistake_is_named():
    good = by_hand("F0 F1 -- I0 W0 I1 W1", "-- F0 I0 F1 I1 W0 W1")
    forward = Action(Work.FORWARD, 0, 1)
    cases = [
        ({(0, 1): forward}, "rank 1, tick 0: FORWARD of microbatch 0 on stage 1: before the out"),
        ({(2, 0): Action(Work.FORWARD, 0, 0)}, "rank 0, tick 2: .*: done before"),
        ({(2, 0): Action(Work.FORWARD, 1, 1)}, "rank 0, tick 2: .* is on rank 1"),
        ({(2, 0): Action(Work.BACKWARD, 0, 0)}, "tick 2: .*: before the input gradient of stage 1"),
        ({(2, 0): Action(Work.BACKWARD_WEIGHT, 0, 0)}, "rank 0, tick 2: BACKWARD_WEIGHT"),
        ({(1, 1): Action(Work.BACKWARD_INPUT, 0, 1)}, "before the output of stage 1"),
        ({(2, 0): Action(Work.FORWARD, 2, 0)}, "2 stages and 2 microbatches"),
        ({(2, 0): Action(Work.IDLE, 0, 0)}, "an idle rank has None"),
        ({(4, 0): None}, "rank 0, tick 7 .the end.: BACKWARD_WEIGHT .* is missing"),
        # Both halves at once count as both: the weight gradient that follows is the second one.
        ({(2, 1): Action(Work.BACKWARD, 0, 1)}, "BACKWARD_WEIGHT of microbatch 0 .*: done before"),
    ]  # fmt: skip
    for changes, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            check(edit(good, changes))
    check(good)
    # Down the first stage beside the turn of another microbatch: rank 1 would get two activations.
    folded = make_schedule("dualpipe_v", ranks=2, microbatches=2, virtual_stages=2)
    both = {(1, 0): folded.ticks[2][0], (2, 0): None}
    with pytest.raises(
        ValueError, match="rank 1, tick 1: .* rank 1 receives another one in this tick"
    ):
        check(edit(folded, both))
    with pytest.raises(ValueError, match="tick 0: 1 entries for 2 ranks"):
        check(dataclasses.replace(good, ticks=((None,), *good.ticks)))
    with pytest.raises(ValueError, match="has no backward"):
        check(dataclasses.replace(make_schedule("1f1b", ranks=2, microbatches=2), name="forward"))
    with pytest.raises(ValueError, match="is missing"):
        check(dataclasses.replace(forward_only(2, 2), name="1f1b"))


def test_backward_may_be_split_for_some_microbatches_alone():
    whole = make_schedule("1f1b", ranks=1, microbatches=2)
    first = Action(Work.BACKWARD_INPUT, 0, 0)
    ticks = (
        whole.ticks[0], (first,), *whole.ticks[2:], (first._replace(kind=Work.BACKWARD_WEIGHT),),
    )  # fmt: skip
    mixed = dataclasses.replace(whole, ticks=ticks)
    check(mixed)
    assert slots(mixed).stash_slot[:, 0].tolist() == [-1, 0, -1, -1, 0]


# -- settings --------------------------------------------------------------------------------------


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match=r"only 'interleaved'.*Pipeline.virtual_stages=1"):
        Pipeline(virtual_stages=2)
    with pytest.raises(
        UserError, match=r"one stage of the forward order .* Pipeline.virtual_stages=2"
    ):
        Pipeline(schedule="dualpipe_v")
    with pytest.raises(UserError, match=r"'dualpipe_v': microbatches pass through its ranks once"):
        make_schedule("dualpipe_v", ranks=4, microbatches=8, virtual_stages=2, passes=2)
    with pytest.raises(UserError, match="at least 2 virtual stages; set Pipeline.virtual_stages=2"):
        Pipeline(schedule="interleaved")
    with pytest.raises(UserError, match="Pipeline.microbatches=0; use at least 1"):
        Pipeline(microbatches=0)
    with pytest.raises(
        UserError, match=r"microbatches=7 .*multiple of Mesh.pipe=4; the nearest is 8"
    ):
        make_schedule("interleaved", ranks=4, microbatches=7, virtual_stages=2)
    with pytest.raises(UserError, match=r"microbatches=6 with Mesh.pipe=4.*multiple of 4, such a"):
        make_schedule("1f1b", ranks=4, microbatches=6, passes=2)
    with pytest.raises(UserError, match=r"'zero_bubble': microbatches pass through its ranks once"):
        make_schedule("zero_bubble", ranks=4, microbatches=8, passes=2)
    with pytest.raises(UserError, match="only 'interleaved'"):
        make_schedule("gpipe", ranks=4, microbatches=4, virtual_stages=2)
    with pytest.raises(UserError, match="did you mean 'gpipe'"):
        make_schedule("gpip", ranks=4, microbatches=4)
    with pytest.raises(UserError, match="Mesh.pipe=0"):
        make_schedule("gpipe", ranks=0, microbatches=4)
    with pytest.raises(UserError, match="Pipeline.microbatches=0"):
        forward_only(2, 0)


# -- layers ----------------------------------------------------------------------------------------


def every_cut(layers, stages):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        bounds = (0, *ends, layers)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


# Costs that floats hold exactly, so that ties are ties.
COSTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.75, 3.0, 6.5])


@given(st.integers(1, 11), st.integers(1, 6), COSTS, COSTS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_cuts_are_the_best_of_all(layers, stages, first_cost, last_cost, padded):
    if layers < stages:
        most = "1 stage" if layers == 1 else f"{layers} stages"
        with pytest.raises(UserError, match=f"use num_layers={stages} or at most {most}$"):
            cut_layers(layers, stages)
        return
    longest = -(-layers // stages) if padded else None

    def costs(cut):
        cost = list(cut)
        cost[0] += first_cost
        cost[-1] += last_cost
        return cost

    def key(cut):
        ends = cut[0] + cut[-1]
        return max(costs(cut)), sum(c * c for c in costs(cut)), ends, cut

    allowed = (cut for cut in every_cut(layers, stages) if longest is None or max(cut) <= longest)
    found = cut_layers(layers, stages, first_cost=first_cost, last_cost=last_cost, longest=longest)
    assert sum(found) == layers
    assert found == min(allowed, key=key)


def test_the_head_takes_layers_from_its_stage():
    assert cut_layers(12, 4) == (3, 3, 3, 3)
    assert cut_layers(13, 4, last_cost=3.0) == (4, 4, 4, 1)
    assert cut_layers(10, 4) == (2, 3, 3, 2)
    assert cut_layers(2, 2, last_cost=100.0) == (1, 1)


def test_the_action_that_all_ranks_take_is_that_of_the_busy_ones():
    """Where idle ranks compute too, since a ring of attention needs them."""
    actions = np.array([[2, 0, 2], [0, 1, 1], [0, 0, 0]])
    busy = np.array([[1, 0, 1], [0, 1, 1], [0, 0, 0]]) > 0
    np.testing.assert_array_equal(_of_all_ranks(actions, busy), [2, 1, 0])
    with pytest.raises(AssertionError, match="ranks do two things"):
        _of_all_ranks(actions, np.ones_like(busy))
