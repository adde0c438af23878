"""Execution of a model: attention kernel, matmuls, remat, the scan over layers.

Fused gradient accumulation is a part of that scan.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from jaxtrain.config.errors import UserError, nearest_divisor, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.nn.attention.attention import attention
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.matmul.contract import Einsum, StructuredWeight, contract, einsum, project
from jaxtrain.nn.remat import POLICIES, RESIDUAL, Policy, name_activation, remat
from jaxtrain.parallel.sharding import shard

if TYPE_CHECKING:
    from jaxtrain.nn.matmul.grouped import Grouped

# The input of a part of a block that mixes positions, gathered along length.
HIDDEN = ("batch", "length", "embed")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """How the loop over layers is compiled; the mathematics is the same.

    Attributes:
      layers_per_iteration: 1 scans (compile time independent of depth), k unrolls k layers in each
        iteration (the blocked form), 0 unrolls all of them (no loop).
    """

    layers_per_iteration: int = 1

    def __post_init__(self) -> None:
        require_at_least(0, self, "layers_per_iteration")


def validate(settings: Scan, *, num_layers: int, written: str) -> Iterator[str]:
    """Yield an error message if the loop's iterations do not divide the layers.

    Args:
      settings: of the loop.
      num_layers: layers in the loop.
      written: a name of those layers, for the message.
    """
    block = settings.layers_per_iteration
    if block and num_layers % block:
        yield (
            f"Scan.layers_per_iteration={block} does not divide {written}; the nearest is "
            f"{nearest_divisor(num_layers, block)} (0 unrolls all)"
        )


@dataclasses.dataclass(frozen=True)
class Execution:
    """Execution of a model.

    Attributes:
      kernel: name of the attention kernel.
      context_parallel: `Attention.context_parallel`.
      remat: what each layer saves for the backward pass.
      layers_per_iteration: `Scan.layers_per_iteration`.
      einsum: computes the layers' matmuls with weights.
      grouped: the same for matmuls with experts' weights; None: `Grouped()`.
      draws: source of dropout masks; None is evaluation, without dropout.
      layer: index of the layer that is run, int32 scalar; None outside of layers.
    """

    kernel: str = "xla"
    context_parallel: str = "ring"
    remat: Policy = POLICIES["none"]
    layers_per_iteration: int = 1
    einsum: Einsum = einsum
    grouped: "Grouped | None" = None
    draws: Draws | None = None
    layer: jax.Array | int | None = None

    def of_layer(self, number: jax.Array | int) -> "Execution":
        """Return the execution of one layer; layers that differ use its index."""
        return dataclasses.replace(self, layer=number)

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        """Attention with this run's kernel; shapes as in `attention.attention`."""
        mask = dataclasses.replace(
            mask,
            segment_ids_BT=_rows_inside(mask.segment_ids_BT),
            segment_ids_BS=_rows_inside(mask.segment_ids_BS),
        )
        return attention(q, k, v, mask, kernel=self.kernel, context_parallel=self.context_parallel)

    def contract(
        self, equation: str, x: jax.Array, weight: nnx.Param, out: tuple[str, ...] | None = None
    ) -> jax.Array:
        """Return a layer's matmul with a weight, in this run's precision; like
        `contract.contract`."""
        value = weight.get_value()
        if isinstance(value, StructuredWeight):
            return value.contract(
                equation, x, weight, out, by=self.einsum, draws=self.draws, layer=self.layer
            )
        return contract(equation, x, weight, out, by=self.einsum)

    def project(self, x_BTD: jax.Array, *products: tuple[str, nnx.Param]) -> list[jax.Array]:
        """Matmuls of the stream, or of its norm, with weights, its positions gathered in all of
        them.

        Args:
          x_BTD: sharded like the stream, or gathered along length.
          products: the equation and weight of each, as in `contract`.
        """
        if not any(isinstance(weight.get_value(), StructuredWeight) for _, weight in products):
            found = project(x_BTD, products, by=self.einsum)
            if found is not None:
                return found
        x_BTD = shard(x_BTD, HIDDEN)
        return [self.contract(equation, x_BTD, weight) for equation, weight in products]

    def remat_layer(self, layer_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Run one layer outside of the loop, with the same remat policy.

        Args:
          layer_fn: its first argument is the activations.
        """

        def of_named(x: jax.Array, *rest: Any) -> Any:
            return layer_fn(name_activation(x, RESIDUAL), *rest)

        return remat(of_named, self.remat, prevent_cse=True)

    def over_layers(
        self, layer_fn: Callable[..., Any], x: jax.Array, layers: Any, per_layer: Any = None
    ) -> tuple[jax.Array, Any]:
        """Run `x, out = layer_fn(layer, x, extra)` over all stacked layers.

        Args:
          layer_fn: one layer: its module, the activations and its part of `per_layer`, to the new
            activations and an output that is stacked into the second result.
          x: the input activations.
          layers: a module from `stack`, or a list of one module per layer.
          per_layer: a pytree with a leading layers dimension (a key-value cache), or None; with a
            list of layers, a list too.

        Returns:
          The output activations, and the stacked outputs; with a list of layers a list.
        """
        if isinstance(layers, list):
            return self._over_unstacked(layer_fn, x, layers, per_layer)
        count = jax.tree.leaves(layers)[0].shape[0]
        block = self.layers_per_iteration or count
        if count % block:
            raise UserError(
                f"Scan.layers_per_iteration={block} does not divide num_layers={count}; "
                f"use {nearest_divisor(count, block)} (or 0 to unroll all)"
            )

        def of_named(layer: Any, x: jax.Array, extra: Any) -> Any:
            return layer_fn(layer, name_activation(x, RESIDUAL), extra)

        # Outside of a loop only prevent_cse keeps XLA from undoing the recomputation.
        run = remat(of_named, self.remat, prevent_cse=block == count)

        def run_block(x: jax.Array, xs: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            if block == 1:
                return run(xs[0], x, xs[1])
            outs = []
            for i in range(block):
                layer, extra = jax.tree.map(lambda leaf, i=i: leaf[i], xs)
                x, out = run(layer, x, extra)
                outs.append(out)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

        if block == count:
            if count == 1:
                layers, per_layer = jax.tree.map(lambda leaf: leaf[0], (layers, per_layer))
                x, out = run(layers, x, per_layer)
                return x, jax.tree.map(lambda leaf: leaf[None], out)
            return run_block(x, (layers, per_layer))
        x, outs = scan_layers(run_block, x, layers, per_layer, block)
        if block > 1:
            outs = jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), outs)
        return x, outs

    def _over_unstacked(
        self, layer_fn: Callable[..., Any], x: jax.Array, layers: list[Any], per_layer: list[Any]
    ) -> tuple[jax.Array, list[Any]]:
        """`over_layers` of a list: no stacked array is read or created."""

        def of_named(layer: Any, x: jax.Array, extra: Any) -> Any:
            return layer_fn(layer, name_activation(x, RESIDUAL), extra)

        run, outs = remat(of_named, self.remat, prevent_cse=True), []
        for layer, extra in zip(layers, per_layer, strict=True):
            x, out = run(layer, x, extra)
            outs.append(out)
        return x, outs


def branch_scope(times: int, of: int) -> str:
    """Return the scope name of a branch that `times` of the layers take, for counts of what
    runs."""
    return f"taken_{times}_of_{of}"


def _rows_inside(x_BT: jax.Array | None) -> jax.Array | None:
    """Shard per-token values like queries and keys."""
    return None if x_BT is None else shard(x_BT, ("inner_batch", "length"))


# -- fused gradient accumulation -------------------------------------------------------------------


class Fused:
    """Sums that loops over layers add gradients to: fused gradient accumulation.

    Autodiff of a loop over stacked layers makes the gradients of all layers, and then adds them to
    the sums of earlier microbatches: both are live at once. Here each sum is a cotangent that the
    backward loop carries, and a layer's gradient is added to its slice in place, as by PyTorch's
    `.grad` and Megatron's gradient accumulation fusion. The additions and their order are the same.

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
    numbers = jnp.arange(len(arrays[0]) // block)
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
