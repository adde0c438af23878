"""Profile by layer and operation: trace and program text together, with rooflines."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.analysis.planning.compiled.costs import costs
from jaxtrain.analysis.planning.compiled.hlo import Module
from jaxtrain.analysis.profiling.ceilings import Ceilings
from jaxtrain.analysis.profiling.events import Timed
from jaxtrain.analysis.profiling.scopes import Origin, origin_of


@dataclasses.dataclass(frozen=True)
class Figures:
    """Time, FLOPs, bytes and roofline of a group of operations, for one step on one device.

    Attributes:
      runs: how often it ran.
      seconds: time it ran.
      share: of the step's time; all shares add up to 1 at most.
      flops: of matrix products and convolutions; None where a library's code is among them.
      moved_bytes: read and written at least.
      roofline: the least time that the device's ceilings allow, over `seconds`; above 1 where an
        accelerator's caches hold what is moved; None where a figure is not known.
      bound: "arithmetic" or "memory".
    """

    runs: float
    seconds: float
    share: float
    flops: int | None
    moved_bytes: int
    roofline: float | None
    bound: str | None


@dataclasses.dataclass(frozen=True)
class Operation:
    """Instruction of the compiled program, as it is scheduled: mostly a fusion."""

    name: str
    opcode: str
    origin: Origin
    figures: Figures


@dataclasses.dataclass(frozen=True)
class ScopePass:
    """Operations of one scope in one pass; the layers of a loop are counted together."""

    scope: str
    stage: str
    figures: Figures


@dataclasses.dataclass(frozen=True)
class Profile:
    """Profile of a step: its time by layer and by operation.

    Attributes:
      first, last: the steps that were looked at.
      step_seconds: mean time of one of them, as the host saw it, the profiler's own cost included.
      devices: of this process; figures are of one of them.
      device_kind: what they are.
      ceilings: what one can do at most.
      layers: slowest first.
      operations: slowest first.
    """

    first: int
    last: int
    step_seconds: float
    devices: int
    device_kind: str
    ceilings: Ceilings
    layers: tuple[ScopePass, ...]
    operations: tuple[Operation, ...]

    @property
    def elsewhere(self) -> float:
        """Fraction of the step in which no operation ran: waiting for the host or other devices."""
        return max(0.0, 1.0 - sum(one.figures.share for one in self.operations))

    def to_json(self) -> dict[str, Any]:
        """Return the object of operations.json; unknown values are null."""
        return {
            "steps": [self.first, self.last],
            "step_seconds": self.step_seconds,
            "devices": self.devices,
            "device_kind": self.device_kind,
            "ceilings": dataclasses.asdict(self.ceilings),
            "elsewhere": self.elsewhere,
            "layers": [
                {"scope": one.scope, "pass": one.stage, **dataclasses.asdict(one.figures)}
                for one in self.layers
            ],
            "operations": [
                {
                    "name": one.name,
                    "opcode": one.opcode,
                    "scope": one.origin.scope,
                    "pass": one.origin.stage,
                    "operation": one.origin.operation,
                    **dataclasses.asdict(one.figures),
                }
                for one in self.operations
            ],
        }


def profile(
    module: Module,
    times: Mapping[str, Timed],
    *,
    first: int,
    last: int,
    step_seconds: float,
    devices: int,
    device_kind: str,
    ceilings: Ceilings,
) -> Profile:
    """Combine times and costs into a profile.

    Args:
      module: the compiled step.
      times: of its operations, over all steps and local devices.
      first, last, step_seconds, devices, device_kind, ceilings: as in `Profile`.
    """
    of_one, names = costs(module), operation_names(module)
    runs = (last - first + 1) * devices
    busy = sum(time.seconds for time in times.values()) / runs
    # Two clocks: the profiler's may say a little more than the host's.
    whole = max(step_seconds, busy)
    found = []
    for name, time in times.items():
        cost, count = of_one[name], time.count / runs
        opcode, op_name = names[name]
        flops = None if cost.flops is None else round(cost.flops * count)
        moved_bytes, seconds = round(cost.moved_bytes * count), time.seconds / runs
        least = ceilings.least_seconds(flops, moved_bytes, count)
        figures = Figures(
            runs=count,
            seconds=seconds,
            share=seconds / whole,
            flops=flops,
            moved_bytes=moved_bytes,
            roofline=least / seconds if least is not None and seconds else None,
            bound=ceilings.bound(flops, moved_bytes, count),
        )
        found.append(Operation(name, opcode, origin_of(op_name), figures))
    found.sort(key=lambda one: -one.figures.seconds)
    return Profile(
        first=first,
        last=last,
        step_seconds=step_seconds,
        devices=devices,
        device_kind=device_kind,
        ceilings=ceilings,
        layers=_layers(found, ceilings, whole),
        operations=tuple(found),
    )


def operation_names(module: Module) -> dict[str, tuple[str, str]]:
    """Return opcode and scope path of each operation that runs by itself.

    What lost its path, as copies that the compiler adds do, has that of the loop or call around it.
    """
    found: dict[str, tuple[str, str]] = {}

    def walk(name: str, path: str) -> None:
        for one in module.computations[name].instructions.values():
            own = one.op_name or path
            found.setdefault(one.name, (one.opcode, own))
            if one.opcode != "fusion":
                for called in one.called:
                    walk(called, own)

    walk(module.entry, "")
    return found


def _layers(
    operations: Iterable[Operation], ceilings: Ceilings, whole: float
) -> tuple[ScopePass, ...]:
    groups: dict[tuple[str, str], list[Figures]] = collections.defaultdict(list)
    for one in operations:
        groups[one.origin.scope, one.origin.stage].append(one.figures)
    layers = []
    for (scope, stage), parts in groups.items():
        seconds = sum(part.seconds for part in parts)
        flops = _sum([part.flops for part in parts])
        # Each operation meets its own bound: the sums' bound would be lower.
        least = _sum([part.roofline and part.roofline * part.seconds for part in parts])
        moved_bytes = sum(part.moved_bytes for part in parts)
        figures = Figures(
            runs=sum(part.runs for part in parts),
            seconds=seconds,
            share=seconds / whole,
            flops=flops,
            moved_bytes=moved_bytes,
            roofline=None if least is None else least / seconds,
            bound=ceilings.bound(flops, moved_bytes, sum(part.runs for part in parts)),
        )
        layers.append(ScopePass(scope, stage, figures))
    return tuple(sorted(layers, key=lambda one: -one.figures.seconds))


def _sum(parts: list[Any]) -> Any:
    """Return the sum, or None if a value is unknown."""
    return None if None in parts else sum(parts)
