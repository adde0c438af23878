"""Gemma 2: alternating local and global layers, pre- and post-norms, logit softcap.

Source: Gemma Team 2024 (arXiv 2408.00118).
"""

import dataclasses

from jaxtrain.config.reader import configurable
from jaxtrain.models.transformers.gemma_sizes import GemmaSizes
from jaxtrain.models.transformers.grouped_query_sizes import RopeType


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2(GemmaSizes):
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
      global_every: every so manieth layer sees all tokens, the others a window.
      sliding_window: tokens that a query of the others sees back, itself included.
      attention_softcap: c of c tanh(s / c), which scores s become; None leaves them as they are.
      logit_softcap: likewise logits.
      rope_theta: base of the rotary frequencies.
      rope_type: how frequencies are slowed for a longer context: 'llama3', 'yarn' or 'linear'.
      rope_scaling: by how much; 1 leaves all as they are.
      rope_low_frequency_factor, rope_high_frequency_factor: which of them, as in `Llama`.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      query_width: scores are divided by its root; None is head_dim (the 27B model has
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

    norms_after = True

    def __post_init__(self) -> None:
        self.check()
