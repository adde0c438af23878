"""T5: encoder-decoder with relative position bias, RMSNorm and no biases.

Source: Raffel et al. 2019 (arXiv 1910.10683), without its dropout of attention weights, which the
fastest kernels never materialize; version 1.1 has gated GELUs and a separate output matrix (arXiv
2002.05202).
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax

from jaxtrain.config.errors import UserError, require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import EncoderDecoderModel
from jaxtrain.models.model import AttentionFacts
from jaxtrain.nn.attention.multi_head import CrossAttention, SelfAttention
from jaxtrain.nn.dropout import Dropout, validate_rate
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.parameters import normal, param
from jaxtrain.nn.transformer.block import Block, Feeds
from jaxtrain.nn.transformer.encoder_decoder import DECODER, ENCODER, CrossBlock, EncoderDecoder
from jaxtrain.nn.transformer.mlp import SwiGLU, TwoLayers, gelu
from jaxtrain.nn.transformer.positional_embedding import Relative

INSIDE = 5  # index of an MLP's own dropout among those of a layer


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class T5(EncoderDecoderModel):
    """Sizes of a T5; the defaults are the small model's of version 1.0.

    Attributes:
      vocab_size: rows of the embedding table, of sources and targets.
      num_layers: blocks of the encoder, and of the decoder.
      embed_dim: width of the residual stream.
      num_heads: attention heads.
      head_dim: width of each; need not be embed_dim / num_heads.
      mlp_dim: width inside the MLP.
      context_length: the longest source, and the longest target, in tokens.
      mlp: 'relu', or 'gated_gelu' as in version 1.1.
      tie_embeddings: whether the embedding table is the output matrix too; False, as in version
        1.1: a separate matrix.
      scale_outputs: whether hidden states are divided by sqrt(embed_dim) before the output matrix;
        False in version 1.1.
      buckets: number of buckets of distances between tokens.
      distance: tokens that are farther away share a bucket.
      norm_eps: epsilon of the RMS norms.
      dropout: rate of each stack's input and output, of each part's output,
        and inside the MLP, in training.
    """

    vocab_size: int = 32128
    num_layers: int = 6
    embed_dim: int = 512
    num_heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 2048
    context_length: int = 512
    mlp: Literal["relu", "gated_gelu"] = "relu"
    tie_embeddings: bool = True
    scale_outputs: bool = True
    buckets: int = 32
    distance: int = 128
    norm_eps: float = 1e-6
    dropout: float = 0.0

    # The setting of each logical axis's size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads", "mlp": "mlp_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        others = ("norm_eps", "mlp", "tie_embeddings", "scale_outputs", "buckets", "distance",
                  "dropout")  # fmt: skip
        require_at_least(
            1, self, *[f.name for f in dataclasses.fields(self) if f.name not in others]
        )
        require_positive(self, "norm_eps")
        validate_rate(self, "dropout", self.dropout)
        require_at_least(4, self, "buckets")
        if self.distance <= self.buckets // 2:
            raise UserError(
                f"T5.distance={self.distance} is not beyond the {self.buckets // 2} distances that "
                f"have a bucket each; use at least {self.buckets // 2 + 1}"
            )

    @property
    def attention(self) -> AttentionFacts:
        """Facts: scores have a relative position bias."""
        return dataclasses.replace(super().attention, biased=True)

    @property
    def norm(self) -> RMSNorm:
        """The norm of every part, and of each stack's output."""
        return RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps)

    @property
    def encoder(self) -> Block:
        """Encoder layer: self-attention and an MLP."""
        return Block(
            attention=SelfAttention(**self._projections),
            mlp=self._feeds(ENCODER),
            norm=self.norm,
            dropout=Dropout(self.dropout, ENCODER),
        )

    @property
    def decoder(self) -> CrossBlock:
        """Decoder layer: self-attention, cross-attention and an MLP."""
        return CrossBlock(
            attention=SelfAttention(**self._projections),
            cross=CrossAttention(**self._projections),
            mlp=self._feeds(DECODER),
            norm=self.norm,
            dropout=Dropout(self.dropout, DECODER),
        )

    def build(self, key: jax.Array) -> EncoderDecoder:
        """Return the newly initialized module."""
        key_tokens, key_output, key_stacks = jax.random.split(key, 3)
        D, shape, axes = self.embed_dim, (self.vocab_size, self.embed_dim), ("vocab", "vocab_embed")
        output = None
        if not self.tie_embeddings:
            output = param(key_output, shape, axes, normal(1 / math.sqrt(D)), role="output")
        return EncoderDecoder(
            self.encoder,
            self.decoder,
            key_stacks,
            num_layers=self.num_layers,
            token_embedding=param(key_tokens, shape, axes, normal(1.0), role="embedding"),
            source_positions=self._relative_positions(both_ways=True),
            target_positions=self._relative_positions(both_ways=False),
            norm=self.norm,
            output=output,
            output_scale=1 / math.sqrt(D) if self.scale_outputs else 1.0,
            dropout=self.dropout,
            drops_finished=True,
        )

    def _relative_positions(self, *, both_ways: bool) -> Relative:
        return Relative(
            num_heads=self.num_heads, buckets=self.buckets, distance=self.distance,
            both_ways=both_ways, stddev=1 / math.sqrt(self.embed_dim),
        )  # fmt: skip

    @property
    def _projections(self) -> dict[str, Any]:
        """Scores are not divided by sqrt(H): the query projection's initialization is, and queries
        are scaled."""
        D, N, H = self.embed_dim, self.num_heads, self.head_dim
        return {
            "embed_dim": D, "num_heads": N, "head_dim": H, "biases": False,
            "residual_stddev": 1 / math.sqrt(N * H), "stddev": 1 / math.sqrt(D),
            "query_stddev": 1 / math.sqrt(D * H), "query_scale": math.sqrt(H),
        }  # fmt: skip

    def _feeds(self, stack: int) -> Feeds:
        D, F = self.embed_dim, self.mlp_dim
        more: dict[str, Any] = {
            "stddev": 1 / math.sqrt(D), "residual_stddev": 1 / math.sqrt(F),
            "dropout": Dropout(self.dropout, stack + INSIDE),
        }  # fmt: skip
        if self.mlp == "relu":
            return TwoLayers(embed_dim=D, mlp_dim=F, function=jax.nn.relu, biases=False, **more)
        return SwiGLU(embed_dim=D, mlp_dim=F, function=gelu, **more)
