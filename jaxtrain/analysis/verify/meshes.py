"""Choice of meshes of at most eight devices that represent a mesh of any size."""

import itertools
import math
from typing import Any

from jaxtrain.parallel.mesh import MESH_AXES

DEVICES = 8
MAX_MESHES = 3

# Priority of axes if not all of them fit on one mesh, and of equally large axes for the remaining
# devices: axes that compile faster come first.
PRIORITY = ("pipe", "tensor", "fsdp", "context", "expert", "data")
GROW = ("fsdp", "data", "context", "expert", "tensor", "pipe")

MeshSizes = dict[str, int]


def choose_meshes(
    own: dict[str, float], *, tensor: int = 2, pipe: int = 2
) -> tuple[list[MeshSizes], list[tuple[str, str]]]:
    """Choose meshes of at most 8 devices with the axes above 1; also return the pairs left out.

    If all axes fit, there is one mesh. Otherwise there are up to three (four if `pipe` is odd), so
    that every axis is on one of them and as many pairs of axes as possible are combined. An axis is
    never larger than the user's.

    Args:
      own: the user's sizes; infinity for a size that depends on the number of devices.
      tensor: the smallest size above 1 of the axis `tensor`.
      pipe: the smallest size above 1 of the axis `pipe`; 3 divides no size of a shrunk model.
    """
    least = dict.fromkeys(PRIORITY, 2) | {"tensor": tensor, "pipe": pipe}
    wanted = [axis for axis in PRIORITY if own[axis] > 1]
    fitting = [
        axes
        for count in range(len(wanted), 0, -1)
        for axes in itertools.combinations(wanted, count)
        if math.prod(least[axis] for axis in axes) <= DEVICES
    ]
    missing = set(wanted), set(itertools.combinations(wanted, 2))
    meshes = []
    while len(meshes) < MAX_MESHES + pipe % 2 and any(missing):

        def gain(axes: tuple[str, ...], missing: Any = missing) -> tuple[int, int]:
            pairs = set(itertools.combinations(axes, 2))
            return len(pairs & missing[1]), len(set(axes) & missing[0])

        best = max(fitting, key=gain)  # the first one of a tie, by PRIORITY
        if gain(best) == (0, 0):
            break  # pairs that fit on no mesh
        meshes.append(_grow({axis: least[axis] for axis in best}, own, tensor))
        missing = missing[0] - set(best), missing[1] - set(itertools.combinations(best, 2))
    sizes = [dict.fromkeys(MESH_AXES, 1) | mesh for mesh in meshes or [{}]]
    return sizes, [pair for pair in itertools.combinations(wanted, 2) if pair in missing[1]]


def _grow(mesh: MeshSizes, own: dict[str, float], tensor: int) -> MeshSizes:
    """Assign the remaining devices to the axes that are largest in the user's configuration."""
    order = sorted(mesh, key=lambda axis: (-own[axis], GROW.index(axis)))
    for axis in order:
        if axis == "tensor" and tensor > 2:
            continue  # the next larger grid has more than 8 devices
        while 2 * math.prod(mesh.values()) <= DEVICES and 2 * mesh[axis] <= own[axis]:
            mesh[axis] *= 2
    return mesh
