"""Fused gradient accumulation: the backward pass of the loop over layers adds to the sums.

Autodiff of a loop over stacked layers makes the gradients of all layers, and then adds them to the
sums of earlier microbatches: both are live at once. Here each sum is a cotangent that the
backward loop carries, and a layer's gradient is added to its slice in place, as by PyTorch's
`.grad` and Megatron's gradient accumulation fusion. The additions and their order are the same.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state


class Fused:
    """Sums of gradients that loops over layers add to, for the weights of one forward pass.

    Attributes:
      sums: one array for each weight, sharded like its gradient. The forward pass returns them
        unchanged; their cotangents are the sums.
    """

    def __init__(self, weights: Sequence[jax.Array], sums: Sequence[jax.Array]) -> None:
        """Pair each array that the gradient is taken with respect to with its sum."""
        self.sums = list(sums)
        self._index = {id(weight): index for index, weight in enumerate(weights)}
        self._weights = weights  # alive, so that no other array has the id of one
        self._trace = get_opaque_trace_state(convention="nnx")

    def take(self, arrays: Sequence[jax.Array]) -> dict[int, int]:
        """Return the index of the sum of each array that has one, by its own index.

        A sum is taken once, and not inside of another transformation, such as a loop: gradients
        of further uses are those of autodiff.
        """
        if get_opaque_trace_state(convention="nnx") != self._trace:
            return {}
        found = {at: self._index.pop(id(x), None) for at, x in enumerate(arrays)}
        return {at: index for at, index in found.items() if index is not None}


_FUSED: contextvars.ContextVar[Fused | None] = contextvars.ContextVar("fused", default=None)


@contextlib.contextmanager
def fuse_accumulation(weights: Sequence[jax.Array], sums: Sequence[jax.Array]) -> Iterator[Fused]:
    """Let loops over layers add the gradients of these weights to these sums.

    Args:
      weights: arrays that the gradient is taken with respect to.
      sums: the sum of each, of the same shape.
    """
    fused = Fused(weights, sums)
    token = _FUSED.set(fused)
    try:
        yield fused
    finally:
        _FUSED.reset(token)


def scan_layers(
    run: Callable[[jax.Array, tuple[Any, Any]], tuple[jax.Array, Any]],
    x: jax.Array,
    layers: Any,
    per_layer: Any,
    block: int,
) -> tuple[jax.Array, Any]:
    """Return `jax.lax.scan(run, x, (layers, per_layer))`, over blocks of layers.

    Args:
      run: the activations, and the weights and `per_layer` of one block -> the new activations and
        outputs. Blocks of several layers have a leading dimension.
      x: the activations.
      layers: the stacked weights [L, ...], a pytree.
      per_layer: a pytree of arrays [L, ...], or None.
      block: layers in an iteration, a divisor of L.
    """

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(len(array) // block, block, *array.shape[1:]) if block > 1 else array

    fused = _FUSED.get()
    arrays, structure = jax.tree.flatten(layers)
    taken = {} if fused is None else fused.take(arrays)
    xs = jax.tree.map(split, (layers, per_layer))
    if fused is None or not taken:
        return jax.lax.scan(run, x, xs)

    def add(carry: tuple[Any, list[jax.Array]], given: tuple[Any, jax.Array]) -> Any:
        (x, sums), ((layer, extra), index) = carry, given
        weights = jax.tree.leaves(layer)
        pairs = [_attach(weights[at], one, index) for at, one in zip(taken, sums, strict=True)]
        for at, (weight, _) in zip(taken, pairs, strict=True):
            weights[at] = weight
        x, out = run(x, (jax.tree.unflatten(structure, weights), extra))
        return (x, [one for _, one in pairs]), out

    sums = [split(fused.sums[index]) for index in taken.values()]
    numbers = jax.numpy.arange(len(arrays[0]) // block)
    for at in taken:  # their cotangents are in the sums
        arrays[at] = jax.lax.stop_gradient(arrays[at])
    xs = jax.tree.map(split, (jax.tree.unflatten(structure, arrays), per_layer))
    (x, sums), outs = jax.lax.scan(add, (x, sums), (xs, numbers))
    for index, one in zip(taken.values(), sums, strict=True):
        fused.sums[index] = one.reshape(fused.sums[index].shape) if block > 1 else one
    return x, outs


@jax.custom_vjp
def _attach(weight: jax.Array, total: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both; the weight's gradient is added to slice `index` of the total's cotangent."""
    del index
    return weight, total


def _forward(weight: jax.Array, total: jax.Array, index: jax.Array) -> Any:
    return (weight, total), index


def _backward(index: jax.Array, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    gradient, total = cotangents
    old = jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
    new = old + gradient.astype(total.dtype)
    return None, jax.lax.dynamic_update_index_in_dim(total, new, index, 0), None


_attach.defvjp(_forward, _backward)
