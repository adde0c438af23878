"""Which sizes of a model do not divide over the mesh, and the nearest that do."""

import math
from collections.abc import Iterator
from typing import ClassVar, Protocol

import jax
from flax import nnx

from jaxtrain.config.errors import nearest_multiple
from jaxtrain.parallel.sharding import Layout, is_variable, logical_axes, parts_of
from jaxtrain.parallel.tables import MeshAxes


class Sized(Protocol):
    """Sizes that say which is which.

    Attributes:
      settings: logical axis -> the field that gives it its size.
    """

    settings: ClassVar[dict[str, str]]


def refuse(model: Sized, layout: Layout, *, shapes: nnx.State) -> Iterator[str]:
    """A sentence for each size of a model that does not divide over the devices that share it.

    Args:
      model: its settings.
      layout: where its parameters and their moments lie.
      shapes: its parameters, of which no array need be there.
    """
    seen, settings = set(), model.settings
    for path, variable in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_variable):
        axes = logical_axes(variable)
        for spec in (layout.parameter(axes), layout.moment(axes)):
            for axis, size, part in zip(axes, variable.get_value().shape, spec, strict=True):
                cause = settings.get(axis, axis), size, part
                if axis == "layers" or size % layout.size(part) == 0 or cause in seen:
                    continue  # layers that do not divide are spread over the stages unevenly
                seen.add(cause)
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                yield _sentence(model, settings.get(axis), axis, size, part, layout, where)


def _sentence(
    model: Sized,
    setting: str | None,
    axis: str,
    size: int,
    part: MeshAxes,
    layout: Layout,
    where: str,
) -> str:
    name, over = type(model).__name__, layout.size(part)
    mesh_axes = " x ".join(_written(axis, layout) for axis in parts_of(part))
    if setting is None:
        return (
            f"{name}: {where} has {axis}={size}, which does not divide over {mesh_axes}={over}; "
            f"use a {mesh_axes} that divides {size}"
        )
    value = vars(model)[setting]
    of = "" if value == size else f" ({axis}={size} of {where})"
    fits = f"the nearest multiple is {nearest_multiple(value, over)}" if value == size else ""
    smaller = max(d for d in range(1, over + 1) if size % d == 0 and over % d == 0)
    way_out = "; ".join(part for part in (fits, f"or set {mesh_axes}={smaller}") if part)
    if layout.tensor_layout != "1d":
        tensor = math.prod(layout.mesh.shape.get(a, 1) for a in ("depth", "row", "tensor"))
        way_out += f" (Sharding.tensor_layout={layout.tensor_layout!r}, Mesh.tensor={tensor})"
    return f"{name}.{setting}={value}{of} does not divide over {mesh_axes}={over}; {way_out}"


def _written(axis: str, layout: Layout) -> str:
    """How the user writes the size of an axis of the mesh; the sides of a grid are q."""
    on_a_grid = layout.tensor_layout != "1d" and axis in ("depth", "row", "tensor")
    return "q" if on_a_grid else f"Mesh.{axis}"
