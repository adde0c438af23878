"""Gemma 3: five local layers per global one, pre- and post-norms, QK-norm.

Source: Gemma Team 2025 (arXiv 2503.19786), its language model.
"""

import dataclasses

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.transformers.gemma_sizes import GemmaSizes
from jaxtrain.nn.transformer.rotary import Linear


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(GemmaSizes):
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
      global_every: every so manieth layer sees all tokens, the others a window.
      sliding_window: tokens that a query of the others sees back, itself included.
      rope_theta: base of the rotary frequencies of layers that see all tokens.
      rope_scaling: by how much those are slowed (position interpolation, arXiv 2306.15595).
      local_rope_theta: base of the rotary frequencies of the others.
      query_width: scores are divided by its root; None is head_dim (the 27B model has
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

    qk_norm = True
    norms_after = True

    def __post_init__(self) -> None:
        self.check()
        require_positive(self, "local_rope_theta")

    @property
    def rotary(self) -> Linear:
        """Of layers that see all tokens."""
        return Linear(theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def local_rotary(self) -> Linear:
        """Of the layers between."""
        return Linear(theta=self.local_rope_theta, scaling=1.0)
