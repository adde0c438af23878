"""Llama: rotary positions, grouped-query attention, SwiGLU, RMSNorm, tied or untied embeddings.

Sources: Touvron et al. 2023 (arXiv 2302.13971), Grattafiori et al. 2024 (arXiv 2407.21783).
"""

import dataclasses

from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.nn.attention.grouped_query import grouped_query, validate_grouped_query
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.attention.rotary import RopeType, rope
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.decoder import decoder
from jaxtrain.nn.transformer.mlp import gated_mlp


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama(LanguageModel):
    """Sizes of a Llama; the defaults are Llama 3 8B.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      head_dim: width of each head; None is embed_dim / num_heads.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads
        (grouped-query attention, arXiv 2305.13245).
      mlp_dim: width inside the SwiGLU (arXiv 2002.05202).
      context_length: the longest sequence, in tokens.
      rope_theta: base of the rotary frequencies.
      rope_type: scaling of frequencies for a longer context: 'llama3' by their wavelengths;
        'yarn' as a ramp over pairs, with a factor on queries and keys (arXiv 2309.00071);
        'linear' all alike (arXiv 2306.15595).
      rope_scaling: factor by which Llama 3.1 and later scale frequencies with a wavelength longer
        than rope_original_context_length; 1 leaves all unchanged.
      rope_low_frequency_factor, rope_high_frequency_factor: wavelengths longer than
        rope_original_context_length / low are scaled in full, shorter than / high not at all.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      rope_fraction: rotated fraction of each head, its first dimensions (Phi, GPT-NeoX).
      sliding_window: tokens that a query sees, up to and including its own (Mistral, arXiv
        2310.06825); None is all of them.
      attention_pattern: which of the previous tokens a query sees, as in `GPT`; None is all of
        them, or of a window.
      qkv_bias: whether queries, keys and values have biases (Qwen 2, arXiv 2407.10671).
      qk_norm: whether each head of queries and keys is normalized before rotation (Qwen 3, arXiv
        2505.09388).
      norm_eps: epsilon of the RMS norms.
      tie_embeddings: whether the token embedding is the output matrix too.
    """

    vocab_size: int = 128256
    num_layers: int = 32
    embed_dim: int = 4096
    num_heads: int = 32
    head_dim: int | None = None
    num_kv_heads: int = 8
    mlp_dim: int = 14336
    context_length: int = 8192
    rope_theta: float = 500000.0
    rope_type: RopeType = "llama3"
    rope_scaling: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_context_length: int = 8192
    rope_fraction: float = 1.0
    sliding_window: int | None = None
    attention_pattern: Pattern | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    __post_init__ = validate_grouped_query
    build = decoder

    @property
    def block(self) -> Block:
        """The layers' definition."""
        norm = RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps)
        attention = grouped_query(
            self, rope(self), window=self.sliding_window, pattern=self.attention_pattern,
            biases=self.qkv_bias, norm=norm if self.qk_norm else None, fraction=self.rope_fraction,
        )  # fmt: skip
        return Block(attention=attention, mlp=gated_mlp(self), norm=norm)
