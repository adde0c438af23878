"""Transformer (2017): encoder and decoder.

Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv 1706.03762);
one table for both embeddings and the output matrix (section 3.4).
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax

from jaxtrain.config.errors import UserError, nearest_multiple, require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import EncoderDecoderModel
from jaxtrain.nn.attention.multi_head import CrossAttention, SelfAttention
from jaxtrain.nn.dropout import Dropout, validate_rate
from jaxtrain.nn.normalization import LayerNorm
from jaxtrain.nn.parameters import normal, param
from jaxtrain.nn.transformer.block import Block, post_norm, pre_norm
from jaxtrain.nn.transformer.encoder_decoder import DECODER, ENCODER, CrossBlock, EncoderDecoder
from jaxtrain.nn.transformer.mlp import TwoLayers
from jaxtrain.nn.transformer.positional_embedding import Learned, PositionalEmbedding, Sinusoidal


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer(EncoderDecoderModel):
    """Sizes of an encoder-decoder; the defaults are the base model's of the paper.

    Attributes:
      vocab_size: rows of the embedding table, of sources and targets.
      num_layers: blocks of the encoder, and of the decoder.
      embed_dim: width of the residual stream.
      num_heads: attention heads; embed_dim / num_heads is the head_dim.
      mlp_dim: width inside the MLP.
      context_length: the longest source, and the longest target, in tokens.
      positions: 'sinusoidal' adds sines and cosines to the embedding, 'learned' a vector per
        position.
      norms: 'post' normalizes the stream after each part, as in the paper; 'pre' normalizes
        each part's input, and the last layer's output (arXiv 2002.04745).
      norm_eps: epsilon of the layer norms.
      dropout: rate of each stack's input, and of each part's output, in training.
    """

    vocab_size: int = 37000
    num_layers: int = 6
    embed_dim: int = 512
    num_heads: int = 8
    mlp_dim: int = 2048
    context_length: int = 512
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    norms: Literal["post", "pre"] = "post"
    norm_eps: float = 1e-5
    dropout: float = 0.0

    # The setting of each logical axis's size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads", "mlp": "mlp_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim", "positions": "context_length",
    }  # fmt: skip

    def __post_init__(self) -> None:
        texts = ("norm_eps", "positions", "norms", "dropout")
        require_at_least(
            1, self, *[f.name for f in dataclasses.fields(self) if f.name not in texts]
        )
        require_positive(self, "norm_eps")
        validate_rate(self, "dropout", self.dropout)
        if self.embed_dim % self.num_heads:
            nearest = nearest_multiple(self.embed_dim, self.num_heads)
            raise UserError(
                f"Transformer.embed_dim={self.embed_dim} does not divide by Transformer.num_heads="
                f"{self.num_heads}; the nearest embed_dim is {nearest}"
            )

    @property
    def norm(self) -> LayerNorm:
        """The norm of every part."""
        return LayerNorm(dim=self.embed_dim, epsilon=self.norm_eps)

    @property
    def encoder(self) -> Block:
        """Encoder layer: self-attention and an MLP."""
        return Block(
            attention=SelfAttention(**self._projections), mlp=self._mlp, norm=self.norm,
            placement=self._placement, dropout=Dropout(self.dropout, ENCODER),
        )  # fmt: skip

    @property
    def decoder(self) -> CrossBlock:
        """Decoder layer: self-attention, cross-attention and an MLP."""
        return CrossBlock(
            attention=SelfAttention(**self._projections),
            cross=CrossAttention(**self._projections),
            mlp=self._mlp,
            norm=self.norm,
            placement=self._placement,
            dropout=Dropout(self.dropout, DECODER),
        )

    def build(self, key: jax.Array) -> EncoderDecoder:
        """Return the newly initialized module."""
        key_tokens, key_stacks = jax.random.split(key)
        D, scale = self.embed_dim, math.sqrt(self.embed_dim)
        shape, axes = (self.vocab_size, D), ("vocab", "vocab_embed")
        embedding: PositionalEmbedding = Sinusoidal(dim=D)
        if self.positions == "learned":
            embedding = Learned(dim=D, num_positions=self.context_length)
        return EncoderDecoder(
            self.encoder,
            self.decoder,
            key_stacks,
            num_layers=self.num_layers,
            token_embedding=param(key_tokens, shape, axes, normal(1 / scale), role="embedding"),
            source_positions=embedding,
            target_positions=embedding,
            norm=self.norm if self.norms == "pre" else None,
            embedding_scale=scale,
            dropout=self.dropout,
        )

    @property
    def _placement(self):  # noqa: ANN202 - a block.Placement
        return pre_norm if self.norms == "pre" else post_norm

    @property
    def _projections(self) -> dict[str, Any]:
        """Xavier initialization, as in the paper's code."""
        D, spread = self.embed_dim, 1 / math.sqrt(self.embed_dim)
        return {
            "embed_dim": D, "num_heads": self.num_heads, "head_dim": D // self.num_heads,
            "residual_stddev": spread, "stddev": spread, "query_stddev": spread,
        }  # fmt: skip

    @property
    def _mlp(self) -> TwoLayers:
        return TwoLayers(
            embed_dim=self.embed_dim, mlp_dim=self.mlp_dim, function=jax.nn.relu,
            residual_stddev=math.sqrt(2 / (self.embed_dim + self.mlp_dim)),
        )  # fmt: skip
