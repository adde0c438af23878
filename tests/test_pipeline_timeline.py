"""The simulated times against closed forms, and the picture against the simulation."""

import collections
import io
import itertools
import math
import types

import pytest
from PIL import Image
from rich.console import Console

from jaxtrain.analysis.planning.timing.timeline import (
    closed_form_bubble,
    closed_form_peak,
    closed_form_ticks,
    draw,
    simulate,
    table,
    timeline_figure,
)
from jaxtrain.training.pipeline.schedules import SCHEDULES
from jaxtrain.training.pipeline.timetables import Work, forward_only, make_schedule

CASES = [
    (name, p, m * p if name == "interleaved" else m, v)
    for name, p, m in itertools.product((*SCHEDULES, "forward"), (1, 2, 3, 4, 7), (1, 2, 3, 8))
    for v in {"interleaved": (2, 3), "dualpipe_v": (2,)}.get(name, (1,))
]


def make(name, p, m, v=1):
    if name == "forward":
        return forward_only(p, m, v)
    return make_schedule(name, ranks=p, microbatches=m, virtual_stages=v)


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_figures_are_the_closed_forms(name, p, m, v):
    sizes = (name, p, m, v)
    timeline = simulate(make(*sizes), backward=1.0, lockstep=True)
    assert timeline.ticks == closed_form_ticks(*sizes) == timeline.makespan
    assert timeline.bubble_fraction == pytest.approx(closed_form_bubble(*sizes))
    assert timeline.peak_live == closed_form_peak(*sizes)


# Costs of a forward, a backward, its input's part and its weights' part; numbers that floats hold.
COSTS = [
    (1.0, 2.5, 1.25, 1.0),
    (1.0, 3.0, 2.0, 1.0),
    (1.0, 2.0, 1.125, 0.875),
    (2.0, 3.0, 2.5, 0.5),
]


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_in_lockstep_a_step_takes_what_the_papers_say_without(name, p, m, v):
    """The bubble of a rank is (p - 1)(F + B); of ZB-H1 (p - 1)(F + I - W); of DualPipe, with 2p
    stages of half a rank's costs, (p - 1)(F&B + B - 3W).

    So for any costs, although every tick lasts as long as its longest action on any rank.
    """
    schedule = make(name, p, m, v)
    for F, B, I, W in COSTS:  # noqa: E741 - the papers' letters
        timeline = simulate(
            schedule, forward=F, backward=B, backward_input=I, backward_weight=W, lockstep=True
        )
        if name == "forward":
            assert timeline.makespan == (m + p - 1) * F
        elif name == "zero_bubble":
            # With fewer microbatches fewer idle places are filled; 1F1B's time is the most.
            missing = min(max(2 * p - 1 - m, 0), p - 1)
            assert timeline.makespan == m * (F + I + W) + (p - 1) * (F + I - W) + missing * W
        elif name == "dualpipe_v":
            assert timeline.makespan <= 2 * (m + p - 1) * (F + I) + 2 * m * W
            if m >= p + p // 2:
                # F + B takes F&B as long; where F is longer than W, so much for each turn of it.
                bubble = (p - 1) * (F + 2 * I - W) + (p - 1) * (F - W) + max(p // 2 - 1, 0) * W
                assert timeline.makespan == 2 * m * (F + I + W) + bubble
        else:
            assert timeline.makespan == (v * m + p - 1) * (F + B)
            assert timeline.bubble_to_ideal == pytest.approx((p - 1) / (v * m))
            assert timeline.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("v", [2, 3, 6, 12])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 32), (8, 64), (9, 18)])
def test_lockstep_costs_an_interleaved_schedule_nothing_with_many_virtual_stages(p, m, v):
    timeline = simulate(make("interleaved", p, m, v), backward=3.0, lockstep=True)
    assert timeline.makespan == (v * m + p - 1) * 4
    assert timeline.peak_live == closed_form_peak("interleaved", p, m, v)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_the_zero_bubble_schedule_has_a_third_of_the_bubble(p):
    """Per rank (p - 1)(T_F + T_B - T_W) of idle time: arXiv 2401.10241, table 1."""
    m = 3 * p
    timeline = simulate(make("zero_bubble", p, m))
    assert timeline.makespan - 3 * m == pytest.approx(p - 1)
    whole = simulate(make("1f1b", p, m), backward=2.0)
    assert whole.makespan - 3 * m == pytest.approx(3 * (p - 1))
    assert max(timeline.peak_live) == max(whole.peak_live) == 2 * p - 1


@pytest.mark.slow  # for PyTorch's import
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 16), (8, 16)])
def test_dualpipe_v_beside_pytorchs(p, m):
    """As few microbatches alive, and as small a bubble but for a few weight gradients' ticks.

    PyTorch's ranks go on each by itself; a forward and a backward that it does side by side take
    as long as both.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    of_ranks = types.SimpleNamespace(pp_group_size=p, _n_microbatches=m)
    table_of = schedules.ScheduleDualPipeV._calculate_single_rank_operations
    orders = [
        collections.deque(one.sub_actions or (one,) for one in table_of(of_ranks, rank))
        for rank in range(p)
    ]
    free, ends, live, peaks = [0] * p, {}, [0] * p, [0] * p

    def begin(rank):
        """When a rank can do what comes next; infinity: what it needs is not done."""
        start = free[rank]
        for one in orders[rank][0]:
            stage, kind = one.stage_index, one.computation_type.name
            needed = {
                "FORWARD": [("FORWARD", stage - 1)] * (stage > 0),
                "BACKWARD_WEIGHT": [("BACKWARD", stage)],
            }.get(kind, [("FORWARD", stage), *[("BACKWARD", stage + 1)] * (stage + 1 < 2 * p)])
            for thing in needed:
                start = max(start, ends.get((*thing, one.microbatch_index), math.inf))
        return start

    while any(orders):
        rank = min((rank for rank in range(p) if orders[rank]), key=begin)
        start, parts = begin(rank), orders[rank].popleft()
        kinds = [one.computation_type.name for one in parts]
        free[rank] = start + len(kinds) + kinds.count("FULL_BACKWARD")
        for one, kind in zip(parts, kinds, strict=True):
            live[rank] += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
            peaks[rank] = max(peaks[rank], live[rank])
            given = "BACKWARD" if kind in ("FULL_BACKWARD", "BACKWARD_INPUT") else kind
            ends[given, one.stage_index, one.microbatch_index] = free[rank]
    ours = simulate(make("dualpipe_v", p, m, 2), backward_input=1.0, lockstep=True)
    assert max(peaks) == max(ours.peak_live) == 2 * p + 1
    assert max(free) == 6 * m + 2 * (p - 1)
    assert ours.makespan == max(free) + max(p // 2 - 1, 0)


def test_nothing_starts_before_what_it_needs_whatever_it_costs():
    schedule = make("interleaved", 3, 6, 2)
    costs = [1.0, 3.0, 0.5, 2.0, 1.0, 4.0]
    timeline = simulate(schedule, stage_costs=costs)
    at = {(s.action.kind, s.action.stage, s.action.microbatch): s for s in timeline.spans}
    for (kind, stage, microbatch), span in at.items():
        assert span.end - span.start == costs[stage] * (1.0 if kind == Work.FORWARD else 2.0)
        if kind == Work.FORWARD and stage > 0:
            assert span.start >= at[kind, stage - 1, microbatch].end
        if kind == Work.BACKWARD:
            assert span.start >= at[Work.FORWARD, stage, microbatch].end
            if stage + 1 < schedule.num_stages:
                assert span.start >= at[kind, stage + 1, microbatch].end
    for rank in range(schedule.ranks):
        mine = [span for span in timeline.spans if span.rank == rank]
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))
    # As early as can be: everything starts with the end of something, or at once.
    ends = {0.0} | {span.end for span in timeline.spans}
    assert all(span.start in ends for span in timeline.spans)


def test_in_lockstep_a_tick_lasts_as_long_as_its_longest_action():
    # Stages that are not alike: in a tick of all four the most expensive tells.
    p, m = 4, 8
    one, costs = make("1f1b", p, m), [1.0, 2.0, 3.0, 1.0]
    lockstep = simulate(one, backward=2.0, stage_costs=costs, lockstep=True)
    ticks = [[], []]
    for row in one.ticks:
        ran = [action for action in row if action is not None]
        ticks[ran[0].kind == Work.BACKWARD].append(max(costs[action.stage] for action in ran))
    # 1, 2 until a microbatch reaches the third stage, 3 to its last; then the fourth alone.
    assert ticks == [[1, 2, *[3] * m, 1], [1, *[3] * m, 2, 1]]
    assert lockstep.makespan == sum(ticks[0]) + 2 * sum(ticks[1])
    assert simulate(one, backward=2.0, stage_costs=costs).lockstep_makespan == lockstep.makespan
    starts = {}
    for (tick, _, _), span in zip(one.actions(), lockstep.spans, strict=True):
        assert starts.setdefault(tick, span.start) == span.start


def test_the_table_shows_what_was_measured():
    console = Console(file=io.StringIO(), width=100)
    console.print(table(simulate(make("interleaved", 4, 8, 2))))
    text = console.file.getvalue()
    rows = {
        cells[1].strip(): (cells[2].strip(), cells[3].strip())
        for cells in (line.split("│") for line in text.splitlines())
        if len(cells) == 5
    }
    assert rows["ticks"] == ("38", "38")
    assert rows["bubble to ideal, in ticks"] == ("18.8%", "18.8%")  # 3 / 16
    assert rows["peak live microbatches"] == ("11, 9, 7, 5", "11, 9, 7, 5")
    assert rows["makespan"][0] == "57"  # 3 x (16 + 3)


def test_the_picture_shows_every_action_with_its_number():
    timeline = simulate(make("zero_bubble", 3, 12))
    (axes,) = timeline_figure(timeline).axes
    numbers = sorted((*text.get_position(), text.get_text()) for text in axes.texts)
    assert numbers == sorted(
        ((span.start + span.end) / 2, span.rank, str(span.action.microbatch))
        for span in timeline.spans
    )
    boxes = sorted(
        (path.vertices[:, 0].min(), path.vertices[:, 0].max(), path.vertices[:, 1].mean())
        for collection in axes.collections
        for path in collection.get_paths()
    )
    assert len(boxes) == len(timeline.spans)
    assert [box[:2] for box in boxes] == sorted((s.start, s.end) for s in timeline.spans)
    assert "bubble 5.3%" in axes.get_title(loc="left")  # 2 / 38
    assert "peak live microbatches 5" in axes.get_title(loc="left")
    hatched = [c for c in axes.collections if c.get_hatch()]
    assert len(hatched) == 3


def test_kinds_and_chunks_differ_in_grey():
    timeline = simulate(make("interleaved", 2, 4, 2))
    (axes,) = timeline_figure(timeline).axes
    greys = {
        round(float(collection.get_facecolor()[0][:3] @ [0.299, 0.587, 0.114]), 3)
        for collection in axes.collections
    }
    assert len(greys) == 4
    assert min(b - a for a, b in itertools.pairwise(sorted(greys))) > 0.15


def test_too_many_boxes_are_drawn_without_numbers_and_the_title_says_so():
    (axes,) = timeline_figure(simulate(make("gpipe", 2, 600))).axes
    assert len(axes.texts) == 0
    assert "too many to number" in axes.get_title(loc="left")


def test_the_file_is_a_picture(tmp_path):
    draw(simulate(make("1f1b", 4, 8)), tmp_path / "timeline.png")
    with Image.open(tmp_path / "timeline.png") as image:
        image.load()
        assert image.format == "PNG"
        assert 700 <= image.width <= 4800
        assert 250 <= image.height <= 2000
