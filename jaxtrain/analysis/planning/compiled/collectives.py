"""Collectives of a compiled train step: kind, mesh axis, payload, and how often each runs."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax

from jaxtrain.analysis.planning.compiled.groups import (
    mesh_axes,
    replica_groups,
    source_target_pairs,
)
from jaxtrain.analysis.planning.compiled.hlo import (
    Computation,
    Instruction,
    Module,
    Tensor,
    parse,
)

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# A named scope -> runs per step; or a function of the op_name, which returns None if unknown.
BranchCounts = Mapping[str, int] | Callable[[str], int | None]

# The TPU compiler emits a reduce-scatter as a fusion with this name, of an all-reduce and slices.
_TPU_REDUCE_SCATTER = "all-reduce-scatter"
# The TPU compiler may spread one gather over several fusions to overlap it with them: it occurs in
# each of them with the same chain and channel.
_CHAIN = re.compile(r'chain_id="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
# How many of the layers take a branch: the scope named by `nn.execution.branch_scope`.
_TAKEN = re.compile(r"(?<!\w)taken_(\d+)_of_(\d+)(?!\w)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array moved by a collective; the compiler may launch several arrays together.

    Attributes:
      kind: one of KINDS.
      axis: the mesh axis, or several joined with "+".
      count: runs per step, with loops multiplied out.
      bytes: payload bytes of one device per run (the operand, not the result).
      dtype: dtype of the operand in XLA's notation: "f32", "bf16", ...
      shape: shape of the operand.
      op_name: the path of named scopes and primitives that it came from.
      launch: the instruction, shared by arrays that are launched together.
      parts: the arrays that the compiler concatenated in it; empty if it is a single one.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    op_name: str
    launch: str
    parts: tuple[Tensor, ...] = ()

    @property
    def every(self) -> int:
        """Number of steps per execution: 1, since a compiled collective runs in every step."""
        return 1

    @property
    def total_bytes(self) -> int:
        """Payload bytes of one device during the step."""
        return self.count * self.bytes


def collectives(
    text: str,
    mesh: jax.sharding.Mesh | Mapping[str, int],
    branch_counts: BranchCounts | None = None,
) -> list[Collective]:
    """Return every array that a compiled program's collectives move between devices.

    Args:
      text: `compiled.as_text()`, from a TPU or GPU compile: the CPU backend rewrites collectives.
      mesh: the mesh of the program, or its axes' sizes, outermost first.
      branch_counts: runs per step of a named scope, which replace the trip counts of the loops
        around it; loops inside it multiply. Otherwise, a branch of a conditional counts as always
        taken, or as often as its scope says (`nn.execution.branch_scope`).

    Raises:
      ValueError: a loop around a collective has no trip count.
    """
    sizes = dict(mesh.shape) if isinstance(mesh, jax.sharding.Mesh) else dict(mesh)
    return list(_Walk(parse(text), sizes, branch_counts).run())


def summarize(found: Iterable[Collective]) -> list[dict[str, str | int]]:
    """Return rows {kind, axis, count, bytes} of a step: launches, payload bytes of one device."""
    launches: dict[tuple[str, str], dict[str, int]] = {}
    total: dict[tuple[str, str], int] = {}
    for one in found:
        key = (one.kind, one.axis)
        launches.setdefault(key, {})[one.launch] = one.count
        total[key] = total.get(key, 0) + one.total_bytes
    return [
        {"kind": kind, "axis": axis, "count": sum(runs.values()), "bytes": total[kind, axis]}
        for (kind, axis), runs in sorted(launches.items())
    ]


@dataclasses.dataclass(frozen=True)
class _Walk:
    module: Module
    sizes: Mapping[str, int]
    branch_counts: BranchCounts | None

    def run(self) -> Iterator[Collective]:
        entry = self.module.computations[self.module.entry]
        yield from self.computation(entry, 1, 1, "", entry.name, {})

    def computation(
        self,
        inside: Computation,
        count: int | None,
        scoped: int | None,
        op_name: str,
        path: str,
        chains: dict,
    ) -> Iterator[Collective]:
        """Yield the collectives of a computation that runs `count` times per step.

        Args:
          inside: the computation.
          count: runs per step; None if a loop has no trip count.
          scoped: runs per run of the scope that has a count, as `count`.
          op_name: of the caller, for instructions that lost their own.
          path: the calls that lead here: one computation may have several callers.
          chains: the gathers seen so far that are spread over fusions (see _CHAIN).
        """
        for one in inside.instructions.values():
            name = one.op_name or op_name
            kind = one.opcode.removesuffix("-start")
            if kind in KINDS:
                chain = _CHAIN.search(one.attributes)
                if chain:
                    channel = _CHANNEL.search(one.attributes)
                    key = (chain.group(1), channel and channel.group(1))
                    if chains.setdefault(key, one.name) != one.name:
                        continue
                if kind == "all-reduce" and inside.name.startswith(_TPU_REDUCE_SCATTER):
                    kind = "reduce-scatter"
                given = branch_count_of(self.branch_counts, name)
                runs = count if given is None else _times(given, scoped)
                taken = _TAKEN.search(name)
                if taken and runs is not None:
                    runs = round(runs * int(taken.group(1)) / int(taken.group(2)))
                yield from self.collective(kind, inside, one, runs, name, f"{path}/{one.name}")
                continue
            runs, within = count, scoped
            if one.opcode == "while":
                trips = self.module.trip_count(one)
                runs = _times(count, trips)
                within = (
                    scoped
                    if branch_count_of(self.branch_counts, name) is None
                    else _times(scoped, trips)
                )
            for called in one.called:
                below = chains if one.opcode == "fusion" else {}
                yield from self.computation(
                    self.module.computations[called],
                    runs,
                    within,
                    name,
                    f"{path}/{one.name}",
                    below,
                )

    def collective(
        self,
        kind: str,
        inside: Computation,
        one: Instruction,
        count: int | None,
        op_name: str,
        launch: str,
    ) -> Iterator[Collective]:
        pairs = kind == "collective-permute"
        if pairs:
            groups = source_target_pairs(one.attributes)
        else:
            groups = replica_groups(one.attributes, _product(self.sizes))
        axis = mesh_axes(groups, self.sizes, pairs=pairs)
        if not axis:
            return  # groups of one device: no traffic
        if count is None:
            raise ValueError(f"a loop around {one.name} ({op_name}) does not give its trip count")
        for operand in one.operands:
            parts = tuple(self.module.concatenated_operands(inside, operand))
            for tensor in inside.instructions[operand].tensors:
                yield Collective(
                    kind=kind,
                    axis=axis,
                    count=count,
                    bytes=tensor.bytes,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    op_name=op_name,
                    launch=launch,
                    parts=parts,
                )


def branch_count_of(branch_counts: BranchCounts | None, op_name: str) -> int | None:
    """Return the runs per step of this path of scopes, if given; else None."""
    if branch_counts is None:
        return None
    if not isinstance(branch_counts, Mapping):
        return branch_counts(op_name)
    for scope, count in branch_counts.items():
        # Whole names: "send_1" does not match "send_12", but matches "transpose(jvp(send_1))".
        if re.search(rf"(?<!\w){re.escape(scope)}(?!\w)", op_name):
            return count
    return None


def _times(count: int | None, trips: int | None) -> int | None:
    """Return the runs of a loop's body; None if either is unknown."""
    return None if count is None or trips is None else count * trips


def _product(sizes: Mapping[str, int]) -> int:
    product = 1
    for size in sizes.values():
        product *= size
    return product
