"""A custom language model: rotary embeddings, grouped-query attention and a ReLU-squared MLP.

The config imports this file and sets the fields of `MyModel`. Change `block` to change what a layer
computes; mesh axes, checkpoints, generation and `jaxtrain plan` follow without further code.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.nn.attention.grouped_query import grouped_query, validate_grouped_query
from jaxtrain.nn.attention.rotary import Rotary
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.parameters import residual_stddev
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.decoder import decoder
from jaxtrain.nn.transformer.mlp import TwoLayers


def relu_squared(x: jax.Array) -> jax.Array:
    """Square of the positive part (Primer, arXiv 2109.08668), elementwise."""
    return jnp.square(jax.nn.relu(x))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MyModel(LanguageModel):
    """Sizes of the model: each field is a setting of the config, `MyModel.num_layers = 4`.

    Attributes:
      vocab_size: rows of the embedding table; 256 for the byte tokenizer.
      num_layers: transformer layers.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads.
      mlp_dim: width inside the MLP.
      context_length: the longest sequence, in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: factor of their scaling for a longer context; 1 is off.
      sliding_window: tokens that a query sees, up to and including its own; None: all.
      norm_eps: epsilon of the RMS norms.
      tie_embeddings: whether the embedding is the output matrix too.
    """

    vocab_size: int = 256
    num_layers: int = 4
    embed_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_dim: int = 512
    context_length: int = 256
    rope_theta: float = 10_000.0
    rope_scaling: float = 1.0
    sliding_window: int | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    __post_init__ = validate_grouped_query
    build = decoder

    @property
    def block(self) -> Block:
        """Apply one layer: x + attention(norm(x)), then x + mlp(norm(x))."""
        rotary = Rotary(theta=self.rope_theta, scaling=self.rope_scaling)
        return Block(
            attention=grouped_query(self, rotary, window=self.sliding_window),
            mlp=TwoLayers(
                embed_dim=self.embed_dim,
                mlp_dim=self.mlp_dim,
                residual_stddev=residual_stddev(self.num_layers),
                function=relu_squared,
                biases=False,
            ),
            norm=RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps),
        )
