"""Duration and bubble of a pipeline schedule; long schedules extrapolated from two short ones.

After its first microbatches every schedule except GPipe is periodic: each further round of as many
microbatches as ranks adds the same ticks, and buffers are held no longer than before. So the counts
for many microbatches follow from those of two and three rounds (tested against the tables
themselves), and a search does not need a table of every length.
"""

import collections
import dataclasses
import functools
from typing import Any

from jaxtrain.analysis.planning.timing.timeline import simulate
from jaxtrain.training.pipeline.parts import crossing
from jaxtrain.training.pipeline.schedules import Backward, Pipeline
from jaxtrain.training.pipeline.slots import sends, slots
from jaxtrain.training.pipeline.timetables import Timetable, make_schedule

_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Buffer slots of a rank for pending work.

    Attributes:
      inputs: of stage inputs.
      gradients: of gradients of stage outputs.
      residuals: of residuals for backward passes.
      stash: of what weight gradients need if they are computed later than input gradients.
    """

    inputs: int
    gradients: int
    residuals: int
    stash: int


def waiting(pipeline: Pipeline, ranks: int, passes: int = 1) -> Waiting:
    """Return the buffer slots that a schedule needs."""
    name, count = pipeline.schedule, pipeline.microbatches
    short = _ROUNDS * ranks if _repeats(name, count, ranks) else count
    return _waiting(name, ranks, short, pipeline.virtual_stages, passes, pipeline.backward)


def bubble_fraction(pipeline: Pipeline, ranks: int, costs: tuple[float, ...] = (1.0,)) -> float:
    """Return the idle fraction of the schedule on these ranks, in lockstep; 0 without a pipeline.

    A backward pass costs two forward passes, and one more if stages are recomputed.

    Args:
      pipeline: the settings.
      ranks: devices along `pipe`.
      costs: cost of a stage in each pass around the ring, in any unit: a tick lasts as long as the
        longest stage in it.
    """
    if ranks == 1:
        return 0.0
    name, count, chunks = pipeline.schedule, pipeline.microbatches, pipeline.virtual_stages
    again = 1.0 if pipeline.backward == "recompute" else 0.0
    if not _repeats(name, count, ranks):
        makespan, idle = _time(name, ranks, count, chunks, again, costs)
        return idle / makespan
    short, long = (
        _time(name, ranks, rounds * ranks, chunks, again, costs) for rounds in (2, _ROUNDS)
    )
    more = count // ranks - _ROUNDS
    makespan, idle = (last + more * (last - first) for first, last in zip(short, long, strict=True))
    return idle / makespan


@functools.lru_cache(maxsize=1024)
def crossings(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    travels: tuple[tuple[str, int], ...] = (("stream", 0),),
) -> dict[str, dict[str, int]]:
    """Return `parts.crossing` -> name of an edge pattern in the engine -> ticks that use it.

    Patterns without traffic between ranks are left out.

    Args:
      schedule, ranks, microbatches: of the table.
      chunks: virtual stages of a rank in a pass around the ring.
      travels: the items of `Parts.travels`; the last part is sent in the last pass.
    """
    if not _repeats(schedule, microbatches, ranks):
        return _crossings(schedule, ranks, microbatches, chunks, travels)
    short, long = (
        _crossings(schedule, ranks, rounds * ranks, chunks, travels) for rounds in (2, _ROUNDS)
    )
    more = microbatches // ranks - _ROUNDS
    return {
        way: {name: ticks + more * (ticks - short[way][name]) for name, ticks in patterns.items()}
        for way, patterns in long.items()
    }


def _repeats(schedule: str, microbatches: int, ranks: int) -> bool:
    """Return whether the schedule is long enough to extrapolate from shorter ones."""
    return schedule != "gpipe" and microbatches % ranks == 0 and microbatches > _ROUNDS * ranks


def _table(schedule: str, ranks: int, microbatches: int, chunks: int, passes: int) -> Timetable:
    return make_schedule(
        schedule, ranks=ranks, microbatches=microbatches, virtual_stages=chunks, passes=passes
    )


@functools.lru_cache(maxsize=1024)
def _waiting(
    schedule: str, ranks: int, microbatches: int, chunks: int, passes: int, backward: Backward
) -> Waiting:
    found = slots(_table(schedule, ranks, microbatches, chunks, passes), backward=backward)
    return Waiting(
        found.num_input_slots,
        found.num_gradient_slots,
        found.num_residual_slots,
        found.num_stash_slots,
    )


@functools.lru_cache(maxsize=1024)
def _time(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    again: float,
    of_stages: tuple[float, ...],
) -> tuple[float, float]:
    """Return the time of all ticks, in forward passes of a stage, and a rank's idle part of it."""
    costs: Any = {"backward": 2 + again, "backward_input": 1 + again}
    table = _table(schedule, ranks, microbatches, chunks, len(of_stages))
    each = [cost for cost in of_stages for _ in range(ranks * chunks)]
    found = simulate(table, lockstep=True, stage_costs=each, **costs)
    return found.makespan, found.bubble_fraction * found.makespan


@functools.lru_cache(maxsize=1024)
def _crossings(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    travels: tuple[tuple[str, int], ...],
) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    table = _table(schedule, ranks, microbatches, chunks, travels[-1][1] + 1)
    for part, first in travels:
        both = sends(table, first * ranks * chunks)
        for way, ticks in zip(("forward", "backward"), both, strict=True):
            patterns = collections.Counter(tuple(sorted(edges)) for edges in ticks)
            name = crossing(way, part, first)
            found[name] = {
                f"send_{name}_{number}": patterns[pattern]
                for number, pattern in enumerate(sorted(patterns))
                if any(source != to for source, to in pattern)
            }
    return found
