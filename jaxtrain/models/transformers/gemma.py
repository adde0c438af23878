"""Gemma: Llama's blocks with GeGLU, RMSNorm with unit offset, and a scaled embedding.

Source: Gemma Team 2024 (arXiv 2403.08295), the first Gemma.
"""

import dataclasses

from jaxtrain.config.reader import configurable
from jaxtrain.models.transformers.gemma_sizes import GemmaSizes
from jaxtrain.models.transformers.grouped_query_sizes import RopeType


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma(GemmaSizes):
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
      rope_type: how frequencies are slowed for a longer context: 'llama3', 'yarn' or 'linear'.
      rope_scaling: by how much; 1 leaves all as they are.
      rope_low_frequency_factor, rope_high_frequency_factor: which of them, as in `Llama`.
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

    sliding_window = None

    def __post_init__(self) -> None:
        self.check()
