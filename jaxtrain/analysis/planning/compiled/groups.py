"""Replica groups of a collective, and the mesh axes that they span.

A compiled program numbers devices 0, 1, ... in the order of `mesh.devices.flat`.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

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
