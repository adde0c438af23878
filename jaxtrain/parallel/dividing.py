"""Sizes that do not divide over the mesh: replicated, padded or rejected.

Layers need not divide over the stages of a pipeline (see `pipeline.stages`). Other sizes are split
over as many devices as divide them: fsdp in fewer and larger shards, with copies of each; embedding
tables are replicated on every stage. Where a TPU's tiles would be cut, another dimension is split.
Nothing is padded, so that a state has the same shapes on every mesh.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol

import jax
from flax import nnx

from jaxtrain.config.errors import nearest_multiple
from jaxtrain.parallel.axis_rules import ROWS, MeshAxes
from jaxtrain.parallel.sharding import (
    Layout,
    by_name,
    is_variable,
    logical_axes,
    own_axes,
    parts_of,
)

# Columns and rows of a TPU's tile; and the number of columns of a shard of embed below which its
# gradient is better scattered along the other dimension: of tables, which are summed whole at one
# tile of columns too, of an MLP's matrices, and of attention's, whose heads are less than a tile of
# columns where embed is rows.
_COLUMNS, _TILE_ROWS = 128, 8
_FEW_COLUMNS = {"vocab": _COLUMNS + 1, "mlp": _COLUMNS // 2, "head_dim": _COLUMNS + 1}
# Padding of rows to whole tiles adds at most this part of a shard, where embed is not split.
_PADDING = 1 / 32
# Axes that may come with embed and the rows of a matrix that fsdp shards: they multiply the rows.
_ROW_AXES = {"heads", "kv_heads", "qkv"}


class Sized(Protocol):
    """Protocol of settings with named sizes.

    Attributes:
      settings: logical axis -> the field that gives it its size.
    """

    settings: ClassVar[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Uneven:
    """Size that does not divide over the devices that share it.

    Attributes:
      path: of the parameter.
      axis: the dimension's logical axis.
      size: of the whole dimension.
      part: the mesh axes that would split it.
    """

    path: str
    axis: str
    size: int
    part: MeshAxes


def uneven(layout: Layout, shapes: nnx.State) -> Iterator[Uneven]:
    """Yield each dimension of parameters and moments that does not divide over its devices.

    Args:
      layout: how they are sharded.
      shapes: the parameters; shapes suffice.
    """
    for name, variable in by_name(shapes).items():
        axes = logical_axes(variable)
        for spec in (layout.parameter(axes), layout.moment(axes)):
            for axis, size, part in zip(axes, variable.get_value().shape, spec, strict=True):
                if axis != "layers" and size % layout.size(part):
                    yield Uneven(name, axis, size, part)


def largest_fsdp(layout: Layout, shapes: nnx.State) -> int:
    """Return the largest number of `fsdp` devices that divides every parameter.

    Tables that pipe splits too need not divide by both: see `replicate_uneven`.

    Args:
      layout: on a mesh with all of fsdp.
      shapes: as in `uneven`.
    """
    devices = layout.mesh.shape["fsdp"]
    sizes = dict(layout.mesh.shape) | {"pipe": 1}
    for share in sorted((d for d in range(1, devices + 1) if devices % d == 0), reverse=True):
        fewer = dataclasses.replace(layout, mesh=_abstract(sizes | {"fsdp": share}))
        if not any("fsdp" in parts_of(one.part) for one in uneven(fewer, shapes)):
            return share
    return 1


def replicate_uneven(layout: Layout, shapes: nnx.State) -> Layout:
    """Return the layout with replicated embedding tables where they do not divide: over fsdp and
    pipe on every stage, over tensor a vocabulary (see `gathering`).

    Args:
      layout: of the mesh.
      shapes: as in `uneven`.
    """
    found = list(uneven(layout, shapes))
    unstaged = {one.axis for one in found if "pipe" in parts_of(one.part)}
    # Matmuls on a grid need the vocabulary split like everything else.
    whole = {one.axis for one in found if one.axis == "vocab" and layout.tensor_layout == "1d"}
    return dataclasses.replace(
        layout, unstaged=frozenset(unstaged), whole=layout.whole | frozenset(whole)
    )


def in_tiles(layout: Layout, shapes: nnx.State) -> Layout:
    """Return the layout for TPUs: fsdp splits rows where its shards of embed are smaller than a
    tile.

    A TPU lays arrays out in tiles of 128 columns, and of shards of one or less its compiler may sum
    the gradient whole and slice it: twice the traffic of a reduce-scatter (tests/test_tiles.py). So
    where a device has few columns of embed, fsdp splits a table's vocabulary, a matrix's mlp, or of
    heads their head_dim, if that divides into whole tiles of rows except for 1/32, or for less than
    embed would be padded. What has none of them is unchanged. Replicas along data sum the shards,
    whichever dimension they split.

    Part of each head is as many rows as there are heads, with embed as the columns: [2048, 32, 64]
    on 64 devices is 32 rows of 2048 on each, and nothing is padded, while splitting embed gives 32
    rows of as many heads, of 64 columns each in a tile of 128.

    Args:
      layout: of the mesh.
      shapes: as in `uneven`.
    """
    if layout.mesh.size > layout.mesh.shape["fsdp"] * layout.mesh.shape["data"]:
        return layout  # tensor, stages and grids split these already
    able: dict[tuple[str, ...], bool] = {}
    for variable in jax.tree.leaves(shapes, is_leaf=is_variable):
        axes = own_axes(logical_axes(variable))
        named = set(axes) - _ROW_AXES
        if len(named) == 2 and named & set(ROWS) and named & {"embed", "vocab_embed"}:
            one = _better_by_rows(layout, axes, variable.get_value().shape[-len(axes) :])
            able[axes] = able.get(axes, True) and one
    return dataclasses.replace(layout, by_rows=frozenset(axes for axes in able if able[axes]))


def _better_by_rows(layout: Layout, axes: tuple[str, ...], shape: tuple[int, ...]) -> bool:
    fsdp, sizes = layout.mesh.shape["fsdp"], dict(zip(axes, shape, strict=True))
    (row,) = set(axes) & set(ROWS)
    columns = sizes.get("embed", sizes.get("vocab_embed", 0)) // fsdp
    each, rest = divmod(sizes[row], fsdp)
    rows = each * math.prod(size for axis, size in sizes.items() if axis in _ROW_AXES)
    # Embed is rows too where the other dimension is the columns.
    of_embed = max(_padding(columns, _TILE_ROWS), _padding(sizes[row], _COLUMNS))
    fits = rest == 0 and _padding(rows, _TILE_ROWS) <= max(_PADDING, of_embed)
    return columns < _FEW_COLUMNS[row] and fits


def _padding(size: int, tile: int) -> float:
    """Return the padding to whole tiles, as a fraction of the size."""
    return -size % tile / size if size else 0.0


def notes(layout: Layout, written: Mapping[str, int], model: Sized) -> Iterator[str]:
    """Yield a note for each array that is replicated more than configured.

    Args:
      layout: how everything is sharded.
      written: the mesh's sizes as the user wrote them.
      model: its settings.
    """
    fsdp, share = written["fsdp"], layout.mesh.shape["fsdp"]
    if share != fsdp:
        yield (
            f"Mesh.fsdp={fsdp}: the sizes of {type(model).__name__} are divisible by only "
            f"{share} of them: what Sharding.zero={layout.zero} shards is split into {share} "
            f"parts, each on {fsdp // share} devices, as with "
            f"Mesh.data={layout.mesh.shape['data']} and Mesh.fsdp={share}"
        )
    if "vocab" in layout.whole:
        tensor, name = layout.mesh.shape["tensor"], type(model).__name__
        size = vars(model)[model.settings["vocab"]]
        padded = size + -size % tensor
        yield (
            f"Mesh.tensor={tensor}: {name}.{model.settings['vocab']}={size} does not divide "
            f"over it: tables are replicated on its devices, and padded to {padded} rows in "
            f"matmuls; {padded} would split them"
        )
    for axis in sorted(layout.unstaged):
        setting = model.settings.get(axis, axis)
        yield (
            f"Mesh.pipe={written['pipe']}: {type(model).__name__}.{setting} does not divide "
            "over the stages, and tables along it are replicated on each of them"
        )


def _abstract(sizes: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    explicit = (jax.sharding.AxisType.Explicit,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=explicit)


def validate(
    model: Sized, layout: Layout, *, shapes: nnx.State, free: str | None = None
) -> Iterator[str]:
    """Yield an error message for each size of a model that does not divide over its devices.

    Args:
      model: its settings.
      layout: how its parameters and their moments are sharded.
      shapes: its parameters; shapes suffice.
      free: the axis of Mesh with size -1; None: none.
    """
    seen, settings = set(), model.settings
    for one in uneven(layout, shapes):
        cause = settings.get(one.axis, one.axis), one.size, one.part
        if cause not in seen:
            seen.add(cause)
            yield _sentence(model, settings.get(one.axis), one, layout, free)


def _sentence(
    model: Sized, setting: str | None, one: Uneven, layout: Layout, free: str | None
) -> str:
    axis, size, part, where = one.axis, one.size, one.part, one.path
    name, over = type(model).__name__, layout.size(part)
    mesh_axes = " x ".join(_format_axis(axis, layout) for axis in parts_of(part))
    if setting is None:
        return (
            f"{name}: {where} has {axis}={size}, which does not divide over {mesh_axes}={over}; "
            f"use a {mesh_axes} that divides {size}"
        )
    value = vars(model)[setting]
    of = "" if value == size else f" ({axis}={size} of {where})"
    fits = f"the nearest multiple is {nearest_multiple(value, over)}" if value == size else ""
    smaller = max(d for d in range(1, over + 1) if size % d == 0 and over % d == 0)
    set_to = f"or set {mesh_axes}={smaller}"
    if free in (None, *parts_of(part)):
        # The remaining devices would be idle, which is rejected next.
        replicas = layout.mesh.shape["data"] * (over // smaller)
        set_to += f" and Mesh.data={replicas}"
    way_out = "; ".join(part for part in (fits, set_to) if part)
    if layout.tensor_layout != "1d":
        tensor = math.prod(layout.mesh.shape.get(a, 1) for a in ("depth", "row", "tensor"))
        way_out += f" (Sharding.tensor_layout={layout.tensor_layout!r}, Mesh.tensor={tensor})"
    return f"{name}.{setting}={value}{of} does not divide over {mesh_axes}={over}; {way_out}"


def _format_axis(axis: str, layout: Layout) -> str:
    """Return the name of a mesh axis size as users write it; the sides of a grid are q."""
    on_a_grid = layout.tensor_layout != "1d" and axis in ("depth", "row", "tensor")
    return "q" if on_a_grid else f"Mesh.{axis}"
