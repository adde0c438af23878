"""Profile by layer and operation with rooflines, from the trace and the compiled program."""

import collections
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.analysis.planning.compiled.costs import costs
from jaxtrain.analysis.planning.compiled.hlo import Module
from jaxtrain.analysis.profiling.events import Timed
from jaxtrain.parallel.chips import chip_of

# -- ceilings: peak FLOP/s and memory bandwidth of one device --------------------------------------

_PRODUCT = 1024  # rows and columns of the square matrices in the measured matmul
# Elements that a copy reads and writes: sizes that fit into the caches of one core, sizes that fit
# into the caches of the machine, and one that fits into none.
_COPIED = (2**13, 2**16, 2**20, 2**24)
_TRIES = 10


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Roofline limits of a device (Williams et al. 2009, doi 10.1145/1498765.1498785).

    Attributes:
      flops: peak FLOP/s of matmuls in the compute dtype; None if unknown.
      bandwidth: memory bandwidth in bytes/s; None if unknown.
      source: the source of both figures, for messages.
      cached: (size, bytes/s) of operations whose bytes fit into caches, by increasing size and
        decreasing rate; empty if only the memory bandwidth is known.
    """

    flops: float | None
    bandwidth: float | None
    source: str
    cached: tuple[tuple[int, float], ...] = ()

    def rate(self, moved_bytes: float) -> float | None:
        """Return the peak bytes/s of an operation that moves `moved_bytes` in one run."""
        held = [rate for size, rate in self.cached if size <= moved_bytes] or [
            rate for _, rate in self.cached[:1]
        ]
        return held[-1] if held else self.bandwidth

    def least_seconds(self, flops: int | None, moved_bytes: int, runs: float = 1) -> float | None:
        """Return the roofline time of `runs` runs in seconds; None if a figure is unknown.

        Args:
          flops: FLOPs of all runs together.
          moved_bytes: bytes moved by all runs together.
          runs: the number of runs. The bytes of one run decide which cache they fit into.
        """
        rate = self.rate(moved_bytes / runs) if runs else self.bandwidth
        if flops is None or self.flops is None or rate is None:
            return None
        return max(flops / self.flops, moved_bytes / rate)

    def bound(self, flops: int | None, moved_bytes: int, runs: float = 1) -> str | None:
        """Return the bottleneck, "arithmetic" or "memory"; arguments as in `least_seconds`."""
        rate = self.rate(moved_bytes / runs) if runs else self.bandwidth
        if flops is None or self.flops is None or rate is None:
            return None
        return "arithmetic" if flops / self.flops > moved_bytes / rate else "memory"


def ceilings(device: jax.Device, dtype: str) -> Ceilings:
    """Return the peak rates of one device of a run.

    Args:
      device: a local device; a simulated device is measured alone, on the whole machine.
      dtype: the compute dtype.
    """
    chip = chip_of(device.device_kind)
    if chip is None:
        return Ceilings(None, None, f"the figures of {device.device_kind} are not known")
    if chip.kind == "cpu":
        return _measure(device, dtype)
    peak = chip.float32_flops if dtype == "float32" else chip.bf16_flops
    return Ceilings(peak, chip.hbm_bandwidth, f"published figures of {chip.name}")


def _measure(device: jax.Device, dtype: str) -> Ceilings:
    """Measure the best rates of matmuls and copies on this machine under its current load."""
    ones = jnp.ones((_PRODUCT, _PRODUCT), dtype, device=device)
    product = jax.jit(lambda x: x @ x).lower(ones).compile()
    flops = 2 * _PRODUCT**3 / _least(lambda _: product(ones), ones)
    rates = [(8 * count, _copy_rate(device, count)) for count in _COPIED]
    # A small array is never slower than a large one.
    cached = [(size, max(rate for _, rate in rates[i:])) for i, (size, _) in enumerate(rates)]
    source = f"measured here by {dtype} matmuls and x + 1; higher where data fit into caches"
    return Ceilings(flops, rates[-1][1], source, tuple(cached))


def _copy_rate(device: jax.Device, count: int) -> float:
    """Measure bytes/s of x + 1 on `count` float32 in place, repeated to hide the dispatch."""
    times = max(_COPIED[-1] // count // 8, 1)
    many = jnp.ones(count, np.float32, device=device)

    def add(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: x + 1, x)

    # In place: writing to a new array would include the time to allocate its pages.
    run = jax.jit(add, donate_argnums=0).lower(many).compile()
    return times * 2 * many.nbytes / _least(run, many)


def _least(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    least = math.inf
    for _ in range(_TRIES):
        start = time.perf_counter()
        x = run(x).block_until_ready()
        least = min(least, time.perf_counter() - start)
    return least


# -- layer and pass of an operation, from the named scopes of the model's code ---------------------
# The metadata of a compiled operation includes its path of named scopes, transformations and
# primitives, such as 'jit(train_step)/transpose(jvp(mlp))/norm/mul'.

Pass = Literal["forward", "backward", "recomputed", "update"]

OTHER = "other"  # outside all scopes: casts, filled arrays
LOOP = "loop"  # only in a loop: what it saves for each layer, and the residual stream
UPDATE = "optimizer"

_WRAPPED = re.compile(r"([\w\-]+)\((.*)\)")
# Wrappers around the name of a scope; other ones, like jit, are around the name of a function.
_TRANSFORMS = frozenset({"jvp", "transpose", "vmap", "remat", "checkpoint"})
_RECOMPUTED = "rematted_computation"
# Parts of a path that JAX adds itself.
_MACHINERY = re.compile(
    r"while|body|cond|scan|closed_call|eval_jaxpr|core_call|checkpoint|remat2?|shard_map|pjit"
    r"|jit|main"
    rf"|branch_\d+_fun|custom_(jvp|vjp)_call\w*|{_RECOMPUTED}"
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of an operation in the model's code.

    Attributes:
      scope: the names of scopes, outermost first, joined by "/": "mlp", "mlp/norm"; `OTHER` or
        `LOOP` if there is none.
      stage: the forward pass, the backward pass, recomputation in the backward pass, or the
        optimizer update.
      operation: the primitive, after the equation of an einsum.
    """

    scope: str
    stage: Pass
    operation: str

    @property
    def layer(self) -> str:
        """Outermost scope."""
        return self.scope.split("/")[0]


def origin_of(op_name: str) -> Origin:
    """Return the origin of a compiled operation, from the path in its metadata."""
    # Operations that the compiler merged have several paths, joined by ";".
    path = op_name.partition(";")[0]
    parts = list(_unwrap(path))
    names = [name for name in parts[:-1] if not _MACHINERY.fullmatch(name)]
    equation = names.pop() if names and "->" in names[-1] else ""
    operation = parts[-1] if parts else ""
    if operation.startswith("("):  # combined collectives: '(mlp/dot_general:loss/exp)'
        operation = "several"
    scope = "/".join(dict.fromkeys(name for name in names if "->" not in name))
    if scope.split("/")[0] == UPDATE:
        stage: Pass = "update"
    elif _RECOMPUTED in path:
        stage = "recomputed"
    else:
        stage = "backward" if "transpose(" in path else "forward"
    outside = LOOP if "while" in parts else OTHER
    return Origin(scope or outside, stage, f"{equation} {operation}".strip())


def _unwrap(path: str) -> Iterator[str]:
    """Yield the scope names of a path, without transformations and function names."""
    for part in _split(path):
        wrapped = _WRAPPED.fullmatch(part)
        if wrapped is None:
            yield part
        elif wrapped.group(1) in _TRANSFORMS:
            yield from _unwrap(wrapped.group(2))


def _split(path: str) -> Iterator[str]:
    """Split a path at the slashes outside parentheses."""
    depth, start = 0, 0
    for i, letter in enumerate(path):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            yield path[start:i]
            start = i + 1
    if path[start:]:
        yield path[start:]


# -- the profile -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Figures:
    """Time, FLOPs, bytes and roofline of a group of operations, for one step on one device.

    Attributes:
      runs: the number of runs.
      seconds: the run time.
      share: the fraction of the step time; the sum over all groups is at most 1.
      flops: FLOPs of matmuls and convolutions; None if the group includes library calls.
      moved_bytes: a lower bound of the bytes read and written.
      roofline: the minimum time by the device's peak rates, divided by `seconds`; above 1 if the
        bytes fit into an accelerator's caches; None if a figure is unknown.
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
    """Scheduled instruction of the compiled program, usually a fusion."""

    name: str
    opcode: str
    origin: Origin
    figures: Figures


@dataclasses.dataclass(frozen=True)
class ScopePass:
    """Operations of one scope in one pass; all layers of a scan are counted together."""

    scope: str
    stage: str
    figures: Figures


@dataclasses.dataclass(frozen=True)
class Profile:
    """Profile of a step: its time by layer and by operation.

    Attributes:
      first, last: the first and last profiled step.
      step_seconds: mean step time on the host, including the overhead of the profiler.
      devices: number of devices of this process; figures are per device.
      device_kind: the kind of the devices.
      ceilings: the peak rates of one device.
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
    """Combine measured times and computed costs into a profile.

    Args:
      module: the compiled step.
      times: the times of its operations, over all steps and local devices.
      first, last, step_seconds, devices, device_kind, ceilings: see `Profile`.
    """
    of_one, names = costs(module), operation_names(module)
    runs = (last - first + 1) * devices
    busy = sum(one.seconds for one in times.values()) / runs
    # The clocks differ: the profiler's time may be slightly longer than the host's.
    whole = max(step_seconds, busy)
    found = []
    for name, one in times.items():
        cost, count = of_one[name], one.count / runs
        opcode, op_name = names[name]
        flops = None if cost.flops is None else round(cost.flops * count)
        moved_bytes, seconds = round(cost.moved_bytes * count), one.seconds / runs
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
    """Return the opcode and scope path of each operation outside of fusions.

    An operation without a path, such as a copy added by the compiler, inherits the path of the
    surrounding loop or call.
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
        # Sum of the operations' own bounds; the bound of their sums would be lower.
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
