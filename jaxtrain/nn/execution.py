"""Execution of a model: attention kernel, matmuls, scan over layers, remat."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.errors import UserError, nearest_divisor, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.nn.attention.attention import attention
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.dropout import Draws
from jaxtrain.nn.fused_accumulation import scan_layers
from jaxtrain.nn.matmul.contract import StructuredWeight, contract, project
from jaxtrain.nn.matmul.einsum import Einsum, einsum
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
