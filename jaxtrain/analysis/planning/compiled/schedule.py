"""Simulate a compiled program's schedule: time of operations, exposed communication.

A scheduled program shows which operations are between a collective's start and its end. Each
operation has a cost in time. A collective occupies its links for some time, which overlaps with
those operations.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from jaxtrain.analysis.planning.compiled.collectives import (
    KINDS,
    BranchCounts,
    Collective,
    branch_count_of,
    collectives,
)
from jaxtrain.analysis.planning.compiled.costs import CONTAINERS, Cost, costs
from jaxtrain.analysis.planning.compiled.hlo import Instruction, Module, parse
from jaxtrain.analysis.planning.machines import links
from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.textbook.traffic import branch_counts
from jaxtrain.analysis.planning.timing.efficiency_factors import efficiency_of
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.settings import Config

# bfloat16 FLOPs per cycle of a device's matrix units: 128 x 128 multiply-adds each, 256 x 256 from
# v6e on. The published peaks then imply clocks of 1.05, 1.5, 1.75, 1.75 and 2.2 GHz.
PEAK = {"v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "7x": 2**19}
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
# Hand-written and library kernels, whose cost is not in the text.
_KERNEL = re.compile(
    r'custom_call_target="(?:tpu_custom_call|__cudnn\$fmha|__gpu\$xla\.gpu\.triton)'
)


@dataclasses.dataclass
class Scheduled:
    """One run of a program on one device; times are in the unit of its costs.

    Attributes:
      products: time of operations with matmuls, including everything fused into them.
      rest: time of all other operations.
      flops: FLOPs of `products`.
      kernels: runs of hand-written kernels, whose cost is not in the text.
      waits: number of collectives without overlap.
      waits_bytes: bytes of their results.
      waited: exposed communication: their time, and the part of others that is not overlapped.
      sent: time of all collectives.
      waited_at: instruction that launches a collective, itself or in what it calls -> its part of
        `waited`.
    """

    products: float = 0
    rest: float = 0
    flops: int = 0
    kernels: int = 0
    waits: int = 0
    waits_bytes: int = 0
    waited: float = 0
    sent: float = 0
    waited_at: dict[str, float] = dataclasses.field(default_factory=dict)


# An operation and its cost from shapes, if known -> its time; None if it takes no time.
Price = Callable[[Instruction, Cost | None], float | None]


def walk(
    text: str,
    price: Price,
    moved: Mapping[str, float],
    branch_counts: BranchCounts | None = None,
    *,
    kernel: float = 0,
) -> Scheduled:
    """Simulate one run of a program.

    Args:
      text: `compiled.as_text()`, scheduled.
      price: time of an operation.
      moved: instruction that launches a collective -> link time of the collective (`by_launch`).
      branch_counts: as in `collectives`: runs per step of the contents of branches.
      kernel: time of a run of a hand-written kernel.

    Raises:
      ValueError: a loop has no trip count.
    """
    module = parse(text)
    walked = _Walk(module, costs(module), price, moved, branch_counts, kernel)
    walked.run(module.entry, module.entry, 1, 1, "")
    return walked.found


def waits(
    found: Scheduled, of: list[Collective], seconds: Callable[[Collective], float]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (kind, axis) -> exposed time and total time of a program's collectives.

    Args:
      found: the simulated program.
      of: its collectives.
      seconds: as in `by_launch`; exposed time of one launch is divided in proportion to it.
    """
    moved, sums = by_launch(of, seconds), dict.fromkeys(((c.kind, c.axis) for c in of), (0.0, 0.0))
    part: dict[str, float] = {}  # exposed part of each second of a launch
    for here, waited in found.waited_at.items():
        under = [launch for launch in moved if _is_under(launch, here)]
        takes = sum(moved[launch] for launch in under)
        if takes:  # otherwise it only waits for busy links
            part |= dict.fromkeys(under, waited / takes)
    for one in of:
        waited, sent = sums[one.kind, one.axis]
        takes = seconds(one)
        sums[one.kind, one.axis] = (
            waited + part.get(one.launch, 0.0) * takes, sent + one.count * takes,
        )  # fmt: skip
    return sums


def _is_under(launch: str, here: str) -> bool:
    return launch == here or launch.startswith(f"{here}/")


def by_launch(found: list[Collective], seconds: Callable[[Collective], float]) -> dict[str, float]:
    """Return the launching instruction -> link time of everything that it moves."""
    moved: dict[str, float] = {}
    for one in found:
        moved[one.launch] = moved.get(one.launch, 0) + seconds(one)
    return moved


def seconds_of(target: Target, *, products: float, memory: float, thorough: bool) -> Price:
    """Return the function that computes the time of operations on a chip.

    A matmul takes its FLOPs at a fraction of the peak, or its bytes at a fraction of the memory
    bandwidth. On a TPU, the cycles that libtpu estimates replace the bytes, if it compiled with the
    full effort of a run: a quick compile uses the units two or three times worse. Other operations
    take their bytes, and on a TPU at most libtpu's cycles, which are up to twice too many
    (benchmarks/history/tpu.md).

    Args:
      target: the machine, with known peak and memory bandwidth.
      products: fraction of the peak that matmuls reach.
      memory: fraction of the memory bandwidth.
      thorough: whether a TPU's compiler used the full effort of a run.
    """
    chip = target.chip
    peak, bandwidth = chip.bf16_flops, chip.hbm_bandwidth
    assert peak is not None
    assert bandwidth is not None
    clock = peak / PEAK[chip.name] if chip.kind == "tpu" else None

    def price(one: Instruction, cost: Cost | None) -> float | None:
        estimate = ESTIMATE.search(one.attributes)
        if cost is None or one.opcode in KINDS or (clock is not None and estimate is None):
            return None
        cycles = int(estimate.group(1)) / clock if clock is not None and estimate else None
        bytes_seconds = cost.moved_bytes / (memory * bandwidth)
        if not cost.flops:
            return bytes_seconds if cycles is None else min(cycles, bytes_seconds)
        other = cycles if thorough and cycles is not None else bytes_seconds
        return max(cost.flops / (products * peak), other)

    return price


@dataclasses.dataclass
class _Walk:
    """Traversal of computations with the time at which the links are free again."""

    module: Module
    of_one: dict[str, Cost]
    price: Price
    moved: Mapping[str, float]
    branch_counts: BranchCounts | None
    kernel: float
    found: Scheduled = dataclasses.field(default_factory=Scheduled)

    def run(self, name: str, path: str, runs: int, scoped: int, op_name: str) -> float:
        """Return the time of one run of a computation, and add all its runs to `found`.

        Args:
          name: name of the computation.
          path: the calls that lead to it.
          runs: runs per step.
          scoped: runs per run of the scope that has its own count.
          op_name: of the caller, for instructions that lost their own.
        """
        now = free = 0.0
        ends: dict[str, float] = {}
        held: dict[str, float] = {}
        launches: dict[str, str] = {}
        for one in self.module.computations[name].instructions.values():
            here, label = f"{path}/{one.name}", one.op_name or op_name
            given = branch_count_of(self.branch_counts, label)
            times = runs if given is None else given * scoped
            if one.opcode.endswith(("-start", "-update")):
                launches[one.name] = next((launches[of] for of in one.operands if of in held), here)
                takes = self._links(here)
                self.found.sent += times * takes
                takes += sum(held.pop(of, 0.0) for of in one.operands)
                if not one.operands:  # the operand comes with the update
                    held[one.name] = takes
                elif takes:  # a copy has none
                    free = ends[one.name] = max(now, free) + takes
            elif one.opcode.endswith("-done"):
                end = max([now, *(ends.get(operand, 0.0) for operand in one.operands)])
                started = next((launches[of] for of in one.operands if of in launches), here)
                self._wait_at(started, times * (end - now))
                now = end
            elif one.opcode in CONTAINERS:
                now += self._time_call(one, here, runs, scoped, label)
            elif (price := self._takes(one, times)) is not None:
                now += price
            elif _waits(one):
                takes = self._links(here)
                self.found.sent += times * takes
                self.found.waits += times
                self.found.waits_bytes += times * sum(tensor.bytes for tensor in one.tensors)
                end = max(now, free) + takes
                self._wait_at(here, times * (end - now))
                now = free = end
        return now

    def _wait_at(self, launch: str, takes: float) -> None:
        self.found.waited += takes
        if takes:
            self.found.waited_at[launch] = self.found.waited_at.get(launch, 0.0) + takes

    def _time_call(self, one: Instruction, here: str, runs: int, scoped: int, label: str) -> float:
        """Return the time of the computations that an operation calls."""
        if one.opcode == "while":
            turns = self.module.trip_count(one)
            if turns is None:
                raise ValueError(f"the program does not give the trip count of {one.name}")
            within = scoped
            if branch_count_of(self.branch_counts, label) is not None:
                within *= turns
            bodies = [self.run(name, here, runs * turns, within, label) for name in one.called]
            return turns * sum(bodies)
        if one.opcode == "conditional" and branch_count_of(self.branch_counts, label) is None:
            # One branch is taken: assume the most expensive.
            uncounted = dataclasses.replace(self, found=Scheduled())
            name = max(one.called, key=lambda name: uncounted.run(name, here, 0, 0, label))
            return self.run(name, here, runs, scoped, label)
        took = [self.run(name, here, runs, scoped, label) for name in one.called]
        return max(took) if one.opcode == "conditional" else sum(took)

    def _takes(self, one: Instruction, times: int) -> float | None:
        """Return the time of an operation, and count it; None if it takes no time of its own."""
        cost = self.of_one.get(one.name)
        if _KERNEL.search(one.attributes) and (cost is None or cost.flops is None):
            self.found.kernels += times
            return self.kernel
        price = self.price(one, cost)
        if price is None:
            return None
        if cost is not None and cost.flops:
            self.found.products += times * price
            self.found.flops += times * cost.flops
        else:
            self.found.rest += times * price
        return price

    def _links(self, here: str) -> float:
        """Return the link time of an operation, including what it calls."""
        return sum(takes for launch, takes in self.moved.items() if _is_under(launch, here))


def _waits(one: Instruction) -> bool:
    """Return whether it is a collective that starts and ends in one operation without compute."""
    if one.opcode in KINDS:
        return True
    # An all-reduce of which each device keeps its shard.
    return one.opcode == "fusion" and any(
        name.startswith("all-reduce-scatter") for name in one.called
    )


# -- step time -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Step time of a compiled program by its schedule, in seconds.

    Attributes:
      compute: all operations.
      of_kernels: hand-written kernels, included in `compute`.
      waited: exposed communication.
      sent: all collectives.
      waits: (kind, mesh axis) -> its part of `waited`, and of `sent`.
    """

    compute: float
    of_kernels: float
    waited: float
    sent: float
    waits: dict[tuple[str, str], tuple[float, float]]


def simulate_schedule(
    config: Config,
    layout: Layout,
    target: Target,
    text: str,
    *,
    attention: float,
    thorough: bool,
) -> Schedule:
    """Simulate the schedule of a compiled step.

    Collectives are exposed unless they overlap with other operations, and each operation has its
    own cost (`schedule.seconds_of`).

    Args:
      config: the configuration, resolved for the target.
      layout: its layout.
      target: the machine.
      text: HLO text of the compiled program.
      attention: seconds of attention kernels in closed form, since programs do not show their cost.
      thorough: whether it was compiled with the full effort of a run.
    """
    sizes, shares, counts = (
        dict(layout.mesh.shape),
        efficiency_of(target),
        branch_counts(config, layout),
    )

    def link_seconds(one: Collective) -> float:
        return links.seconds(one.kind, one.axis, one.bytes, sizes, target, config.mesh.dcn)[0]

    of = collectives(text, sizes, counts)
    moved = by_launch(of, link_seconds)
    price = seconds_of(target, products=shares.products, memory=shares.memory, thorough=thorough)
    runs = walk(text, price, moved, counts).kernels
    found = walk(text, price, moved, counts, kernel=attention / runs if runs else 0.0)
    kernels = attention if runs else 0.0
    compute = found.products + found.rest + kernels
    return Schedule(compute, kernels, found.waited, found.sent, waits(found, of, link_seconds))
