"""Bidirectional recurrent layer.

Source: Schuster and Paliwal 1997, "Bidirectional recurrent neural networks".
Letters: B batch, T length, D embed (of inputs and outputs; each direction computes half).
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import UserError
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.facts import LayerFacts
from jaxtrain.nn.kv_cache import LayerCache
from jaxtrain.nn.parameters import Weights, add_prefix, merge_weights, under
from jaxtrain.nn.transformer.decoder import Layer
from jaxtrain.nn.transformer.language_model import Auxiliary


class RecurrentLayer(Layer, Protocol):
    """A layer with a recurrence."""

    @property
    def facts(self) -> LayerFacts:
        """Facts of the layer: what it caches."""
        ...

    def matmul_parameters(self) -> int:
        """Number of parameters used in a matmul for every token."""
        ...

    def other_flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token besides those of these parameters."""
        ...


@dataclasses.dataclass(frozen=True)
class BothWays:
    """A forward layer along each document, and a backward one.

    Attributes:
      one_way: the layer of one direction, from D features to D / 2.
    """

    one_way: RecurrentLayer

    @property
    def facts(self) -> LayerFacts:
        """Nothing is cached."""
        return LayerFacts()

    def weights(self, key: jax.Array) -> Weights:
        """Parameters of both, each prefixed with its direction."""
        forward, backward = jax.random.split(key)
        return merge_weights(
            add_prefix("forward", self.one_way.weights(forward)),
            add_prefix("backward", self.one_way.weights(backward)),
        )

    def matmul_parameters(self) -> int:
        """Of both."""
        return 2 * self.one_way.matmul_parameters()

    def other_flops_per_token(self, sequence_length: int) -> float:
        """Nothing else is counted."""
        del sequence_length
        return 0

    def __call__(
        self,
        own: Weights,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """Run the layer, without a cache since later tokens are read too. Arguments and results as
        in `decoder.Layer`."""
        del start
        assert cache is None, "nothing is generated with what comes later"
        first, _, _ = self.one_way(under("forward", own), x_BTD, positions_BT, mask, execution)
        # Padding, at the end, is a separate document: from the right each text restarts.
        turned = jax.tree.map(lambda ids_BT: jnp.flip(ids_BT, 1), mask)
        last, _, _ = self.one_way(
            under("backward", own), jnp.flip(x_BTD, 1), positions_BT, turned, execution
        )
        return jnp.concatenate([first, jnp.flip(last, 1)], -1), None, {}


class Directed(Protocol):
    """Sizes of a model whose layers may be bidirectional."""

    @property
    def embed_dim(self) -> int: ...
    @property
    def bidirectional(self) -> bool: ...


def in_directions(sizes: Directed, layer: Callable[[int, int], RecurrentLayer]) -> RecurrentLayer:
    """Return a model's layer: unidirectional, or bidirectional with half of the width each.

    Args:
      sizes: the model's.
      layer: returns a layer of one direction, from a width of inputs to one of its state.
    """
    if not sizes.bidirectional:
        return layer(sizes.embed_dim, sizes.embed_dim)
    return BothWays(layer(sizes.embed_dim, sizes.embed_dim // 2))


def validate_directions(sizes: Directed) -> None:
    """Raise UserError if the width cannot be split over two directions."""
    if sizes.bidirectional and sizes.embed_dim % 2:
        name = type(sizes).__name__
        raise UserError(
            f"{name}.embed_dim={sizes.embed_dim} with {name}.bidirectional=True: each direction "
            f"has half of it; use {sizes.embed_dim + 1}"
        )
