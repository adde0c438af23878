"""GPT-2: learned positions, pre-LayerNorm blocks, GELU, tied embeddings.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
Letters: V vocab, D embed, C positions.
"""

import dataclasses
from typing import ClassVar

import jax

from jaxtrain.config.errors import UserError, nearest_multiple, require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.nn.attention import patterns
from jaxtrain.nn.attention.multi_head import MultiHead
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.normalization import LayerNorm
from jaxtrain.nn.parameters import normal, param, residual_stddev
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.nn.transformer.mlp import TwoLayers


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT(LanguageModel):
    """Sizes of a GPT-2; the defaults are the 124M model.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: attention heads; embed_dim / num_heads is the head_dim.
      context_length: the longest sequence, in tokens.
      norm_eps: epsilon of the layer norms.
      attention_pattern: which keys a query sees: `@LongformerPattern()`, `@StridedPattern()`,
        `@FixedPattern()`, `@DilatedPattern()`; None: all previous ones.
    """

    vocab_size: int = 50257
    num_layers: int = 12
    embed_dim: int = 768
    num_heads: int = 12
    context_length: int = 1024
    norm_eps: float = 1e-5
    attention_pattern: Pattern | None = None

    # The setting of each logical axis's size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads", "mlp": "embed_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim", "positions": "context_length",
    }  # fmt: skip

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "context_length")
        require_at_least(1, self, *sizes)
        require_positive(self, "norm_eps")
        if self.embed_dim % self.num_heads:
            nearest = nearest_multiple(self.embed_dim, self.num_heads)
            raise UserError(
                f"GPT.embed_dim={self.embed_dim} does not divide by GPT.num_heads={self.num_heads};"
                f" the nearest embed_dim is {nearest}"
            )
        errors = list(
            patterns.validate(self.attention_pattern, num_heads=self.num_heads, model="GPT")
        )
        if errors:
            raise UserError("\n".join(errors))

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def block(self) -> Block:
        """The layers' definition."""
        stddev = residual_stddev(self.num_layers)
        return Block(
            attention=MultiHead(
                embed_dim=self.embed_dim,
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                residual_stddev=stddev,
                pattern=self.attention_pattern,
            ),
            mlp=TwoLayers(
                embed_dim=self.embed_dim, mlp_dim=4 * self.embed_dim, residual_stddev=stddev
            ),
            norm=LayerNorm(dim=self.embed_dim, epsilon=self.norm_eps),
        )

    def build(self, key: jax.Array) -> Decoder:
        """Return the newly initialized module."""
        key_tokens, key_positions, key_layers = jax.random.split(key, 3)
        V, D, C = self.vocab_size, self.embed_dim, self.context_length
        return Decoder(
            self.block,
            key_layers,
            num_layers=self.num_layers,
            token_embedding=param(
                key_tokens, (V, D), ("vocab", "vocab_embed"), normal(0.02), role="embedding"
            ),
            position_embedding=param(
                key_positions, (C, D), ("positions", "vocab_embed"), normal(0.01), role="position"
            ),
            norm=self.block.norm,
        )
