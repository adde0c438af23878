"""Candidates of a layout search: their costs, ranks, kinds of parallelism and reasons."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.search.variants import bindings_of
from jaxtrain.analysis.planning.textbook.memory import Memory
from jaxtrain.analysis.planning.timing.timing import StepTime
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.run.show.report import human_bytes
from jaxtrain.training.settings import Config


@dataclasses.dataclass(frozen=True)
class Price:
    """Estimated cost of a configuration on a target.

    Attributes:
      memory: memory of one device.
      time: time of a step.
      hbm_bytes: memory capacity of a device; None if unlimited.
      devices: number of devices of the configuration.
    """

    memory: Memory
    time: StepTime
    hbm_bytes: int | None
    devices: int

    @property
    def fits(self) -> bool:
        """Whether the estimate fits into a device's memory."""
        return self.hbm_bytes is None or self.memory.total <= self.hbm_bytes

    @property
    def seconds(self) -> float:
        """Step time; 0 if the chip's speed is unknown: then only memory is compared."""
        return self.time.seconds or 0.0


SHOWN, COMPILED = 10, 3
# Kinds of layouts, by the mesh axis that they use; FSDP (and data parallelism) is the remainder.
AXIS_OF = {"tensor": "tensor", "expert": "expert", "context": "context", "pipeline": "pipe"}
FSDP = "FSDP"
# The best layout of each kind is searched up to this multiple of the fastest layout's time.
FAR = 2.0
# The fastest layout that does not fit is searched up to this multiple of a device's memory.
NEAR = 2.0
# Predictions closer than this are ties: layouts of one model share most of their error.
TIE = 0.01
AS_FAST = f"as fast as any that fits within {TIE:.0%}, and the smallest of those"


def kinds_of(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the kinds of a layout by its mesh (axis to size): each model axis above 1, or FSDP."""
    return tuple(kind for kind, axis in AXIS_OF.items() if sizes.get(axis, 1) > 1) or (FSDP,)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration of a search.

    Attributes:
      changes: binding -> value, on top of the user's configuration.
      config: the configuration with these changes.
      price: its cost by closed forms.
      reason: a sentence that explains its rank.
      compiled_bytes: memory of a device as reported by the compiler; None if not compiled.
      fits: whether it fits, by the compiler if compiled, else by the estimate.
      rank: from 1; ties within the accuracy of the prediction share a rank.
      best_of: kinds of layouts (`kinds_of`) of which it is the best one found.
    """

    changes: Mapping[str, Any]
    config: Config
    price: Price
    reason: str = ""
    compiled_bytes: int | None = None
    fits: bool = True
    rank: int = 0
    best_of: tuple[str, ...] = ()

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis to size."""
        return {axis: getattr(self.config.mesh, axis) for axis in MESH_AXES}

    @property
    def over(self) -> int:
        """Bytes by which the estimate exceeds a device's memory; 0 or less if it fits."""
        room = self.price.hbm_bytes
        return 0 if room is None else self.price.memory.total - room

    @property
    def bindings(self) -> list[str]:
        """Arguments to paste after -b."""
        return bindings_of(self.changes)

    def to_json(self) -> dict[str, Any]:
        """Return the object for `plan --json`."""
        return {
            "rank": self.rank,
            "best_of": list(self.best_of),
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
    """Result of a layout search.

    Attributes:
      candidates: best first.
      priced: number of configurations that were priced.
      too_large: number of those that do not fit.
      slower: number of layouts pruned without a price: the lower bound from their matmuls, memory
        traffic and exposed communication already exceeds the time of all that are shown.
      rejected: reason -> number of configurations that `jaxtrain train` would reject.
      unfit: the fastest layout that does not fit with any number of microbatches and needs at most
        `NEAR` times the memory, with the most microbatches; None if none is faster than the best
        that fits.
      absent: kinds of layouts without one that fits within `FAR` times the best time.
      left: number of layouts not searched because of an interrupt.
      interrupted: whether it ended early (Ctrl-C, or one was fast enough): others may be better.
    """

    candidates: list[Candidate]
    priced: int
    too_large: int
    slower: int
    rejected: dict[str, int]
    unfit: Candidate | None = None
    absent: tuple[str, ...] = ()
    left: int = 0
    interrupted: bool = False

    @property
    def shown(self) -> list[Candidate]:
        """The best of each mesh, at most `SHOWN` of them and the best of each kind, and all
        compiled ones, ranked among themselves; the best `SHOWN` if there is only one mesh."""
        meshes = {tuple(one.mesh.values()) for one in self.candidates}
        if len(meshes) == 1:
            return self.candidates[:SHOWN]
        found: list[Candidate] = []
        for one in self.candidates:
            sizes = tuple(one.mesh.values())
            is_new = sizes in meshes and len(found) < SHOWN
            meshes.discard(sizes)
            if is_new or one.best_of or one.compiled_bytes is not None:
                found.append(one)
        ranks = [one.rank for one in found]
        return [dataclasses.replace(one, rank=1 + ranks.index(one.rank)) for one in found]

    def to_json(self) -> dict[str, Any]:
        """Return the object for `plan --json`."""
        unfit = None
        if self.unfit is not None:
            unfit = {**self.unfit.to_json(), "over_bytes": self.unfit.over}
        return {
            "candidates": [one.to_json() for one in self.shown],
            "search": {
                "priced": self.priced,
                "too_large": self.too_large,
                "slower": self.slower,
                "refused": self.rejected,
                "best_that_does_not_fit": unfit,
                "absent": list(self.absent),
                "left": self.left,
                "interrupted": self.interrupted,
            },
        }


def with_kinds(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates, best first, each with the kinds of which it is the first that fits."""
    seen: set[str] = set()
    found = []
    for one in candidates:
        new = tuple(kind for kind in kinds_of(one.mesh) if one.fits and kind not in seen)
        seen.update(new)
        found.append(dataclasses.replace(one, best_of=new))
    return found


def order_of(candidate: Candidate) -> tuple[float, int, list[str]]:
    """Return the key by which candidates are sorted: seconds, then bytes, then bindings."""
    return candidate.price.seconds, candidate.price.memory.total, candidate.bindings


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort the candidates, fastest first.

    Ties within TIE of the fastest of them are sorted by memory, smallest first.
    """
    found = assign_ranks(sorted(candidates, key=order_of))
    return sorted(found, key=lambda one: (one.rank, one.price.memory.total, *order_of(one)))


def assign_ranks(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Assign ranks in this order: 1, or 1, 1, 3 if the second is within TIE of the first."""
    found: list[Candidate] = []
    rank, first = 1, candidates[0].price.seconds
    for position, one in enumerate(candidates):
        if abs(one.price.seconds / (first or 1.0) - 1) > TIE:
            rank, first = position + 1, one.price.seconds
        found.append(dataclasses.replace(one, rank=rank))
    return found


def with_reasons(ranked: Sequence[Candidate], target: Target) -> list[Candidate]:
    """Return the candidates, best first, with their kinds and a sentence that explains the rank."""
    best, fastest = ranked[0], min(one.price.seconds for one in ranked)
    return with_kinds(
        [
            dataclasses.replace(one, reason=_reason(one, best, fastest, target.chip.hbm_bytes))
            for one in ranked
        ]
    )


def _reason(one: Candidate, best: Candidate, fastest: float, hbm_bytes: int | None) -> str:
    time = one.price.time
    if not one.fits:
        return "the compiled program is too large, although the estimate fits"
    room = human_bytes(one.price.memory.total if one.compiled_bytes is None else one.compiled_bytes)
    if hbm_bytes is not None:
        room += f" of {human_bytes(hbm_bytes)}"
    if time.seconds is None or best.price.time.seconds is None:
        return f"takes {room}; the chip's speed is not known, so memory alone decides"
    if one is best:
        which = "the fastest that fits" if one.price.seconds <= fastest else AS_FAST
        return (
            f"{which} ({room}): {time.compute:.3g} s of computation, "
            f"{time.exposed:.2g} s of exposed communication, {time.bubble:.2g} s of "
            "pipeline bubble"
        )
    pieces = {
        "computation, recomputation and update": (time.compute or 0)
        - (best.price.time.compute or 0),
        "exposed communication": (time.exposed or 0) - (best.price.time.exposed or 0),
        "pipeline bubble": (time.bubble or 0) - (best.price.time.bubble or 0),
    }
    name, more = max(pieces.items(), key=lambda piece: piece[1])
    slower = time.seconds / best.price.time.seconds - 1
    if one.rank == best.rank or more <= 0 or slower < 0.0005:
        return f"as fast as the best within {TIE:.0%} ({slower:+.1%}), with {room}"
    return f"{slower:.1%} slower than the best: {more:.2g} s more {name} ({room})"
