"""Gather of sharded matrices for rules that need them whole."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import parts_of
from jaxtrain.training.optimizers.matrices import Sides


def on_whole(function: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Sides) -> jax.Array:
    """`function` of matrices, laid out as `x` is.

    Where the layers divide over the axes that split a matrix, all-to-alls bring each device its own
    layers and take them back. Where they do not, a loop gathers one layer after the other.

    Args:
      function: from matrices [..., rows, columns] to as many of the same size; it finds them whole.
      x: stacked matrices, a side perhaps of several dimensions.
      dims: which dimensions count matrices and which are a matrix's sides.
    """
    rows, columns = (math.prod(x.shape[i] for i in part) for part in (dims.rows, dims.columns))
    stack = len(dims.stack)

    def apply_flat(x: jax.Array) -> jax.Array:
        """Of matrices that lie whole on their devices."""
        flat = x.reshape(*x.shape[: x.ndim - len(dims.rows + dims.columns)], rows, columns)
        return function(flat).reshape(x.shape)

    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or not any(sharding.spec[stack:]):
        return apply_flat(x)
    spec = sharding.spec
    moves = _moves(x.shape, spec, stack, sharding.mesh.shape)
    for to in moves:
        x = jax.sharding.reshard(x, to)
    spec_now = moves[-1] if moves else spec
    if stack and not any(spec_now[:1]) and any(spec_now[stack:]):

        def one_layer(_: None, layer: jax.Array) -> tuple[None, jax.Array]:
            gathered = P(*spec_now[1:stack], *(None,) * (x.ndim - stack))
            found = apply_flat(jax.sharding.reshard(layer, gathered))
            return None, jax.sharding.reshard(found, P(*spec_now[1:]))

        x = jax.lax.scan(one_layer, None, x)[1]
    else:
        gathered = P(*spec_now[:stack], *(None,) * (x.ndim - stack))
        x = jax.sharding.reshard(apply_flat(jax.sharding.reshard(x, gathered)), spec_now)
    for to in (*moves[-2::-1], spec) if moves else ():
        x = jax.sharding.reshard(x, to)
    return x


def _moves(shape: tuple[int, ...], spec: P, stack: int, mesh: Any) -> list[P]:
    """Layouts that bring matrices together, one mesh axis after the other: from a side to layers.

    Moving one axis between dimensions is an all-to-all; each device ends with whole layers.
    """
    found, now = [], list(spec)
    if not stack:
        return found
    for dim in range(stack, len(shape)):
        for axis in parts_of(spec[dim]):
            layers = (*parts_of(now[0]), axis)
            if shape[0] % math.prod(mesh[name] for name in layers):
                continue
            left = tuple(name for name in parts_of(now[dim]) if name != axis)
            now[0], now[dim] = layers, left or None
            found.append(P(*now))
    return found
