"""Looks for the best mesh, ZeRO stage, remat policy, accumulation and schedule for a machine."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.textbook.memory import Memory, memory
from jaxtrain.analysis.planning.textbook.traffic import expected
from jaxtrain.analysis.planning.timing import StepTime, least_seconds, step_time
from jaxtrain.analysis.planning.variants import bindings_of, changed, essential, refusal, slices_of
from jaxtrain.config.errors import UserError, nearest_divisor
from jaxtrain.data.batch import kind_of
from jaxtrain.nn.attention.kernels import KERNELS
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.run.show.report import human_bytes
from jaxtrain.training.program import layouts
from jaxtrain.training.program.program import resolved
from jaxtrain.training.settings import Config


@dataclasses.dataclass(frozen=True)
class Price:
    """What a configuration costs on a target; an estimate.

    Attributes:
      memory: of one device.
      time: of a step.
      hbm_bytes: what a device has; None: as much as it takes.
    """

    memory: Memory
    time: StepTime
    hbm_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether the estimate is within a device's memory."""
        return self.hbm_bytes is None or self.memory.total <= self.hbm_bytes

    @property
    def seconds(self) -> float:
        """Of a step; where the chip's speed is not known, 0: then memory alone decides."""
        return self.time.seconds or 0.0


def price(config: Config, target: Target) -> Price:
    """The price of a configuration that `variants.refusal` has nothing against."""
    layout = layouts.abstract_layout(config, target.devices * slices_of(config, target))
    needed = memory(config, layout, target.chip.kind)
    moved = expected(config, layout)
    time = step_time(config, layout, target, moved, update_bytes=needed.update_bytes)
    return Price(needed, time, target.chip.hbm_bytes)


# What is tried of each axis: wider ones lose everywhere on today's chips, or need a model that has
# the heads and layers for it, in which case they are wider than a host's or torus's fast links.
MOST = {"pipe": 16, "context": 8, "tensor": 16, "expert": 64}
# Sequences below this are not split over context.
LONG = 4096
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
# From the fastest step to the smallest; offload is left to the advice.
POLICIES = ("none", "dots", "full")
SHOWN, COMPILED = 10, 3


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
    """

    changes: Mapping[str, Any]
    config: Config
    price: Price
    reason: str = ""
    compiled_bytes: int | None = None
    fits: bool = True

    @property
    def bindings(self) -> list[str]:
        """What to paste after -b."""
        return bindings_of(self.changes)

    def to_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        return {
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
      slower: layouts that were not priced: without any communication they take longer than all
        that are shown.
      refused: reason -> configurations that `jaxtrain train` would refuse.
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
    policy and schedule the fewest microbatches that fit are taken, since more only repeat the
    weights' traffic. The same question has the same answer.

    Raises:
      UserError: nothing fits, or nothing may run.
    """
    slices = slices_of(config, target)
    fitting: list[Candidate] = []
    refused: dict[str, int] = {}
    priced = too_large = slower = 0
    layouts = list(_allowed(config, target, slices, refused))
    layouts.sort(key=lambda layout: (layout.least_seconds, str(layout.changes)))
    for layout in layouts:
        # Nothing that is left can be among those that are shown.
        if len(fitting) >= SHOWN:
            fitting.sort(key=_order)
            if layout.least_seconds > fitting[SHOWN - 1].price.seconds:
                slower += 1
                continue
        found, fit, large = _fewest(config, layout, target)
        priced, too_large = priced + fit + large, too_large + large
        fitting += [] if found is None else [found]
    if not fitting:
        raise UserError(_nothing(config, target, priced, refused))
    ranked = sorted(fitting, key=_order)
    return Found(with_reasons(ranked, target), priced, too_large, slower, refused)


def _nothing(config: Config, target: Target, priced: int, refused: Mapping[str, int]) -> str:
    if not priced:
        most = max(refused, key=lambda reason: refused[reason])
        return f"target {target.name!r}: no layout of this configuration may run there: {most}"
    return (
        f"target {target.name!r}: none of {priced} layouts fits into {target.devices} x "
        f"{human_bytes(target.chip.hbm_bytes or 0)}; the nearest is more devices, a smaller "
        f"Train.global_batch_size than {config.train.global_batch_size}, or Remat.policy='offload'"
    )


def _order(candidate: Candidate) -> tuple[float, int, list[str]]:
    return candidate.price.seconds, candidate.price.memory.total, candidate.bindings


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A layout that may run, but for the count of its microbatches.

    Attributes:
      changes: its bindings.
      counts: bindings of every possible count of microbatches, the fewest first.
      least_seconds: of its computation and its smallest bubble alone.
    """

    changes: dict[str, Any]
    counts: list[dict[str, int]]
    least_seconds: float


def _allowed(
    config: Config, target: Target, slices: int, refused: dict[str, int]
) -> Iterator[_Layout]:
    """All layouts that the checks let pass; the others are counted by reason."""
    for mesh in _meshes_and_schedules(config, target, target.devices * slices):
        counts = list(_counts(config, mesh))
        said = _refusal(config, {**mesh, **counts[0]}, target, slices)
        if said is not None:
            refused[said] = refused.get(said, 0) + 1
            continue
        for rest in _stages_and_policies(config, mesh):
            changes = {**mesh, **rest}
            last = changed(config, {**changes, **counts[-1]})
            devices = target.devices * slices
            yield _Layout(changes, counts, least_seconds(last, devices, target))


def _refusal(config: Config, changes: Mapping[str, Any], target: Target, slices: int) -> str | None:
    try:
        variant = changed(config, changes)
    except UserError as error:
        return str(error)
    said = refusal(variant, target, slices=slices)
    return None if said is None else said.splitlines()[0]


def _fewest(config: Config, layout: _Layout, target: Target) -> tuple[Candidate | None, int, int]:
    """The fewest microbatches that fit, by halves, since more of them never take more memory; and
    how many of those that were priced fit and do not."""
    tried: dict[int, Candidate] = {}

    def fits(number: int) -> bool:
        everything = {**layout.changes, **layout.counts[number]}
        variant = changed(config, everything)
        needed = essential(config, everything)
        tried[number] = Candidate(needed, variant, price(variant, target))
        return tried[number].price.fits

    last = len(layout.counts) - 1
    if not fits(last):
        return None, 0, 1
    number = bisect.bisect_left(range(last), True, key=fits)
    fit = sum(one.price.fits for one in tried.values())
    return tried[number], fit, len(tried) - fit


# -- the space ------------------------------------------------------------------------------------


def _meshes_and_schedules(config: Config, target: Target, devices: int) -> Iterator[dict[str, Any]]:
    whole = changed(config, {"Attention.context_parallel": "ulysses"})
    in_ring = KERNELS[resolved(whole, target.chip.kind).attention.kernel].plain
    for sizes in _meshes(config, devices):
        mesh: dict[str, Any] = {f"Mesh.{axis}": size for axis, size in sizes.items()}
        if sizes["tensor"] > 1 or config.sharding.sequence_parallel:
            mesh["Sharding.sequence_parallel"] = sizes["tensor"] > 1
        if sizes["context"] > 1 and not in_ring:
            mesh["Attention.context_parallel"] = "ulysses"
        if sizes["pipe"] == 1:
            yield mesh
            continue
        for name, chunks in SCHEDULES:
            yield {**mesh, "Pipeline.schedule": name, "Pipeline.virtual_stages": chunks}


def _stages_and_policies(config: Config, mesh: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    stacked = config.train.model.layers is not None
    policies = POLICIES if stacked else (config.remat.policy,)
    stages = (0,)
    if mesh["Mesh.fsdp"] > 1:
        # Beside replicas only stage 3 is worth a name of its own (HSDP).
        stages = (3, 2, 1) if mesh["Mesh.data"] == 1 else (3,)
    for stage, policy in itertools.product(stages, policies):
        yield {"Sharding.zero": stage, "Remat.policy": policy}


def _meshes(config: Config, devices: int) -> Iterator[dict[str, int]]:
    """Every way to give the devices to the axes that this model and data can use."""
    model = config.train.model
    batch = config.train.data.abstract_batch(1)
    length = batch.inputs.shape[1] if kind_of(batch) == "tokens" else 1
    most = dict.fromkeys(MESH_AXES, devices)
    most |= {axis: min(limit, devices) for axis, limit in MOST.items()}
    if model.layers is None:
        most["pipe"] = 1
    if model.attention is None:
        most |= {"context": 1, "tensor": 1}
    if length < LONG:
        most["context"] = 1
    if model.experts is None:
        most["expert"] = 1

    def ways(axes: tuple[str, ...], left: int) -> Iterator[dict[str, int]]:
        axis, *rest = axes
        if not rest:
            if left <= most[axis]:
                yield {axis: left}
            return
        for size in range(1, min(left, most[axis]) + 1):
            if left % size == 0:
                for others in ways(tuple(rest), left // size):
                    yield {axis: size, **others}

    yield from ways(MESH_AXES, devices)


def _counts(config: Config, layout: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Microbatches, the fewest first: in a pipeline its own, elsewhere accumulation."""
    split = layout["Mesh.data"] * layout["Mesh.fsdp"] * layout["Mesh.expert"]
    rows = config.train.global_batch_size // split
    ranks = layout["Mesh.pipe"]
    if rows == 0:
        # The check says why in its own words.
        yield {"Train.accumulation": 1}
        return
    counts = [count for count in range(1, rows + 1) if rows % count == 0]
    if ranks == 1:
        for count in counts:
            yield {"Train.accumulation": count}
        return
    # A bubble of at most a third, where there are rows enough for that.
    enough = [count for count in counts if count >= 2 * ranks and count % ranks == 0]
    for count in enough or [nearest_divisor(rows, 2 * ranks)]:
        yield {"Train.accumulation": 1, "Pipeline.microbatches": count}


# -- the reasons ----------------------------------------------------------------------------------


def with_reasons(ranked: list[Candidate], target: Target) -> list[Candidate]:
    """The candidates, best first, each with the sentence why it stands there."""
    best = ranked[0]
    return [
        dataclasses.replace(one, reason=_reason(one, best, target.chip.hbm_bytes)) for one in ranked
    ]


def _reason(one: Candidate, best: Candidate, hbm_bytes: int | None) -> str:
    time = one.price.time
    if not one.fits:
        return "the compiler cannot fit it, though the estimate could"
    room = human_bytes(one.price.memory.total if one.compiled_bytes is None else one.compiled_bytes)
    if hbm_bytes is not None:
        room += f" of {human_bytes(hbm_bytes)}"
    if time.seconds is None or best.price.time.seconds is None:
        return f"takes {room}; the chip's speed is not known, so memory alone decides"
    if one is best:
        return (
            f"the fastest that fits ({room}): {time.compute:.3g} s of computation, "
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
    if more <= 0 or slower < 0.0005:
        return f"as fast as the best, with {room}"
    return f"{slower:.1%} slower than the best: {more:.2g} s more {name} ({room})"
