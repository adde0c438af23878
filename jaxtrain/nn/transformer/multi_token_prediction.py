"""Multi-token prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Letters: B batch, T length, D embed.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.layers import RMSNorm
from jaxtrain.nn.parameters import Weights, add_prefix, merge_weights, normal, param, under
from jaxtrain.nn.transformer.block import RESIDUAL, Block
from jaxtrain.nn.transformer.language_model import Auxiliary
from jaxtrain.parallel.sharding import shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionModule:
    """norm(block(project [norm(embedding); norm(hidden)])): of a token further on and of what is
    known before it, hidden states that are finished.

    Attributes:
      embed_dim: width of the residual stream.
      block: the layer.
      norm: which norm each of the three is.
      number: the layer's, behind those of the model.
    """

    embed_dim: int
    block: Block
    norm: RMSNorm
    number: int

    def weights(self, key: jax.Array) -> Weights:
        """The block's, three norms, and the projection [2 D, D], the embedding's rows first."""
        key_block, key_project = jax.random.split(key)
        shape = 2 * self.embed_dim, self.embed_dim
        return merge_weights(
            add_prefix("token_norm", self.norm.weights(key)),
            add_prefix("hidden_norm", self.norm.weights(key)),
            {"project": param(key_project, shape, ("embed", "latent"), normal(0.02))},
            self.block.weights(key_block),
            add_prefix("norm", self.norm.weights(key)),
        )

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token, without the output's."""
        return 2 * self.embed_dim**2 + self.block.matmul_parameters()

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        token_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
    ) -> tuple[jax.Array, Auxiliary]:
        """Finished hidden states [B, T, D] of the token after those, and the layer's sums.

        Args:
          own: the parameters.
          h_BTD: the finished hidden states from which the token before is predicted.
          token_BTD: the embedding of that token.
          positions_BT: places of the tokens in their documents.
          mask: which places see which.
          execution: how the mathematics is run.
        """

        def run(x_BTD: jax.Array) -> tuple[jax.Array, Auxiliary]:
            y_BTD, _, sums = self.block(
                own, x_BTD, positions_BT, mask, execution.of_layer(self.number)
            )
            return y_BTD, sums

        with jax.named_scope("prediction"):
            both_BTD = jnp.concatenate(
                [
                    self.norm(under("token_norm", own), token_BTD),
                    self.norm(under("hidden_norm", own), shard(h_BTD, RESIDUAL)),
                ],
                axis=-1,
            )
            x_BTD = execution.contract("BTD,DC->BTC", both_BTD, own["project"], RESIDUAL)
            x_BTD, sums = execution.remat_layer(run)(x_BTD)
            return shard(self.norm(under("norm", own), x_BTD), HIDDEN), sums
