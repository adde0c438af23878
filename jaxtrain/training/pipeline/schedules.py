"""The schedules: which rank does what in which tick, and which layers stand on which stage."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Literal

from jaxtrain.config.errors import UserError, did_you_mean, nearest_multiple
from jaxtrain.config.reader import configurable
from jaxtrain.nn.execution import Scan
from jaxtrain.nn.execution import refuse as refuse_scan
from jaxtrain.training.pipeline.slots import Backward
from jaxtrain.training.pipeline.table import Action, Timetable, Work, check, needs, result

# Whoever runs a schedule takes its table and its slots from here.


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How the stages over `Mesh.pipe` take turns; only where Mesh.pipe is above 1.

    Attributes:
      schedule: 'gpipe': all forwards, then all backwards (arXiv 1811.06965); '1f1b': one forward,
        one backward, so that few microbatches are alive (PipeDream-flush, arXiv 2006.09503);
        'interleaved': 1f1b over virtual stages (arXiv 2104.04473); 'zero_bubble': 1f1b whose
        weight gradients wait until there is nothing better to do (ZB-H1, arXiv 2401.10241).
      microbatches: parts that each accumulated batch is cut into; more make the bubble smaller.
      virtual_stages: stages on each rank; at least 2 with 'interleaved', otherwise 1.
      backward: 'recompute' a stage from its saved input, or keep the 'residuals' of its forward.
    """

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    microbatches: int = 1
    virtual_stages: int = 1
    backward: Backward = "recompute"

    def __post_init__(self) -> None:
        _refuse(self.schedule, self.microbatches, self.virtual_stages)


def refuse(
    settings: Pipeline,
    ranks: int,
    *,
    num_layers: int | None,
    scan: Scan,
    context_parallel: str | None,
) -> Iterator[str]:
    """A sentence for each reason why a model's layers cannot be stages that take turns so.

    Args:
      settings: how they take turns.
      ranks: of the pipeline; 1 is none.
      num_layers: layers that are cut into stages; None: the model has no such.
      scan: the loop over a stage's layers.
      context_parallel: how sequences that are split are put together; None: they are whole.
    """
    if ranks == 1:
        for field in dataclasses.fields(settings):
            value, default = getattr(settings, field.name), field.default
            if value != default:
                yield (
                    f"Pipeline.{field.name}={value!r} does nothing with Mesh.pipe=1; set Mesh.pipe "
                    f"above 1 or leave it at {default!r}"
                )
        return
    if context_parallel == "ring":
        yield (
            f"Attention.context_parallel='ring' with Mesh.pipe={ranks}: a ring's permutes need all "
            "stages at once, and these do different things in one tick; use "
            "Attention.context_parallel='ulysses'"
        )
    try:
        make_schedule(
            settings.schedule,
            ranks=ranks,
            microbatches=settings.microbatches,
            virtual_stages=settings.virtual_stages,
        )
    except UserError as error:
        yield str(error)
    if num_layers is None:
        return
    try:
        longest = max(cut_layers(num_layers, ranks * settings.virtual_stages))
    except UserError as error:
        yield str(error)
        return
    written = f"the {longest} layers of the longest stage"
    yield from refuse_scan(scan, num_layers=longest, written=written)


def _refuse(schedule: str, microbatches: int, virtual_stages: int) -> None:
    for name, value in (("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise UserError(f"Pipeline.{name}={value}; use at least 1")
    written = f"Pipeline.virtual_stages={virtual_stages} with Pipeline.schedule={schedule!r}"
    if schedule == "interleaved" and virtual_stages < 2:
        raise UserError(
            f"{written}: it needs at least 2 virtual stages; set Pipeline.virtual_stages=2 or "
            "Pipeline.schedule='1f1b'"
        )
    if schedule in _WARMUPS and schedule != "interleaved" and virtual_stages > 1:
        raise UserError(
            f"{written}: only 'interleaved' has virtual stages; set Pipeline.virtual_stages=1 or "
            "Pipeline.schedule='interleaved'"
        )


# Schedule -> how many forwards a rank runs ahead of its first backward, from (ranks, rank,
# microbatches, virtual stages). But for the split of backward, nothing else tells them apart.
_WARMUPS: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, rank, m, v: m,
    "1f1b": lambda p, rank, m, v: p - 1 - rank,
    "interleaved": lambda p, rank, m, v: 2 * (p - 1 - rank) + (v - 1) * p,
    "zero_bubble": lambda p, rank, m, v: p - 1 - rank,
}


def make_schedule(
    name: str, *, ranks: int, microbatches: int, virtual_stages: int = 1
) -> Timetable:
    """The checked table of a schedule; gradients are added up in the order of microbatches.

    Raises:
      UserError: an unknown name, or numbers that this schedule has no table for.
    """
    if name not in _WARMUPS:
        raise UserError(f"Pipeline.schedule={name!r} is unknown{did_you_mean(name, _WARMUPS)}")
    _refuse(name, microbatches, virtual_stages)
    _refuse_no_ranks(ranks)
    if name == "interleaved" and microbatches % ranks:
        raise UserError(
            f"Pipeline.microbatches={microbatches} with Pipeline.schedule='interleaved': it must "
            f"be a multiple of Mesh.pipe={ranks}; the nearest is "
            f"{nearest_multiple(microbatches, ranks)} (or use Pipeline.schedule='1f1b')"
        )
    orders = []
    for rank in range(ranks):
        warmup = _WARMUPS[name](ranks, rank, microbatches, virtual_stages)
        kind = Work.BACKWARD_INPUT if name == "zero_bubble" else Work.BACKWARD
        forwards = _visits(Work.FORWARD, rank, ranks, microbatches, virtual_stages)
        backwards = _visits(kind, rank, ranks, microbatches, virtual_stages)
        pairs = itertools.zip_longest(forwards[warmup:], backwards)
        orders.append(forwards[:warmup] + [a for pair in pairs for a in pair if a is not None])
    schedule = Timetable(name, ranks, virtual_stages, microbatches, _run(orders, virtual_stages))
    check(schedule)
    return schedule


def forward_only(ranks: int, microbatches: int, virtual_stages: int = 1) -> Timetable:
    """The checked table of evaluation: any number of microbatches, also with virtual stages.

    Raises:
      UserError: a number below 1.
    """
    _refuse("forward", microbatches, virtual_stages)
    _refuse_no_ranks(ranks)
    orders = [
        _visits(Work.FORWARD, rank, ranks, microbatches, virtual_stages) for rank in range(ranks)
    ]
    schedule = Timetable(
        "forward", ranks, virtual_stages, microbatches, _run(orders, virtual_stages)
    )
    check(schedule)
    return schedule


def _refuse_no_ranks(ranks: int) -> None:
    if ranks < 1:
        raise UserError(f"Mesh.pipe={ranks}: a pipeline has at least 1 rank")


def _visits(kind: Work, rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """A rank's actions of one kind in order: groups of `ranks` microbatches, chunk after chunk.

    A group is as long as the ring: when its last microbatch enters a chunk, its first is back for
    the next one (arXiv 2104.04473, section 2.2).
    """
    chunk_order = range(chunks) if kind == Work.FORWARD else range(chunks - 1, -1, -1)
    return [
        Action(kind, microbatch, chunk * ranks + rank)
        for first in range(0, microbatches, ranks)
        for chunk in chunk_order
        for microbatch in range(first, min(first + ranks, microbatches))
    ]


def _run(orders: list[list[Action]], chunks: int) -> tuple[tuple[Action | None, ...], ...]:
    """Runs each rank's list as early as inputs allow; weight gradients fill the gaps.

    Where backward is split, a rank holds at most as many microbatches as there are ranks (the
    peak of 1F1B): at that limit a weight gradient goes before the next forward. That is ZB-H1.
    """
    ranks = len(orders)
    waiting = [collections.deque(order) for order in orders]
    weights: list[collections.deque[Action]] = [collections.deque() for _ in orders]
    live, finished, ticks = [0] * ranks, set(), []

    def choose(rank: int) -> Action | None:
        if waiting[rank]:
            action = waiting[rank][0]
            full = action.kind == Work.FORWARD and weights[rank] and live[rank] >= ranks
            if not full and finished.issuperset(needs(action, ranks * chunks)):
                return waiting[rank].popleft()
        return weights[rank].popleft() if weights[rank] else None

    while any(waiting) or any(weights):
        row = tuple(choose(rank) for rank in range(ranks))
        assert any(row), "the lists of the ranks wait for each other"
        for rank, action in enumerate(row):
            if action is None:
                continue
            finished.add(result(action))
            if action.kind == Work.BACKWARD_INPUT:
                weights[rank].append(action._replace(kind=Work.BACKWARD_WEIGHT))
            elif action.kind == Work.FORWARD:
                live[rank] += 1
            else:
                live[rank] -= 1
        ticks.append(row)
    return tuple(ticks)


def cut_layers(
    num_layers: int,
    num_stages: int,
    *,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    longest: int | None = None,
) -> tuple[int, ...]:
    """How many layers each stage has, one stage after the other, so that no stage costs much.

    The dearest stage is as cheap as can be: every tick waits for it. Among the cuts of which that
    is true: the smallest sum of squared costs, then the fewest layers on the two ends, which hold
    embedding and head besides, then the fewest on early stages, which keep more microbatches alive.

    Args:
      num_layers: layers of the model.
      num_stages: ranks x virtual stages; each has at least one layer.
      first_cost: cost of the embedding, in layers.
      last_cost: cost of the head and the loss, in layers.
      longest: no stage has more layers; None is no bound. Where every stage is padded to the
        longest one, ceil(num_layers / num_stages) keeps the padding least.

    Raises:
      UserError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise UserError(
            f"num_layers={num_layers} does not fill {num_stages} pipeline stages (Mesh.pipe x "
            f"Pipeline.virtual_stages), one layer each; use num_layers={num_stages} or at most "
            f"{num_layers} stages"
        )
    longest = num_layers if longest is None else longest
    assert longest * num_stages >= num_layers, "stages too short for the layers"
    assert min(first_cost, last_cost) >= 0
    if num_stages == 1:
        return (num_layers,)
    inner = num_stages - 2
    best = None
    for first, last in itertools.product(range(1, min(longest, num_layers) + 1), repeat=2):
        middle = num_layers - first - last
        if middle < inner or middle > inner * longest:
            continue
        # Stages in between cost the same, so they differ by one layer at most.
        layers, more = divmod(middle, inner) if inner else (0, 0)
        cut = (first, *[layers] * (inner - more), *[layers + 1] * more, last)
        costs = (first + first_cost, *cut[1:-1], last + last_cost)
        key = (max(costs), sum(cost**2 for cost in costs), first + last, cut)
        if best is None or key < best:
            best = key
    assert best is not None
    return best[-1]
