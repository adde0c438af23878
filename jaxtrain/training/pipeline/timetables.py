"""Timetables of pipeline schedules (GPipe, 1F1B, interleaved, zero-bubble, DualPipe-V)."""

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jaxtrain.config.errors import UserError, did_you_mean, nearest_multiple
from jaxtrain.training.pipeline.schedules import SCHEDULES, SPLIT, validate_schedule

# -- what a timetable is, and its validation -------------------------------------------------------
# A model is cut into S = ranks x virtual_stages stages; stage s is chunk s // ranks on rank s mod
# ranks, or, where the stages are folded, goes down the ranks and back up again: on rank ranks - 1 -
# s mod ranks in every other chunk. Every action takes one tick. What an action sends at the end of
# tick t (an activation to stage s + 1, a gradient to stage s - 1) can be used from tick t + 1 on.


def stage_on(rank: int, chunk: int, ranks: int, *, folded: bool) -> int:
    """Return the stage of a chunk on a rank."""
    return chunk * ranks + (ranks - 1 - rank if folded and chunk % 2 else rank)


class Work(enum.IntEnum):
    """Kind of work of a rank in a tick; BACKWARD gives input and weight gradients together."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4


class Action(NamedTuple):
    """Work of a stage on a microbatch; both are counted from 0 over the whole pipeline."""

    kind: Work
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind.name} of microbatch {self.microbatch} on stage {self.stage}"


@dataclasses.dataclass(frozen=True)
class Timetable:
    """Table of actions: ticks[t][rank], None where the rank is idle.

    Attributes:
      name: the schedule's name; 'forward' has no backward actions (evaluation).
      ranks: devices along `pipe`.
      virtual_stages: stages on each rank.
      microbatches: microbatches in one step.
      ticks: the table.
      folded: whether a microbatch goes down the ranks and back up, as a V; else it
        goes around their ring.
    """

    name: str
    ranks: int
    virtual_stages: int
    microbatches: int
    ticks: tuple[tuple[Action | None, ...], ...]
    folded: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.ranks * self.virtual_stages

    @property
    def has_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.name != "forward"

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (tick, rank, action) for all actions, in the order of ticks."""
        for tick, row in enumerate(self.ticks):
            for rank, action in enumerate(row):
                if action is not None:
                    yield tick, rank, action

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        chunk, index = divmod(stage, self.ranks)
        # Folding is its own inverse.
        return stage_on(index, chunk, self.ranks, folded=self.folded) - chunk * self.ranks

    def next_rank(self, action: Action) -> int | None:
        """Return the rank that this action's result is sent to, which may be its own; None: nothing
        is sent.
        """
        if action.kind == Work.FORWARD and action.stage + 1 < self.num_stages:
            return self.rank_of(action.stage + 1)
        if action.kind in (Work.BACKWARD, Work.BACKWARD_INPUT) and action.stage > 0:
            return self.rank_of(action.stage - 1)
        return None


def result(action: Action) -> Action:
    """Return the result that others wait for: BACKWARD counts as its BACKWARD_INPUT, the gradient
    it sends.
    """
    return action._replace(kind=Work.BACKWARD_INPUT) if action.kind == Work.BACKWARD else action


def needs(action: Action, num_stages: int) -> list[Action]:
    """Return the results that an action depends on."""
    stage = action.stage
    if action.kind == Work.BACKWARD_WEIGHT:
        return [action._replace(kind=Work.BACKWARD_INPUT)]
    forward = action._replace(kind=Work.FORWARD)
    if action.kind == Work.FORWARD:
        return [forward._replace(stage=stage - 1)] if stage > 0 else []
    gradient = action._replace(kind=Work.BACKWARD_INPUT, stage=stage + 1)
    return [forward, gradient] if stage + 1 < num_stages else [forward]


def check(schedule: Timetable) -> None:
    """Reject a table that would compute a wrong result.

    Raises:
      ValueError: with rank, tick and action: on another rank than its stage's, run twice,
        before its inputs exist, sending to where another rank sends, or missing.
    """
    finished: set[Action] = set()
    covered: set[Action] = set()
    for tick, row in enumerate(schedule.ticks):
        if len(row) != schedule.ranks:
            raise ValueError(f"tick {tick}: {len(row)} entries for {schedule.ranks} ranks")
        for rank, action in enumerate(row):
            if action is None:
                continue
            if action.kind == Work.IDLE:
                raise _wrong(rank, tick, action, "an idle rank has None")
            known = 0 <= action.stage < schedule.num_stages
            if not known or not 0 <= action.microbatch < schedule.microbatches:
                there_are = f"{schedule.num_stages} stages and {schedule.microbatches} microbatches"
                raise _wrong(rank, tick, action, f"there are {there_are}")
            own = schedule.rank_of(action.stage)
            if own != rank:
                raise _wrong(rank, tick, action, f"that stage is on rank {own}")
            for part in _parts(action):
                if part in covered:
                    raise _wrong(rank, tick, action, "done before")
                covered.add(part)
            for need in needs(action, schedule.num_stages):
                if need not in finished:
                    thing = "output" if need.kind == Work.FORWARD else "input gradient"
                    why = f"before the {thing} of stage {need.stage} is there"
                    raise _wrong(rank, tick, action, why)
        done = {result(action): rank for rank, action in enumerate(row) if action is not None}
        received: set[tuple[bool, int]] = set()
        for action, rank in done.items():
            to = schedule.next_rank(action)
            if to is None:
                continue
            if (action.kind == Work.FORWARD, to) in received:
                raise _wrong(rank, tick, action, f"rank {to} receives another one in this tick")
            received.add((action.kind == Work.FORWARD, to))
        finished |= done.keys()
    kinds = (Work.FORWARD, Work.BACKWARD) if schedule.has_backward else (Work.FORWARD,)
    every = itertools.product(kinds, range(schedule.microbatches), range(schedule.num_stages))
    wanted = [part for action in every for part in _parts(Action(*action))]
    for part in wanted:
        if part not in covered:
            raise ValueError(
                f"rank {schedule.rank_of(part.stage)}, tick {len(schedule.ticks)} (the end): "
                f"{part} is missing"
            )
    if len(covered) > len(wanted):
        raise ValueError(f"a {schedule.name!r} schedule has no backward actions")


def _wrong(rank: int, tick: int, action: Action, why: str) -> ValueError:
    return ValueError(f"rank {rank}, tick {tick}: {action}: {why}")


def _parts(action: Action) -> list[Action]:
    if action.kind != Work.BACKWARD:
        return [action]
    return [action._replace(kind=kind) for kind in (Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)]


# -- construction ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)  # a plan needs each several times, a search many in sequence
def make_schedule(
    name: str, *, ranks: int, microbatches: int, virtual_stages: int = 1, passes: int = 1
) -> Timetable:
    """Return the checked table of a schedule; gradients are added in the order of microbatches.

    Args:
      name: of the schedule.
      ranks: devices along `pipe`.
      microbatches: microbatches in one step.
      virtual_stages: stages on each rank in a pass.
      passes: how often a microbatch goes around the ring, through a stage of each rank and virtual
        stage every time. The table takes them for virtual stages.

    Raises:
      UserError: an unknown name, or sizes that this schedule does not support.
    """
    if name not in SCHEDULES:
        raise UserError(f"Pipeline.schedule={name!r} is unknown{did_you_mean(name, SCHEDULES)}")
    validate_schedule(name, microbatches, virtual_stages)
    _validate_no_ranks(ranks)
    nearest = nearest_multiple(microbatches, ranks)
    if name == "interleaved" and microbatches % ranks:
        instead = " (or use Pipeline.schedule='1f1b')" * (passes == 1)
        raise UserError(
            f"Pipeline.microbatches={microbatches} with Pipeline.schedule='interleaved': it must "
            f"be a multiple of Mesh.pipe={ranks}; the nearest is {nearest}{instead}"
        )
    if passes > 1 and name in SPLIT:
        raise UserError(
            f"Pipeline.schedule={name!r}: microbatches pass through its ranks once, and those of "
            "an encoder-decoder twice; use Pipeline.schedule='1f1b'"
        )
    if passes > 1 and microbatches % ranks:
        raise UserError(
            f"Pipeline.microbatches={microbatches} with Mesh.pipe={ranks}: an encoder-decoder "
            "sends them through the ranks twice, in groups of the number of ranks; "
            f"use a multiple of {ranks}, such as {nearest}"
        )
    chunks, folded = virtual_stages * passes, name == "dualpipe_v"
    if folded:
        kinds = _kinds_of_folded_ticks(ranks, microbatches)
    else:
        kinds = _kinds_of_ticks(name, ranks, microbatches, chunks)

    def turns(kind: Work) -> list[dict[int, Action]]:
        arguments = ranks, microbatches, chunks
        return [_turns(kind, rank, *arguments, folded=folded) for rank in range(ranks)]

    visits = {kind: turns(kind) for kind in {*kinds} - {Work.BACKWARD_WEIGHT}}
    ticks = _fill(kinds, visits, ranks)
    schedule = Timetable(name, ranks, chunks, microbatches, ticks, folded)
    check(schedule)
    return schedule


def forward_only(
    ranks: int, microbatches: int, virtual_stages: int = 1, *, folded: bool = False
) -> Timetable:
    """Return the checked table of evaluation: any number of microbatches, also with virtual stages.

    Args:
      ranks: devices along `pipe`.
      microbatches: microbatches in one step.
      virtual_stages: stages on each rank.
      folded: as in `Timetable`.

    Raises:
      UserError: a number below 1.
    """
    validate_schedule("forward", microbatches, virtual_stages)
    _validate_no_ranks(ranks)
    turns = [
        _turns(Work.FORWARD, rank, ranks, microbatches, virtual_stages, folded=folded)
        for rank in range(ranks)
    ]
    if folded:
        kinds = [Work.FORWARD] * (1 + max(max(mine) for mine in turns))
        ticks = _fill(kinds, {Work.FORWARD: turns}, ranks)
    else:
        ticks = _as_early_as_can_be([[*mine.values()] for mine in turns], ranks * virtual_stages)
    schedule = Timetable("forward", ranks, virtual_stages, microbatches, ticks, folded)
    check(schedule)
    return schedule


def _validate_no_ranks(ranks: int) -> None:
    if ranks < 1:
        raise UserError(f"Mesh.pipe={ranks}: a pipeline has at least 1 rank")


def _turns(
    kind: Work, rank: int, ranks: int, microbatches: int, chunks: int, *, folded: bool
) -> dict[int, Action]:
    """Return a rank's actions of one kind, by the index of the tick of that kind.

    A microbatch advances one stage per forward tick, and goes back one per backward tick.

    Around a ring: groups of `ranks` microbatches, chunk after chunk. A group is as long as the
    ring: when its last microbatch enters a chunk, its first is back for the next one (arXiv
    2104.04473, section 2.2). Folded: a microbatch every `chunks` turns; one going down meets
    one coming back between two ranks, never on one.
    """
    forward = kind == Work.FORWARD
    if folded:
        assert chunks == 2, "a V has two sides"
        found = {}
        for chunk, microbatch in itertools.product(range(chunks), range(microbatches)):
            stage = stage_on(rank, chunk, ranks, folded=True)
            gone = stage if forward else ranks * chunks - 1 - stage
            found[chunks * microbatch + gone] = Action(kind, microbatch, stage)
        return found
    order = [
        Action(kind, microbatch, chunk * ranks + rank)
        for first in range(0, microbatches, ranks)
        for chunk in (range(chunks) if forward else reversed(range(chunks)))
        for microbatch in range(first, min(first + ranks, microbatches))
    ]
    return dict(enumerate(order, rank if forward else ranks - 1 - rank))


def _kinds_of_ticks(name: str, ranks: int, microbatches: int, chunks: int) -> list[Work]:
    """Return the kind of work of each tick in a schedule, in order; it is the same on all ranks.

    All ranks exchange once per tick, so that a tick lasts as long as its longest action: if one
    rank's forward ran with another's backward, it would wait for it. So a tick has one kind. Each
    direction takes v m + p - 1 of them, the last rank's first backward follows its first forward,
    and a step lasts as long as without lockstep: (v m + p - 1) forwards and as many backwards. A
    microbatch then takes a forward and a backward tick a stage there and as many back.

    Split weight gradients have their own ticks in which every rank computes one,
    m - p + 1 where m >= 2p - 1; p - 1 more fill slots of ranks that are done with their forwards,
    or with their input gradients, before others are. That is ZB-H1's time, m (F + I + W) +
    (p - 1) (F + I - W), as long as a weight gradient takes no longer than the other two.
    """
    p, m = ranks, microbatches
    turns = chunks * m + p - 1
    ahead = turns if name == "gpipe" else chunks * p
    kinds = [Work.FORWARD] * ahead
    split = name in SPLIT
    for turn in range(turns):
        kinds.append(Work.BACKWARD_INPUT if split else Work.BACKWARD)
        if split and (p - 1 <= turn < m - p or turn >= turns - min(m, p)):
            kinds.append(Work.BACKWARD_WEIGHT)
        if turn + ahead < turns:
            kinds.append(Work.FORWARD)
    return kinds


def _kinds_of_folded_ticks(ranks: int, microbatches: int) -> list[Work]:
    """Return `_kinds_of_ticks` for stages along a V, except the weight gradients left at the end.

    Each direction takes 2 m + 2 p - 2 turns of half a stage: the last rank waits p - 1 for the
    first microbatch, and is done p - 1 before the first rank. The first rank's first backward
    follows its first forward of the way back, after 2 p. Weight gradients have ticks of their own
    from turn p on, so that no rank ever holds more than 2 p + 1 microbatches, and none in the last
    p turns that have a forward, in which the last rank has no other.
    """
    p, m = ranks, microbatches
    turns, ahead = 2 * (m + p - 1), 2 * p
    kinds = [Work.FORWARD] * ahead
    for turn in range(turns):
        kinds.append(Work.BACKWARD_INPUT)
        if p <= turn < 2 * m - p - 1:
            kinds.append(Work.BACKWARD_WEIGHT)
        if turn + ahead < turns:
            kinds.append(Work.FORWARD)
    return kinds


def _fill(
    kinds: list[Work], visits: dict[Work, list[dict[int, Action]]], ranks: int
) -> tuple[tuple[Action | None, ...], ...]:
    """Return the table of ticks of these kinds; a rank without other work takes a weight gradient.

    Args:
      kinds: of the ticks; those for the weight gradients that are left are added at the end.
      visits: by kind and rank, `_turns`.
      ranks: devices along `pipe`.
    """
    weights: list[collections.deque[Action]] = [collections.deque() for _ in range(ranks)]
    turns: collections.Counter[Work] = collections.Counter()
    ticks = []
    coming = collections.deque(kinds)
    while coming or any(weights):
        kind = coming.popleft() if coming else Work.BACKWARD_WEIGHT
        row: list[Action | None] = []
        for rank, waiting in enumerate(weights):
            action = visits[kind][rank].get(turns[kind]) if kind in visits else None
            if action is None:
                row.append(waiting.popleft() if waiting else None)
                continue
            row.append(action)
            if kind == Work.BACKWARD_INPUT:
                waiting.append(action._replace(kind=Work.BACKWARD_WEIGHT))
        turns[kind] += 1
        ticks.append(tuple(row))
    return tuple(ticks)


def _as_early_as_can_be(
    orders: list[list[Action]], num_stages: int
) -> tuple[tuple[Action | None, ...], ...]:
    """Run each rank's list of actions as early as its inputs allow."""
    waiting = [collections.deque(order) for order in orders]
    finished: set[Action] = set()
    ticks = []
    while any(waiting):
        row = tuple(
            mine.popleft() if mine and finished.issuperset(needs(mine[0], num_stages)) else None
            for mine in waiting
        )
        assert any(row), "the lists of the ranks wait for each other"
        finished.update(result(action) for action in row if action is not None)
        ticks.append(row)
    return tuple(ticks)
