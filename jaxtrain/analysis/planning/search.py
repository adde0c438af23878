"""Search for the best mesh, ZeRO stage, remat policy, accumulation and schedule on a machine."""

import bisect
import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.analysis.planning import chunks
from jaxtrain.analysis.planning.executed import stack_costs
from jaxtrain.analysis.planning.machines.targets import MOST_OF_A_GPU, Target, most_memory
from jaxtrain.analysis.planning.space import (
    POLICIES,
    counts,
    meshes_and_schedules,
    stages_and_policies,
    summed_locally,
)
from jaxtrain.analysis.planning.textbook.facts import Facts
from jaxtrain.analysis.planning.textbook.memory import Memory, memory
from jaxtrain.analysis.planning.textbook.steady import bubble_fraction
from jaxtrain.analysis.planning.textbook.traffic import expected
from jaxtrain.analysis.planning.timing import (
    StepTime,
    busy_seconds,
    step_time,
    waited_seconds,
)
from jaxtrain.analysis.planning.unstacked import between_layers
from jaxtrain.analysis.planning.variants import (
    bindings_of,
    changed,
    essential,
    pipeline_of,
    refusal,
    slices_of,
)
from jaxtrain.config.errors import UserError
from jaxtrain.parallel.sharding import Layout
from jaxtrain.run.show.report import human_bytes
from jaxtrain.training.program import layouts
from jaxtrain.training.settings import Config
from jaxtrain.training.step import parameter_shapes


@dataclasses.dataclass(frozen=True)
class Price:
    """What a configuration costs on a target; an estimate.

    Attributes:
      memory: of one device.
      time: of a step.
      hbm_bytes: what a device has; None: as much as it takes.
      devices: over which the configuration goes.
    """

    memory: Memory
    time: StepTime
    hbm_bytes: int | None
    devices: int

    @property
    def fits(self) -> bool:
        """Whether the estimate is within a device's memory."""
        return self.hbm_bytes is None or self.memory.total <= self.hbm_bytes

    @property
    def seconds(self) -> float:
        """Of a step; where the chip's speed is not known, 0: then memory alone decides."""
        return self.time.seconds or 0.0


def price(
    config: Config, target: Target, needed: Memory | None = None, layout: Layout | None = None
) -> Price:
    """The price of a configuration that `variants.refusal` has nothing against; its memory and its
    abstract layout, where they are known already, are not found again."""
    devices = target.devices * slices_of(config, target)
    layout = layouts.abstract_layout(config, devices) if layout is None else layout
    needed = memory(config, layout, target.chip.kind) if needed is None else needed
    moved = [*expected(config, layout), *between_layers(config, layout)]
    time = step_time(
        config, layout, target, moved,
        update_bytes=needed.update_bytes, to_host=needed.to_host, on_disk=needed.arguments.disk,
    )  # fmt: skip
    return Price(needed, time, target.chip.hbm_bytes, devices)


SHOWN, COMPILED = 10, 3
# Predictions closer than this are one: the layouts of one model share most of their error.
TIE = 0.01
AS_FAST = f"as fast as any that fits within {TIE:.0%}, and the smallest of those"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration of a search.

    Attributes:
      changes: binding -> value, over the user's configuration.
      config: with them.
      price: by closed forms.
      reason: a sentence: why it stands where it does.
      compiled_bytes: memory of a device as the compiler says; None where it was not compiled.
      fits: by the compiler where it was compiled, else by the estimate.
      rank: from 1; those that share it are as fast as the prediction can tell.
    """

    changes: Mapping[str, Any]
    config: Config
    price: Price
    reason: str = ""
    compiled_bytes: int | None = None
    fits: bool = True
    rank: int = 0

    @property
    def bindings(self) -> list[str]:
        """What to paste after -b."""
        return bindings_of(self.changes)

    def to_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        return {
            "rank": self.rank,
            "bindings": self.bindings,
            "step_seconds": self.price.time.seconds,
            "mfu": self.price.time.mfu,
            "memory": self.price.memory.total,
            "compiled_memory": self.compiled_bytes,
            "fits": self.fits,
            "reason": self.reason,
        }


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      candidates: the best first.
      priced: configurations that were priced.
      too_large: of these, which do not fit.
      slower: layouts that were not priced: their products with what these read, and what their
        mesh waits for in any case, take longer than all that are shown.
      refused: reason -> configurations that `jaxtrain train` would reject.
    """

    candidates: list[Candidate]
    priced: int
    too_large: int
    slower: int
    refused: dict[str, int]

    @property
    def shown(self) -> list[Candidate]:
        """The best few."""
        return self.candidates[:SHOWN]

    def to_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        return {
            "candidates": [one.to_json() for one in self.shown],
            "search": {
                "priced": self.priced,
                "too_large": self.too_large,
                "slower": self.slower,
                "refused": self.refused,
            },
        }


def search(config: Config, target: Target) -> Found:
    """Prices every layout of a configuration on a target by closed forms.

    The model, data, global batch and kernels stay as they are. Of each mesh, ZeRO stage, remat
    policy and schedule the fewest microbatches that fit are taken, since more repeat the weights'
    traffic; of pipelines more, while that is worth their smaller bubble. Where there are several,
    they are summed locally too, if that fits. The same question has the same answer.

    Raises:
      UserError: nothing fits, or nothing may run.
    """
    slices = slices_of(config, target)
    _refuse_hopeless(config, target, target.devices * slices)
    fitting: list[Candidate] = []
    refused: dict[str, int] = {}
    priced = too_large = slower = 0
    smallest: _Sized | None = None
    left = list(_allowed(config, target, slices, refused))
    heapq.heapify(left)
    while left:
        # Nothing that is left can be among those that are shown.
        if len(fitting) >= SHOWN and left[0].least_seconds > fitting[SHOWN - 1].price.seconds:
            slower = len(left)
            break
        layout = heapq.heappop(left)
        found, tried, large = _fewest(config, layout, target)
        if large < tried:
            best, more = _fastest(config, layout, target, found)
            tried += more
            bisect.insort(fitting, best, key=_order)
            local = _locally(config, layout, best, Facts(best.config, found.layout).passes)
            if local is not None:
                said = _refusal(config, {**local.changes, **local.counts[0]}, target, slices)
                if said is None:
                    heapq.heappush(left, local)
                else:
                    refused[said] = refused.get(said, 0) + 1
        elif smallest is None or found.memory.total < smallest.memory.total:
            smallest = found
        priced, too_large = priced + tried, too_large + large
    if smallest is None and not fitting:
        most = max(refused, key=lambda reason: refused[reason])
        raise UserError(
            f"target {target.name!r}: no layout of this configuration may run there: {most}"
        )
    if not fitting:
        assert smallest is not None
        raise UserError(_nothing(config, target, priced, smallest))
    return Found(with_reasons(ranked(fitting), target), priced, too_large, slower, refused)


def _refuse_hopeless(config: Config, target: Target, devices: int) -> None:
    """Before any layout is traced: in no layout and by no setting do the weights alone fit, each
    in two bytes on one device."""
    room = target.chip.hbm_bytes
    if room is None or config.offload.parameters != "none":
        return
    shapes = jax.tree.leaves(parameter_shapes(config.train.model.build))
    least = 2 * sum(math.prod(leaf.shape) for leaf in shapes)
    if least > room * devices:
        raise UserError(
            f"target {target.name!r}: no layout fits: the weights alone are {human_bytes(least)} "
            f"in bfloat16, and {devices} x {human_bytes(room)} is what there is; they would want "
            f"{math.ceil(least / room):,} devices, before gradients and the optimizer"
        )


def _nothing(config: Config, target: Target, priced: int, smallest: "_Sized") -> str:
    """Why nothing fits, and the ways out: other settings, or so many devices."""
    size, room = smallest.memory.total, target.chip.hbm_bytes or 0
    bindings = bindings_of(essential(config, smallest.changes))
    ways = []
    if size <= (most_memory(target) or 0):
        ways.append((size - room, f"Train.gpu_memory_fraction={MOST_OF_A_GPU}"))
    for changes in LIGHTER:
        if any(essential(smallest.config, changes)):
            variant = changed(smallest.config, changes)
            if refusal(variant, target) is None:
                saved = size - price(variant, target).memory.total
                ways.append((saved, " and ".join(bindings_of(changes))))
    enough = [words for saved, words in sorted(ways) if size - saved <= room]
    devices = target.devices * slices_of(config, target)
    settings = f"with {enough[0]} it fits" if enough else "no setting alone is enough"
    return (
        f"target {target.name!r}: none of {priced} layouts fits into {devices} x "
        f"{human_bytes(room)}; the smallest takes {human_bytes(size)} a device "
        f"({' '.join(bindings) or 'as it is'}): {settings}, and so it does on about "
        f"{math.ceil(size * devices / room / devices) * devices} devices"
    )


# What makes any layout smaller, and is no layout.
LIGHTER: tuple[dict[str, Any], ...] = (
    {"Optimizer.moments": "bfloat16"},
    {"Precision.params": "bfloat16"},
    {"Optimizer.moments": "bfloat16", "Precision.params": "bfloat16"},
    {"Remat.policy": "offload"},
    {"Offload.optimizer_state": "host"},
)


def _order(candidate: Candidate) -> tuple[float, int, list[str]]:
    return candidate.price.seconds, candidate.price.memory.total, candidate.bindings


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest first; of those within TIE of the fastest of them the
    smallest first: what the prediction cannot tell apart, room in memory does."""
    found = numbered(sorted(candidates, key=_order))
    return sorted(found, key=lambda one: (one.rank, one.price.memory.total, *_order(one)))


def numbered(candidates: Sequence[Candidate]) -> list[Candidate]:
    """With their ranks in this order: 1, or 1, 1, 3 where the second is within TIE of the first."""
    found: list[Candidate] = []
    rank, first = 1, candidates[0].price.seconds
    for place, one in enumerate(candidates):
        if abs(one.price.seconds / (first or 1.0) - 1) > TIE:
            rank, first = place + 1, one.price.seconds
        found.append(dataclasses.replace(one, rank=rank))
    return found


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A layout that may run, but for the count of its microbatches.

    Attributes:
      changes: its bindings.
      counts: bindings of every possible count of microbatches, the fewest first.
      least_seconds: of its products and what these read, what every layout of its mesh waits for
        and its smallest bubble alone.
    """

    changes: dict[str, Any]
    counts: list[dict[str, Any]]
    least_seconds: float

    def __lt__(self, other: "_Layout") -> bool:
        """In which order they are priced."""
        mine, theirs = ((one.least_seconds, str(one.changes)) for one in (self, other))
        return mine < theirs


def _allowed(
    config: Config, target: Target, slices: int, refused: dict[str, int]
) -> Iterator[_Layout]:
    """All layouts that the checks let pass; the others are counted by reason."""
    devices, busy = target.devices * slices, dict[tuple[Any, ...], float]()
    waits: dict[tuple[Any, ...], float] = {}
    for mesh in meshes_and_schedules(config, target, devices):
        counted = list(counts(config, mesh))
        said = _refusal(config, {**mesh, **counted[0]}, target, slices)
        if said is not None:
            refused[said] = refused.get(said, 0) + 1
            continue
        sizes = tuple(value for name, value in mesh.items() if name.startswith("Mesh."))
        split = mesh["Mesh.data"] * mesh["Mesh.fsdp"] * mesh["Mesh.expert"]
        rows = config.train.global_batch_size
        held = math.ceil(rows / split) * split / rows  # of each row, with those that fill a batch
        if sizes not in waits:
            waits[sizes] = _waits(config, {**mesh, **counted[0]}, target, devices)
        for rest in stages_and_policies(config, target, mesh):
            changes = {**mesh, **rest}
            pipeline = pipeline_of(config, {**changes, **counted[-1]})
            ranks = mesh["Mesh.pipe"]
            variant = changed(config, changes)
            key = variant.remat, pipeline.backward, ranks > 1
            if key not in busy:
                busy[key] = busy_seconds(variant, devices, target, pipelined=ranks > 1)
            least = (held * busy[key] + waits[sizes]) / (
                1 - bubble_fraction(pipeline, ranks, stack_costs(config))
            )
            yield _Layout(changes, counted, least)


def _waits(config: Config, mesh: dict[str, Any], target: Target, devices: int) -> float:
    """Seconds of communication that no layout of a mesh goes without: what moves activations, of
    stages that keep what they need and of layers that repeat nothing."""
    changes = {**mesh, "Remat.policy": POLICIES[0]}
    if mesh["Mesh.pipe"] > 1:
        # Stages of other schedules are as long, or padded to more.
        plain = {"Pipeline.schedule": "1f1b", "Pipeline.virtual_stages": 1}
        changes |= {**plain, "Pipeline.backward": "residuals"}
    variant = changed(config, changes)
    layout = layouts.abstract_layout(variant, devices)
    moved = [*expected(variant, layout), *between_layers(variant, layout)]
    return waited_seconds(variant, layout, target, moved)


def _refusal(config: Config, changes: Mapping[str, Any], target: Target, slices: int) -> str | None:
    try:
        variant = changed(config, changes)
    except UserError as error:
        return str(error)
    said = refusal(variant, target)
    if said is not None:
        return said.splitlines()[0]
    sharded = dataclasses.replace(variant, sharding=dataclasses.replace(variant.sharding, zero=3))
    if layouts.shared_mesh(sharded, target.devices * slices) != variant.mesh:
        return f"Mesh.fsdp={variant.mesh.fsdp}: the same as with fewer, and more Mesh.data"
    return None


@dataclasses.dataclass(frozen=True)
class _Sized:
    """A layout with its microbatches, before its time is predicted.

    Attributes:
      changes: its bindings.
      config: with them.
      layout: the abstract one.
      memory: of one device.
    """

    changes: dict[str, Any]
    config: Config
    layout: Layout
    memory: Memory


def _fewest(config: Config, layout: _Layout, target: Target) -> tuple[_Sized, int, int]:
    """The fewest microbatches that fit, by halves, since more of them never take more memory, else
    the most there are; and how many were tried, and how many of those do not fit."""
    tried: dict[int, _Sized] = {}
    room, devices = target.chip.hbm_bytes, target.devices * slices_of(config, target)
    # Of microbatches it does not depend.
    laid = layouts.abstract_layout(changed(config, {**layout.changes, **layout.counts[0]}), devices)

    def fits(number: int) -> bool:
        changes = {**layout.changes, **layout.counts[number]}
        variant = changed(config, changes)
        needed = memory(variant, laid, target.chip.kind)
        tried[number] = _Sized(changes, variant, laid, needed)
        return room is None or needed.total <= room

    last = number = len(layout.counts) - 1
    if fits(last):
        number = bisect.bisect_left(range(last), True, key=fits)
    large = sum(room is not None and one.memory.total > room for one in tried.values())
    return tried[number], len(tried), large


def _fastest(
    config: Config, layout: _Layout, target: Target, fewest: _Sized
) -> tuple[Candidate, int]:
    """The candidate with these microbatches, or in a pipeline with more, as long as their smaller
    bubble is worth the weights' traffic, and with larger chunks of the loss where the asked ones
    wait for memory; and how many were tried besides."""

    def candidate(sized: _Sized) -> Candidate:
        cost = price(sized.config, target, sized.memory, sized.layout)
        return Candidate(essential(config, sized.changes), sized.config, cost)

    def grown(before: Candidate, changes: dict[str, Any]) -> Candidate | None:
        nonlocal tried
        variant = changed(config, changes)
        needed = memory(variant, fewest.layout, target.chip.kind)
        tried += 1
        if target.chip.hbm_bytes is not None and needed.total > target.chip.hbm_bytes:
            return None
        after = candidate(_Sized(changes, variant, fewest.layout, needed))
        return after if after.price.seconds < before.price.seconds else None

    best, tried, chosen = candidate(fewest), 0, fewest.changes
    if layout.changes["Mesh.pipe"] > 1:
        for count in layout.counts[_place(layout, fewest.config) + 1 :]:
            after = grown(best, {**layout.changes, **count})
            if after is None:
                break
            best, chosen = after, {**layout.changes, **count}
    for chunk in chunks.larger(config):
        if best.price.time.chunks <= chunks.WORTH * best.price.seconds:
            break
        after = grown(best, {**chosen, **chunk})
        if after is None:
            break
        best = after
    return best, tried


def _place(layout: _Layout, config: Config) -> int:
    """Where among a layout's counts of microbatches a configuration's is."""
    return next(n for n, one in enumerate(layout.counts) if not essential(config, one))


def _locally(config: Config, layout: _Layout, best: Candidate, passes: int) -> _Layout | None:
    """A layout that was priced, its microbatches summed locally; None where it has one, or is so
    already. That takes more memory, so no fewer fit, and no traffic of weights for each, so that in
    a pipeline the most, with the smallest bubble, are the best."""
    changes = summed_locally(config, layout.changes)
    if changes is None or passes == 1:
        return None
    pipelined = layout.changes["Mesh.pipe"] > 1
    left = layout.counts[-1 if pipelined else _place(layout, best.config) :]
    return _Layout(changes, left, max(layout.least_seconds, best.price.time.compute or 0.0))


# -- the reasons ---------------------------------------------------------------------------------


def with_reasons(ranked: Sequence[Candidate], target: Target) -> list[Candidate]:
    """The candidates, best first, each with the sentence why it stands there."""
    best, fastest = ranked[0], min(one.price.seconds for one in ranked)
    return [
        dataclasses.replace(one, reason=_reason(one, best, fastest, target.chip.hbm_bytes))
        for one in ranked
    ]


def _reason(one: Candidate, best: Candidate, fastest: float, hbm_bytes: int | None) -> str:
    time = one.price.time
    if not one.fits:
        return "too large as it was compiled, though the estimate fits"
    room = human_bytes(one.price.memory.total if one.compiled_bytes is None else one.compiled_bytes)
    if hbm_bytes is not None:
        room += f" of {human_bytes(hbm_bytes)}"
    if time.seconds is None or best.price.time.seconds is None:
        return f"takes {room}; the chip's speed is not known, so memory alone decides"
    if one is best:
        which = "the fastest that fits" if one.price.seconds <= fastest else AS_FAST
        return (
            f"{which} ({room}): {time.compute:.3g} s of computation, "
            f"{time.exposed:.2g} s of communication that nothing hides, {time.bubble:.2g} s of "
            "pipeline bubble"
        )
    pieces = {
        "computation, recomputation and update": (time.compute or 0)
        - (best.price.time.compute or 0),
        "communication that nothing hides": (time.exposed or 0) - (best.price.time.exposed or 0),
        "pipeline bubble": (time.bubble or 0) - (best.price.time.bubble or 0),
    }
    name, more = max(pieces.items(), key=lambda piece: piece[1])
    slower = time.seconds / best.price.time.seconds - 1
    if one.rank == best.rank or more <= 0 or slower < 0.0005:
        return f"as fast as the best within {TIE:.0%} ({slower:+.1%}), with {room}"
    return f"{slower:.1%} slower than the best: {more:.2g} s more {name} ({room})"
