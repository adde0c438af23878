"""Gemma, Gemma 2 and Gemma 3: decoders with GeGLU, unit-offset RMSNorm and a scaled embedding.

Sources: Gemma Team 2024 (arXiv 2403.08295, section 2); Gemma 2 (arXiv 2408.00118): local and global
layers alternating, norms before and after each part, soft-capped scores and logits; Gemma 3 (arXiv
2503.19786, its language model): five local layers per global one, QK-norm.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax

from jaxtrain.config.errors import UserError, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.nn.attention.grouped_query import (
    GroupedQuerySizes,
    grouped_query,
    validate_grouped_query,
)
from jaxtrain.nn.attention.rotary import Linear, RopeType, Rotations, rope
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.decoder import Decoder, decoder
from jaxtrain.nn.transformer.mlp import gated_mlp, gelu


class _Sizes(GroupedQuerySizes, Protocol):
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...


def _block(
    sizes: _Sizes,
    rotary: Rotations,
    *,
    query_width: int | None = None,
    qk_norm: bool = False,
    norms_after: bool = False,
    **attention: Any,
) -> Block:
    """Return the definition of a Gemma's layers.

    Args:
      sizes: the model's.
      rotary: its rotary embeddings.
      query_width: scores are divided by its square root; None is head_dim.
      qk_norm: whether heads of queries and keys are normalized.
      norms_after: whether the outputs of both parts are normalized too.
      **attention: other arguments of `grouped_query`.
    """
    norm = RMSNorm(dim=sizes.embed_dim, epsilon=sizes.norm_eps, offset=1.0)
    return Block(
        attention=grouped_query(
            sizes,
            rotary,
            norm=norm if qk_norm else None,
            query_scale=math.sqrt(sizes.head_dim / (query_width or sizes.head_dim)),
            **attention,
        ),
        mlp=gated_mlp(sizes, function=gelu),
        norm=norm,
        after=norm if norms_after else None,
    )


def _decoder(sizes: Any, key: jax.Array, **more: Any) -> Decoder:
    """Return the initializer of the token embedding, small since it is the output matrix too."""
    return decoder(sizes, key, embedding_scale=math.sqrt(sizes.embed_dim), **more)


def _validate_query_width(sizes: Any) -> None:
    if sizes.query_width is not None and sizes.query_width < 1:
        raise UserError(
            f"{type(sizes).__name__}.query_width={sizes.query_width}; use None (head_dim) or at "
            "least 1"
        )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma(LanguageModel):
    """Sizes of a Gemma; the defaults are the 2B model.

    Attributes:
      vocab_size: rows of the embedding table, which is the output matrix too.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      head_dim: width of each head.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads.
      mlp_dim: width inside the GeGLU (arXiv 2002.05202).
      context_length: the longest sequence, in tokens.
      rope_theta: base of the rotary frequencies.
      rope_type: scaling of frequencies for a longer context: 'llama3', 'yarn' or 'linear'.
      rope_scaling: factor by which the context is extended; 1 leaves all frequencies unchanged.
      rope_low_frequency_factor, rope_high_frequency_factor: affected frequencies, as in `Llama`.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      norm_eps: epsilon of the RMS norms.
    """

    vocab_size: int = 256000
    num_layers: int = 18
    embed_dim: int = 2048
    num_heads: int = 8
    head_dim: int = 256
    num_kv_heads: int = 1
    mlp_dim: int = 16384
    context_length: int = 8192
    rope_theta: float = 10000.0
    rope_type: RopeType = "llama3"
    rope_scaling: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_context_length: int = 8192
    norm_eps: float = 1e-6

    tie_embeddings = True

    def __post_init__(self) -> None:
        validate_grouped_query(self)

    @property
    def block(self) -> Block:
        """The layers' definition."""
        return _block(self, rope(self))

    def build(self, key: jax.Array) -> Decoder:
        """Return the newly initialized module."""
        return _decoder(self, key)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2(LanguageModel):
    """Sizes of a Gemma 2; the defaults are the 2B model.

    Attributes:
      vocab_size: rows of the embedding table, which is the output matrix too.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      head_dim: width of each head.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads.
      mlp_dim: width inside the GeGLU (arXiv 2002.05202).
      context_length: the longest sequence, in tokens.
      global_every: one of this many layers is global, the others have a window.
      sliding_window: tokens that a query of local layers sees, up to and including its own.
      attention_softcap: c of c tanh(s / c), which scores s become; None leaves them unchanged.
      logit_softcap: softcap of the logits, likewise.
      rope_theta: base of the rotary frequencies.
      rope_type: scaling of frequencies for a longer context: 'llama3', 'yarn' or 'linear'.
      rope_scaling: factor by which the context is extended; 1 leaves all frequencies unchanged.
      rope_low_frequency_factor, rope_high_frequency_factor: affected frequencies, as in `Llama`.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      query_width: scores are divided by its square root; None is head_dim (the 27B model has
        embed_dim / num_heads).
      norm_eps: epsilon of the RMS norms.
    """

    vocab_size: int = 256000
    num_layers: int = 26
    embed_dim: int = 2304
    num_heads: int = 8
    head_dim: int = 256
    num_kv_heads: int = 4
    mlp_dim: int = 9216
    context_length: int = 8192
    global_every: int = 2
    sliding_window: int = 4096
    attention_softcap: float | None = 50.0
    logit_softcap: float | None = 30.0
    rope_theta: float = 10000.0
    rope_type: RopeType = "llama3"
    rope_scaling: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_context_length: int = 8192
    query_width: int | None = None
    norm_eps: float = 1e-6

    tie_embeddings = True

    def __post_init__(self) -> None:
        validate_grouped_query(self)
        _validate_query_width(self)

    @property
    def block(self) -> Block:
        """The layers' definition."""
        return _block(
            self, rope(self), query_width=self.query_width, norms_after=True,
            window=self.sliding_window, global_every=self.global_every,
            softcap=self.attention_softcap,
        )  # fmt: skip

    def build(self, key: jax.Array) -> Decoder:
        """Return the newly initialized module."""
        return _decoder(self, key, logit_softcap=self.logit_softcap)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(LanguageModel):
    """Sizes of a Gemma 3; the defaults are the 1B model.

    Attributes:
      vocab_size: rows of the embedding table, which is the output matrix too.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      head_dim: width of each head.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads.
      mlp_dim: width inside the GeGLU (arXiv 2002.05202).
      context_length: the longest sequence, in tokens.
      global_every: one of this many layers is global, the others have a window.
      sliding_window: tokens that a query of local layers sees, up to and including its own.
      rope_theta: base of the rotary frequencies of global layers.
      rope_scaling: factor of their position interpolation (arXiv 2306.15595).
      local_rope_theta: base of the rotary frequencies of local layers.
      query_width: scores are divided by its square root; None is head_dim (the 27B model has
        embed_dim / num_heads).
      norm_eps: epsilon of the RMS norms.
    """

    vocab_size: int = 262144
    num_layers: int = 26
    embed_dim: int = 1152
    num_heads: int = 4
    head_dim: int = 256
    num_kv_heads: int = 1
    mlp_dim: int = 6912
    context_length: int = 32768
    global_every: int = 6
    sliding_window: int = 512
    rope_theta: float = 1000000.0
    rope_scaling: float = 1.0
    local_rope_theta: float = 10000.0
    query_width: int | None = None
    norm_eps: float = 1e-6

    tie_embeddings = True

    def __post_init__(self) -> None:
        validate_grouped_query(self)
        _validate_query_width(self)
        require_positive(self, "local_rope_theta")

    @property
    def block(self) -> Block:
        """The layers' definition."""
        return _block(
            self, Linear(theta=self.rope_theta, scaling=self.rope_scaling),
            local_rotary=Linear(theta=self.local_rope_theta, scaling=1.0),
            query_width=self.query_width, qk_norm=True, norms_after=True,
            window=self.sliding_window, global_every=self.global_every,
        )  # fmt: skip

    def build(self, key: jax.Array) -> Decoder:
        """Return the newly initialized module."""
        return _decoder(self, key)
