"""Local gradient accumulation: gradients are summed over the mesh once per step.

A device's gradient of its own rows, and of its own positions in them, is summed over microbatches
without communication along `data`, `expert` and `context` (and along `fsdp`, if that axis
does not shard gradients). One exchange follows: an all-reduce, or, if a device updates only a
shard, a reduce-scatter along `fsdp` and an all-reduce of the shard along the others (arXiv
1910.02054, section 7). Parameters that an axis splits, such as experts along `expert`, are not
summed over it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import layout as in_memory
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.axis_rules import MeshAxes
from jaxtrain.parallel.sharding import (
    Layout,
    along,
    current_layout,
    is_variable,
    logical_axes,
    on_each_device,
    parts_of,
    without,
)
from jaxtrain.training.objectives.losses import Sums

# A device's gradients, sums and new statistics, from its rows of the batch.
OfRows = Callable[..., tuple[nnx.State, Sums, nnx.State]]


def reduce_once_axes(layout: Layout, passes: int) -> tuple[str, ...]:
    """Return the mesh axes over which gradients are reduced once per step; others of the batch,
    once a pass.

    With one pass there are none if a whole gradient is all-reduced, which overlaps
    with the backward pass of the previous layer. Left to the compiler, a gradient that is scattered
    along one axis and summed along another is all-reduced over both.

    Args:
      layout: the step's.
      passes: forward and backward passes in a step: microbatches.
    """
    if "data" in layout.manual:
        return ()  # replicas with their own exchange: see `Exchange`
    of_batch = [name for part in layout.activation(("batch", "length")) for name in parts_of(part)]
    # A grid's rows of devices split the batch too: their matmuls sum over them. Several
    # grids are like replicas.
    replicas = (
        "data",
        "expert",
        "context",
        *(("depth",) if layout.tensor_layout == "2.5d" else ()),
    )
    own = [axis for axis in of_batch if axis in (*replicas, "fsdp")]
    axes = tuple(axis for axis in own if axis != "fsdp" or layout.zero < 2)
    scatters = layout.tensor_layout != "1d" or (layout.zero >= 1 and layout.mesh.shape["fsdp"] > 1)
    return axes if passes > 1 or scatters else ()


def local_gradients(
    axes: tuple[str, ...], layout: Layout, of_rows: OfRows, batch: Batch, *arguments: Any
) -> tuple[nnx.State, Sums, nnx.State]:
    """Return each device's own gradients [k, ...], sums over all rows, and the new statistics.

    Args:
      axes: from `reduce_once_axes`; k devices along those that do not split the parameter.
      layout: the step's.
      of_rows: (layout, rows, *arguments) -> gradients, sums and statistics of these rows alone; the
        statistics are those of the whole batch (see `sharding.mean_over_batch`).
      batch: the global batch, sharded like activations.
      arguments: pytrees of arrays that are replicated along the axes, or split:
        first the parameters, trained and frozen, then the statistics.
    """

    def one(rows: Batch, *arguments: Any) -> tuple[nnx.State, Sums, nnx.State]:
        inside = current_layout()
        assert inside is not None, "along() has made one current"
        inside = dataclasses.replace(inside, one_batch=frozenset(axes))
        rows = jax.tree.map(lambda x: x.squeeze(0), rows)
        with inside.current():
            grads, sums, statistics = of_rows(inside, rows, *arguments)
        grads, sums = jax.tree.map(lambda x: x[None], (grads, sums))
        return grads, sums, statistics

    (params, _), statistics = arguments[:2]
    specs = jax.tree.map(
        lambda v: v.replace(_of_device(axes, layout, logical_axes(v))), params, is_leaf=is_variable
    )
    kept = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, statistics)
    grads, sums, statistics = along(
        axes, one, _rows_of_devices(axes, layout, batch), *arguments,
        out_specs=(specs, P(axes), kept),
    )  # fmt: skip
    return grads, jax.tree.map(lambda x: x.sum(0), sums), statistics


def _of_device(axes: tuple[str, ...], layout: Layout, names: tuple[str, ...]) -> P:
    """Return the PartitionSpec of a gradient [k, ...] with these logical axes."""
    return P(_summed_axes(axes, layout, names), *layout.gradient(names))


def _summed_axes(axes: tuple[str, ...], layout: Layout, names: tuple[str, ...]) -> MeshAxes:
    """Return those of the mesh axes along which devices have gradients of the same parameters."""
    return without(axes, {axis for part in layout.gradient(names) for axis in parts_of(part)})


def _rows_of_devices(axes: tuple[str, ...], layout: Layout, batch: Batch) -> Batch:
    """Return the batch [k, rows, ...], with k split over the axes that split rows; rows are not
    moved."""
    over = parts_of(layout.activation(("batch",))[0])
    outer, inner = without(over, set(over) - set(axes)), without(over, axes)
    order = [over.index(axis) for axis in (*parts_of(outer), *parts_of(inner))]
    sizes, k = [layout.size(axis) for axis in over], layout.size(outer)

    def one(x: jax.Array) -> jax.Array:
        rest = jax.typeof(x).sharding.spec[1:]
        shape = (*sizes, x.shape[0] // math.prod(sizes), *x.shape[1:])
        x = jax.lax.reshape(x, shape, out_sharding=P(*over, None, *rest))
        x = x.transpose(*order, *range(len(order), x.ndim))
        shape = (k, math.prod(x.shape[: len(over) + 1]) // k, *x.shape[len(over) + 1 :])
        return jax.lax.reshape(x, shape, out_sharding=P(outer, inner, *rest))

    return jax.tree.map(one, batch)


def sum_gradients(axes: tuple[str, ...], layout: Layout, grads: nnx.State) -> nnx.State:
    """Return the sum of the devices' gradients, in their dtype, each sent once.

    Args:
      axes: from `reduce_once_axes`.
      layout: the step's.
      grads: from `local_gradients`: [k, ...], k split over the axes.

    Returns:
      Gradients sharded like the moments, except dimensions that other axes split too: fsdp
      is inner there.
    """
    leaves, structure = jax.tree.flatten(grads, is_leaf=is_variable)
    given = [_of_device(axes, layout, logical_axes(v)) for v in leaves]
    dims = [_scattered_dimension(axes, layout.moment(logical_axes(v))) for v in leaves]
    made = [_with_fsdp(P(*spec[1:]), dim) for spec, dim in zip(given, dims, strict=True)]

    def on_one(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            _sum(x[0], parts_of(spec[0]), dim, "layers" in logical_axes(v))
            for x, spec, dim, v in zip(arrays, given, dims, leaves, strict=True)
        ]

    sums = on_each_device(on_one, (given,), made)([v.get_value() for v in leaves])
    return structure.unflatten(v.replace(x) for v, x in zip(leaves, sums, strict=True))


def _scattered_dimension(axes: tuple[str, ...], moment: P) -> int | None:
    """Return the dimension along which devices keep a shard of the sum (reduce-scatter); None: all
    keep all.
    """
    if "fsdp" not in axes:
        return None
    return next((dim for dim, part in enumerate(moment) if "fsdp" in parts_of(part)), None)


def _with_fsdp(spec: P, dim: int | None) -> P:
    if dim is None:
        return spec
    return P(*spec[:dim], without((*parts_of(spec[dim]), "fsdp"), ()), *spec[dim + 1 :])


def _sum(x: jax.Array, axes: tuple[str, ...], dim: int | None, lead: int) -> jax.Array:
    """Sum x along these axes; with `dim`, the devices of fsdp keep a shard each along it.

    Of `lead` dimensions of layers, the scattered one and all others, rows are contiguous in memory:
    XLA's TPU compiler scatters rows of whole tiles (8 of float32, 16 of bfloat16), and sums the
    whole of an array that it may lay out as it likes. So where a device's rows are fewer (one of
    64 of each head), each is cut into several: the memory layout is unchanged.
    """
    if dim is None:
        return jax.lax.psum(x, axes) if axes else x
    moved = jnp.moveaxis(x, dim, lead)
    tile, own = 32 // x.dtype.itemsize, moved.shape[lead] // jax.lax.axis_size("fsdp")
    cuts, columns = tile // math.gcd(tile, own), math.prod(moved.shape[lead + 1 :])
    cuts = 1 if columns % (128 * cuts) else cuts
    rows = moved.reshape(*moved.shape[:lead], moved.shape[lead] * cuts, columns // cuts)
    rows = in_memory.with_layout_constraint(rows, in_memory.Layout(tuple(range(rows.ndim))))
    shard = jax.lax.psum_scatter(rows, "fsdp", scatter_dimension=lead, tiled=True)
    rest = tuple(axis for axis in axes if axis != "fsdp")
    shard = jax.lax.psum(shard, rest) if rest else shard
    return jnp.moveaxis(shard.reshape(*shard.shape[:lead], -1, *moved.shape[lead + 1 :]), lead, dim)
