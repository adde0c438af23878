"""Bidirectional recurrent layer.

Source: Schuster and Paliwal 1997, "Bidirectional recurrent neural networks".
Letters: B batch, T length, D embed (of what goes in and comes out; each direction makes half).
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.parameters import Weights, add_prefix, merge_weights, under
from jaxtrain.nn.transformer.decoder import Layer
from jaxtrain.nn.transformer.language_model import Auxiliary, LayerCache


@dataclasses.dataclass(frozen=True)
class BothWays:
    """A layer along each document, and another with the same form against it.

    Attributes:
      one_way: the form, from D numbers to D / 2.
      one_way_parameters: of it, in matrix products.
    """

    one_way: Layer
    one_way_parameters: int

    def weights(self, key: jax.Array) -> Weights:
        """Those of both, each behind the name of its direction."""
        forward, backward = jax.random.split(key)
        return merge_weights(
            add_prefix("forward", self.one_way.weights(forward)),
            add_prefix("backward", self.one_way.weights(backward)),
        )

    def matmul_parameters(self) -> int:
        """Of both."""
        return 2 * self.one_way_parameters

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
        """One layer, which keeps nothing: what comes later is read too. Arguments and results as in
        `decoder.Layer`."""
        del start
        assert cache is None, "nothing is generated with what comes later"
        first, _, _ = self.one_way(under("forward", own), x_BTD, positions_BT, mask, execution)
        # Padding, at the end, is a document of its own: from the right each text restarts.
        turned = jax.tree.map(lambda ids_BT: jnp.flip(ids_BT, 1), mask)
        last, _, _ = self.one_way(
            under("backward", own), jnp.flip(x_BTD, 1), positions_BT, turned, execution
        )
        return jnp.concatenate([first, jnp.flip(last, 1)], -1), None, {}
