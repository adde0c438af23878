"""What a pipeline's schedule needs and how long it takes; of a long one from two short ones.

After its first microbatches a schedule but GPipe repeats itself: each further round of as many
microbatches as there are ranks adds the same ticks, and nothing waits longer than before. So what
is counted for many microbatches follows from two and from three rounds (tested against the tables
themselves), and a search does not draw a table of every length.
"""

import collections
import dataclasses
import functools

from jaxtrain.analysis.planning.timeline import simulate
from jaxtrain.training.pipeline.schedules import Pipeline, make_schedule
from jaxtrain.training.pipeline.slots import Backward, sends, slots
from jaxtrain.training.pipeline.table import Timetable

_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Places on a rank for what waits for its turn.

    Attributes:
      inputs: of stages' inputs.
      gradients: of gradients of stages' outputs.
      residuals: of what backward passes need.
    """

    inputs: int
    gradients: int
    residuals: int


def waiting(pipeline: Pipeline, ranks: int) -> Waiting:
    """The places that a schedule needs."""
    name, count = pipeline.schedule, pipeline.microbatches
    short = _ROUNDS * ranks if _repeats(name, count, ranks) else count
    return _waiting(name, ranks, short, pipeline.virtual_stages, pipeline.backward)


def bubble_fraction(pipeline: Pipeline, ranks: int) -> float:
    """The idle share of the schedule on this many ranks, in lockstep; 0 without a pipeline.

    A backward pass costs two forward passes, and one more where stages are recomputed.
    """
    if ranks == 1:
        return 0.0
    name, count, chunks = pipeline.schedule, pipeline.microbatches, pipeline.virtual_stages
    again = 1.0 if pipeline.backward == "recompute" else 0.0
    if not _repeats(name, count, ranks):
        makespan, idle = _time(name, ranks, count, chunks, again)
        return idle / makespan
    short, long = (_time(name, ranks, rounds * ranks, chunks, again) for rounds in (2, _ROUNDS))
    more = count // ranks - _ROUNDS
    makespan, idle = (last + more * (last - first) for first, last in zip(short, long, strict=True))
    return idle / makespan


@functools.lru_cache(maxsize=1024)
def crossings(
    schedule: str, ranks: int, microbatches: int, chunks: int
) -> dict[str, dict[str, int]]:
    """Way -> name of a pattern of edges, as the engine calls it -> ticks that use it.

    Patterns without an edge, in which nothing moves, are left out.
    """
    if not _repeats(schedule, microbatches, ranks):
        return _crossings(schedule, ranks, microbatches, chunks)
    short, long = (_crossings(schedule, ranks, rounds * ranks, chunks) for rounds in (2, _ROUNDS))
    more = microbatches // ranks - _ROUNDS
    return {
        way: {name: ticks + more * (ticks - short[way][name]) for name, ticks in patterns.items()}
        for way, patterns in long.items()
    }


def _repeats(schedule: str, microbatches: int, ranks: int) -> bool:
    """Whether it is long enough to follow from shorter ones."""
    return schedule != "gpipe" and microbatches % ranks == 0 and microbatches > _ROUNDS * ranks


def _table(schedule: str, ranks: int, microbatches: int, chunks: int) -> Timetable:
    return make_schedule(schedule, ranks=ranks, microbatches=microbatches, virtual_stages=chunks)


@functools.lru_cache(maxsize=1024)
def _waiting(
    schedule: str, ranks: int, microbatches: int, chunks: int, backward: Backward
) -> Waiting:
    found = slots(_table(schedule, ranks, microbatches, chunks), backward=backward)
    return Waiting(found.num_input_slots, found.num_gradient_slots, found.num_residual_slots)


@functools.lru_cache(maxsize=1024)
def _time(
    schedule: str, ranks: int, microbatches: int, chunks: int, again: float
) -> tuple[float, float]:
    """What all ticks take, in forward passes of a stage, and the part of it that a rank idles."""
    costs = {"backward": 2 + again, "backward_input": 1 + again}
    found = simulate(_table(schedule, ranks, microbatches, chunks), lockstep=True, **costs)
    return found.makespan, found.bubble_fraction * found.makespan


@functools.lru_cache(maxsize=1024)
def _crossings(
    schedule: str, ranks: int, microbatches: int, chunks: int
) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for way, ticks in zip(
        ("forward", "backward"), sends(_table(schedule, ranks, microbatches, chunks)), strict=True
    ):
        patterns = collections.Counter(tuple(sorted(edges)) for edges in ticks)
        found[way] = {
            f"send_{way}_{number}": patterns[pattern]
            for number, pattern in enumerate(sorted(patterns))
            if pattern
        }
    return found
