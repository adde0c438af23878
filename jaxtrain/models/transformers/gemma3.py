"""Gemma 3: five local layers to a global one, norms before and after each part, QK-norm.

Source: Gemma Team 2025 (arXiv 2503.19786), its language model.
"""

import dataclasses
import math
from typing import ClassVar

from jaxtrain.config.errors import UserError, refuse_below, refuse_not_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs
from jaxtrain.models.transformers.grouped_query_sizes import GroupedQuerySizes
from jaxtrain.nn.attention.grouped_query import Local
from jaxtrain.nn.block import Block
from jaxtrain.nn.mlp import SwiGLU, gelu
from jaxtrain.nn.norms import RMSNorm
from jaxtrain.nn.rotary import Linear


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(GroupedQuerySizes):
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

    inputs: ClassVar[Inputs] = "tokens"
    objective = "next_token"
    experts = None
    tie_embeddings = True
    qk_norm = True
    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads",
        "kv_heads": "num_kv_heads", "mlp": "mlp_dim", "layers": "num_layers",
        "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        self.check()
        refuse_below(1, self, "global_every")
        refuse_not_positive(self, "local_rope_theta")
        if self.query_width is not None and self.query_width < 1:
            raise UserError(
                f"Gemma3.query_width={self.query_width}; use None (head_dim) or at least 1"
            )

    @property
    def embedding_scale(self) -> float:
        """The table's rows are small, since it makes logits too."""
        return math.sqrt(self.embed_dim)

    @property
    def query_scale(self) -> float:
        """Attention divides by the root of head_dim."""
        return math.sqrt(self.head_dim / (self.query_width or self.head_dim))

    @property
    def rotary(self) -> Linear:
        """Of layers that see all tokens."""
        return Linear(theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def local(self) -> Local:
        """The layers between."""
        numbers = range(1, self.num_layers + 1)
        return Local(
            layers=tuple(number % self.global_every != 0 for number in numbers),
            window=self.sliding_window,
            rotary=Linear(theta=self.local_rope_theta, scaling=1.0),
        )

    @property
    def norm(self) -> RMSNorm:
        """The norm before and after each part of a block, of heads, and after the last block."""
        return RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps, offset=1.0)

    @property
    def block(self) -> Block:
        """What every layer computes."""
        return Block(
            attention=self.grouped_query,
            mlp=SwiGLU(
                embed_dim=self.embed_dim,
                mlp_dim=self.mlp_dim,
                residual_stddev=self.residual_stddev,
                function=gelu,
            ),
            norm=self.norm,
            after=self.norm,
        )
