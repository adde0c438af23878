"""Walk through a compiled program's schedule: time of operations, exposed communication.

A scheduled program says which operations stand between a collective's start and its end. Each
operation has a price; a collective takes its links for so long, and what runs beside it hides it.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from jaxtrain.analysis.planning.compiled.collectives import (
    KINDS,
    BranchCounts,
    Collective,
    branch_count_of,
)
from jaxtrain.analysis.planning.compiled.costs import CONTAINERS, Cost, costs
from jaxtrain.analysis.planning.compiled.hlo import Instruction, Module, parse
from jaxtrain.analysis.planning.machines.targets import Target

# bfloat16 FLOPs of a device's matrix units in one cycle: 128 x 128 multiply-adds each, 256 x 256
# from v6e on. With the published peaks that makes clocks of 1.05, 1.5, 1.75, 1.75 and 2.2 GHz.
PEAK = {"v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "7x": 2**19}
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
# What is computed in a hand-written kernel or a library's, whose cost no text shows.
_KERNEL = re.compile(
    r'custom_call_target="(?:tpu_custom_call|__cudnn\$fmha|__gpu\$xla\.gpu\.triton)'
)


@dataclasses.dataclass
class Scheduled:
    """One run of a program on one device; times in the unit of its prices.

    Attributes:
      products: of the operations that multiply matrices, with all that is fused into them.
      rest: of all others.
      flops: of `products`.
      kernels: runs of hand-written kernels, of which the text says nothing.
      waits: collectives that nothing else runs beside.
      waits_bytes: of their results.
      waited: what these take, and what others take longer than what runs beside them.
      sent: what all collectives take.
      waited_at: where a collective is launched, or what it calls launches it -> its part of
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


# An operation and its cost by shapes, where it has one -> its price; None: it takes no time.
Price = Callable[[Instruction, Cost | None], float | None]


def walk(
    text: str,
    price: Price,
    moved: Mapping[str, float],
    branch_counts: BranchCounts | None = None,
    *,
    kernel: float = 0,
) -> Scheduled:
    """What one run of a program takes.

    Args:
      text: `compiled.as_text()`, scheduled.
      price: of an operation.
      moved: where a collective is launched -> what the links need for it (`by_launch`).
      branch_counts: as of `collectives`: runs per step of what stands in branches.
      kernel: of a run of a hand-written kernel.

    Raises:
      ValueError: a loop does not say how often it turns.
    """
    module = parse(text)
    walked = _Walk(module, costs(module), price, moved, branch_counts, kernel)
    walked.run(module.entry, module.entry, 1, 1, "")
    return walked.found


def waits(
    found: Scheduled, of: list[Collective], seconds: Callable[[Collective], float]
) -> dict[tuple[str, str], tuple[float, float]]:
    """(kind, axis) -> what a program's collectives of it are waited for, and take.

    Args:
      found: of the program.
      of: its collectives.
      seconds: as in `by_launch`: arrays that are launched together wait by it.
    """
    moved, sums = by_launch(of, seconds), dict.fromkeys(((c.kind, c.axis) for c in of), (0.0, 0.0))
    part: dict[str, float] = {}  # of each second that a launch takes
    for here, waited in found.waited_at.items():
        under = [launch for launch in moved if _is_under(launch, here)]
        takes = sum(moved[launch] for launch in under)
        if takes:  # what moves nothing waits for the links alone
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
    """Where a program launches a collective -> what the links need for all that it moves."""
    moved: dict[str, float] = {}
    for one in found:
        moved[one.launch] = moved.get(one.launch, 0) + seconds(one)
    return moved


def seconds_of(target: Target, *, products: float, memory: float, thorough: bool) -> Price:
    """The price of operations on a chip.

    A product takes its FLOPs at a share of the peak, or its bytes at a share of the memory's
    bandwidth; in place of the bytes a TPU's has the cycles that libtpu expects, where it compiled
    as for a run: what it compiles quickly fills the units two or three times worse. Of other
    operations the bytes count, and on a TPU no more than libtpu's cycles, which are up to twice too
    many (benchmarks/history/tpu.md).

    Args:
      target: the machine, of which the peak and the memory are known.
      products: the share of the peak that products reach.
      memory: the share of the memory's bandwidth.
      thorough: whether a TPU's compiler took as long as for a run.
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
    """Goes through computations with the time at which the links are free again."""

    module: Module
    of_one: dict[str, Cost]
    price: Price
    moved: Mapping[str, float]
    branch_counts: BranchCounts | None
    kernel: float
    found: Scheduled = dataclasses.field(default_factory=Scheduled)

    def run(self, name: str, path: str, runs: int, scoped: int, op_name: str) -> float:
        """How long one run of a computation takes that runs so often; counts it in `found`.

        Args:
          name: of the computation.
          path: the calls that lead to it.
          runs: a step.
          scoped: for each run of the scope that has a count of its own.
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
                if not one.operands:  # what is moved comes with the update
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
        """How long what an operation calls takes."""
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
            # One branch is taken: the most expensive.
            uncounted = dataclasses.replace(self, found=Scheduled())
            name = max(one.called, key=lambda name: uncounted.run(name, here, 0, 0, label))
            return self.run(name, here, runs, scoped, label)
        took = [self.run(name, here, runs, scoped, label) for name in one.called]
        return max(took) if one.opcode == "conditional" else sum(took)

    def _takes(self, one: Instruction, times: int) -> float | None:
        """The price of an operation, which it counts; None: it takes no time of its own."""
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
        """Of what an operation launches itself, or in what it calls."""
        return sum(takes for launch, takes in self.moved.items() if _is_under(launch, here))


def _waits(one: Instruction) -> bool:
    """Whether it is a collective that starts and ends in one operation and computes nothing."""
    if one.opcode in KINDS:
        return True
    # An all-reduce of which each device keeps its part.
    return one.opcode == "fusion" and any(
        name.startswith("all-reduce-scatter") for name in one.called
    )
