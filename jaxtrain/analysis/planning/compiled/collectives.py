"""Collectives of a compiled train step: kind, mesh axis, payload, and how often each runs."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np

from jaxtrain.analysis.planning.compiled.hlo import (
    Computation,
    Instruction,
    Module,
    Tensor,
    parse,
)

# -- replica groups of a collective, and the mesh axes that they span ------------------------------
# A compiled program numbers devices 0, 1, ... in the order of `mesh.devices.flat`.

Groups = list[list[int]]

_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_USED_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def replica_groups(attributes: str, device_count: int) -> Groups:
    """Parse the replica groups of a collective from the attributes of its instruction.

    There are three notations: lists `{{0,1},{2,3}}`, where an empty list means one group of all
    devices; an iota that is reshaped, transposed and split into rows, `[2,4]<=[4,2]T(1,0)`; and
    axes of a compiler-defined mesh, `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}`, where
    `'b':(2)2` is the part of `b` of size 2 inside the outermost 2.

    Raises:
      ValueError: the attributes have no groups.
    """
    if match := _MESH.search(attributes):
        sizes = {name: int(size) for name, size in _MESH_AXIS.findall(match.group(1))}
        return _along_mesh(sizes, match.group(2), match.group(3))
    if match := _IOTA.search(attributes):
        return _iota(match.group(1)).tolist()
    if match := _LISTS.search(attributes):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", match.group(1))]
        return groups or [list(range(device_count))]
    raise ValueError(f"no replica groups in {attributes[:200]!r}")


def source_target_pairs(attributes: str) -> Groups:
    """Parse the [source, target] pairs of a collective-permute.

    Raises:
      ValueError: the attributes have no pairs.
    """
    match = _PAIRS.search(attributes)
    if match is None:
        raise ValueError(f"no source_target_pairs in {attributes[:200]!r}")
    return [_numbers(pair) for pair in re.findall(r"\{([\d,]*)\}", match.group(1))]


def mesh_axes(groups: Groups, sizes: Mapping[str, int], *, pairs: bool = False) -> str:
    """Return the mesh axes that groups span, joined with "+" in the mesh's order.

    Args:
      groups: groups of communicating devices.
      sizes: the mesh's axes, outermost first.
      pairs: whether these are pairs of a permute, which need not cover the axis.

    Returns:
      "fsdp", "data+fsdp", "" for groups of one device, or "part of ..." if groups cover only some
      of the devices along those axes.
    """
    used = [group for group in groups if len(set(group)) > 1]
    if not used:
        return ""
    varies = [False] * len(sizes)
    for group in used:
        coordinates = np.unravel_index(np.array(group), tuple(sizes.values()))
        varies = [v or len(np.unique(p)) > 1 for v, p in zip(varies, coordinates, strict=True)]
    names = [name for name, v in zip(sizes, varies, strict=True) if v]
    covered = all(len(group) == math.prod(sizes[name] for name in names) for group in groups)
    joined = "+".join(names)
    return joined if covered or pairs else f"part of {joined}"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _iota(text: str) -> np.ndarray:
    """Parse `[2,4]<=[4,2]T(1,0)`: arange, reshaped to [4,2], transposed, reshaped to [2,4]."""
    shape, source = text.split("<=")
    return _transpose(source).reshape(_numbers(shape.strip("[]")))


def _transpose(text: str) -> np.ndarray:
    """Parse `[4,2]T(1,0)`: arange, reshaped to [4,2] and transposed."""
    dims, _, order = text.partition("T")
    dims = _numbers(dims.strip("[]"))
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(_numbers(order.strip("()"))) if order else ids


def _along_mesh(sizes: dict[str, int], device_ids: str | None, used: str) -> Groups:
    """Return the groups along some axes (or parts of axes) of the compiler's mesh."""
    whole = math.prod(sizes.values())
    if device_ids is None:
        ids = np.arange(whole)
    elif "T" in device_ids or device_ids.startswith("[") and "<=" not in device_ids:
        ids = _transpose(device_ids)
    else:
        ids = np.array(_numbers(device_ids))
    parts = {name: [(1, size)] for name, size in sizes.items()}  # before, size
    chosen = []
    for name, before, size in _USED_AXIS.findall(used):
        if before:
            before, size = int(before), int(size)
            after = sizes[name] // (before * size)
            parts[name] = [(1, before), (before, size), (before * size, after)]
            chosen.append((name, before))
        else:
            chosen.append((name, 1))
    dims = [(name, before, size) for name in sizes for before, size in parts[name]]
    along = [i for i, (name, before, _) in enumerate(dims) if (name, before) in chosen]
    across = [i for i in range(len(dims)) if i not in along]
    ids = ids.reshape([size for _, _, size in dims]).transpose([*across, *along])
    return ids.reshape(-1, math.prod(dims[i][2] for i in along)).tolist()


# -- collectives of a step -------------------------------------------------------------------------

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
