"""Data structure of a pipeline schedule, its timetable, and its validation.

A model is cut into S = ranks x virtual_stages stages; stage s is chunk s // ranks on rank
s mod ranks, or, where the stages are folded, goes down the ranks and back up again: on rank
ranks - 1 - s mod ranks in every other chunk. Every action takes one tick. What an action sends at
the end of tick t (an activation to stage s + 1, a gradient to stage s - 1) can be used from tick
t + 1 on.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import NamedTuple


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
