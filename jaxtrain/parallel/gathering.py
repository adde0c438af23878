"""FSDP gather of weights at their use, and reduce-scatter of their gradients.

A weight is gathered where it is used and its gradient reduced into the shard (ZeRO, arXiv
1910.02054). A vocabulary that does not divide over `tensor` is replicated there at rest, and gets
rows of zeros when gathered: what is stored, saved and exported has the model's rows.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout as in_memory
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import Layout, current_layout, is_variable, logical_axes, reshape

# The name of weights that were gathered: remat policies gather them again in the backward pass
# instead of keeping them, or every layer's gathered weights would be live at once.
GATHERED = "gathered"
HOST = jax.memory.Space.Host

# Elements of a gathered tied table on a device from which on its gradient as output matrix is
# reduced separately: 256 MiB in float32.
LARGE_TABLE = 2**26

# Dimensions of an array, each group to become one dimension.
Groups = tuple[tuple[int, ...], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSlice:
    """A weight, and an array sharded like its gradient: the gradient is taken with respect to that.

    The slice never enters the forward pass, it only gives the gradient its type. Of ZeRO 2 it is
    the fsdp slice of a replicated weight, so each layer's gradient is reduced straight into its
    shard; in host memory it is like the weight, and each layer's gradient goes there as it is made.
    """

    weight: jax.Array
    slice: jax.Array


def with_slices(weights: nnx.State, slices: nnx.State) -> nnx.State:
    """Pair each weight of a tree with its slice."""
    return jax.tree.map(with_slice, weights, slices, is_leaf=is_variable)


def with_slice(weight: nnx.Variable, slice_: nnx.Variable) -> nnx.Variable:
    """Return a weight with its slice."""
    return weight.replace(GradientSlice(weight.get_value(), slice_.get_value()))


def gathers_weights() -> bool:
    """Whether weights are gathered over fsdp while they are used (ZeRO 3 on several devices)."""
    layout = current_layout()
    return layout is not None and layout.splits_parameters and layout.mesh.shape["fsdp"] > 1


def gather(parameter: nnx.Param, groups: Groups | None = None) -> jax.Array:
    """Return a parameter's value in the layout of the computation: gathered over fsdp.

    Called inside the loop over layers, so that one layer is gathered at a time; its transpose
    reduces the gradient over fsdp. A vocabulary that does not divide has rows of zeros at its end.

    Args:
      parameter: the parameter.
      groups: of its dimensions, which are transposed to this order and merged; None is off.
        Only the first of a group may be split. Merged before it is gathered: each device moves its
        shard.
    """
    value, layout = parameter.get_value(), current_layout()
    if layout is None:
        return _join_groups(value, groups)
    axes = logical_axes(parameter)
    if isinstance(value, GradientSlice) and jax.typeof(value.slice).memory_space == HOST:
        value = _attach(value.weight, value.slice, lambda g: jax.device_put(g, HOST))
    if isinstance(value, GradientSlice):
        axes = axes[-value.weight.ndim :]
        weight = jax.sharding.reshard(
            _join_groups(value.weight, groups), _join(layout.weight(axes), groups)
        )
        spec = _join(layout.gradient(axes), groups)
        whole = _attach(
            weight, _join_groups(value.slice, groups), lambda g: jax.sharding.reshard(g, spec)
        )
        return _with_padded_vocabulary(_rows_first(whole, spec, groups), axes, layout)
    # Inside a scan the value has no leading "layers" dimension, but the names do.
    axes = axes[-value.ndim :]
    gathered = jax.sharding.reshard(_join_groups(value, groups), _join(layout.weight(axes), groups))
    gathered = _rows_first(gathered, _join(layout.parameter(axes), groups), groups)
    if layout.parameter(axes) != layout.weight(axes):
        gathered = checkpoint_name(gathered, GATHERED)
    return _with_padded_vocabulary(gathered, axes, layout)


def is_reduced_first(layout: Layout, axes: tuple[str, ...], size: int) -> bool:
    """Whether a tied table's gradient as output matrix is reduced separately, before the layers'.

    Args:
      layout: of the step.
      axes: logical axes of the table.
      size: its number of elements.
    """
    sizes = layout.mesh.shape
    # In a pipeline its last stage has the logits, and its first the lookup.
    gathers = layout.splits_parameters and sizes["fsdp"] > 1 and sizes["pipe"] == 1
    own = size // math.prod(layout.size(part) for part in layout.weight(axes))
    return gathers and own >= LARGE_TABLE


def reduce_first(x: jax.Array, table: nnx.Param) -> tuple[jax.Array, nnx.Param]:
    """Return an activation and a tied table for the logits; the table's gradient is reduced first.

    XLA would add the gradient of the lookup to it and reduce both at once (reduce-scatter
    reassociation), or reduce it last: unreduced, it would be live during the backward pass of all
    layers. So the gradient of the activation waits for its reduction. Small tables, and those that
    fsdp does not split, are unchanged: half the bytes are sent.
    """
    layout, value = current_layout(), table.get_value()
    # A quantized table has no gradient, and a `GradientSlice` is not reduced here.
    if layout is None or not isinstance(value, jax.Array):
        return x, table
    if not is_reduced_first(layout, logical_axes(table), value.size):
        return x, table

    @jax.custom_vjp
    def identity(x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, table

    def backward(_: None, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jax.lax.optimization_barrier(gradients)

    identity.defvjp(lambda *values: (values, None), backward)
    x, value = identity(x, value)
    replaced: Any = table.replace(value)
    return x, replaced


def _with_padded_vocabulary(weight: jax.Array, axes: tuple[str, ...], layout: Layout) -> jax.Array:
    """Return a weight padded with rows of zeros to a multiple of the devices; others unchanged."""
    if not {"vocab"} & set(axes) & layout.whole:
        return weight
    dim, split = axes.index("vocab"), dataclasses.replace(layout, whole=frozenset())
    spec = split.weight(axes)
    more = -weight.shape[dim] % layout.size(spec[dim])
    rows = [(0, more if axis == dim else 0) for axis in range(weight.ndim)]
    return jax.sharding.reshard(jax.numpy.pad(weight, rows), spec)


def dtype_of(parameter: nnx.Param) -> jax.numpy.dtype:
    """Return the dtype of a parameter in the computation, and of activations."""
    value = parameter.get_value()
    return (value.weight if isinstance(value, GradientSlice) else value).dtype


def _join(spec: P, groups: Groups | None) -> P:
    """Return the PartitionSpec of an array whose dimensions were merged."""
    return spec if groups is None else P(*(spec[group[0]] for group in groups))


def _rows_first(weight: jax.Array, spec: P, groups: Groups | None) -> jax.Array:
    """Return the weight, whose gradient has the split dimension as its rows, where that is a
    group's last.

    A TPU's compiler scatters rows of heads' parts. In a square matmul it may put the other
    dimension first, and then sums the whole (tests/test_tiles.py).
    """
    if groups is None or not any(group[1:] and group[0] == max(group) for group in groups):
        return weight
    order = sorted(range(len(spec)), key=lambda dim: spec[dim] is None)

    @jax.custom_vjp
    def identity(weight: jax.Array) -> jax.Array:
        return weight

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        lies = in_memory.Layout(tuple(order))
        return (in_memory.with_layout_constraint(gradient, lies),)

    identity.defvjp(lambda weight: (weight, None), backward)
    return identity(weight)


def _join_groups(x: jax.Array, groups: Groups | None) -> jax.Array:
    if groups is None:
        return x
    shape = [math.prod(x.shape[i] for i in group) for group in groups]
    parts = tuple(_join(jax.typeof(x).sharding.spec, groups))
    return reshape(x.transpose([i for group in groups for i in group]), shape, parts)


def _attach(
    weight: jax.Array, slice_: jax.Array, moved: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return the weight, whose gradient is the slice's, `moved` to the slice's sharding."""

    @jax.custom_vjp
    def attach(weight: jax.Array, slice_: jax.Array) -> jax.Array:
        return weight

    def forward(weight: jax.Array, slice_: jax.Array) -> tuple[jax.Array, None]:
        return weight, None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.numpy.zeros_like(gradient), moved(gradient)

    attach.defvjp(forward, backward)
    return attach(weight, slice_)


def pin_to_host(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """Return the same parts on the same devices, each in the memory of its device's host."""
    return sharding.with_memory_kind("pinned_host")


def is_pinned(sharding: jax.sharding.Sharding) -> bool:
    """Whether arrays with this sharding are in host memory."""
    return sharding.memory_kind == "pinned_host"
