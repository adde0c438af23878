"""GPT-OSS: attention sinks, alternating local layers, experts with biases, clamped SwiGLU.

Source: OpenAI 2025 (arXiv 2508.10925, section 2).
"""

import dataclasses

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.nn.attention.grouped_query import grouped_query, validate_grouped_query
from jaxtrain.nn.attention.rotary import RopeType, rope
from jaxtrain.nn.moe.experts import mixture, validate_mixture
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.decoder import decoder
from jaxtrain.nn.transformer.mlp import ClampedSwiGLU


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTOSS(LanguageModel):
    """Sizes of a GPT-OSS; the defaults are gpt-oss-20b.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      head_dim: width of each head.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads.
      mlp_dim: width inside each expert.
      num_experts: experts in each layer.
      experts_per_token: experts per token, weighted by the softmax over them.
      capacity_factor, balance_weight, router_z_weight: as in `Mixtral`.
      swiglu_limit: clamp of the experts' gates and ups.
      context_length: the longest sequence, in tokens.
      global_every: one of this many layers is global, the others have a window.
      sliding_window: tokens that a query of local layers sees, up to and including its own.
      rope_theta: base of the rotary frequencies.
      rope_type: scaling of frequencies for a longer context: 'llama3', 'yarn' or 'linear'.
      rope_scaling: factor by which the context is extended; 1 leaves all frequencies unchanged.
      rope_low_frequency_factor, rope_high_frequency_factor: affected frequencies, as in `Llama`.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      norm_eps: epsilon of the RMS norms.
      tie_embeddings: whether the token embedding is the output matrix too.
    """

    vocab_size: int = 201088
    num_layers: int = 24
    embed_dim: int = 2880
    num_heads: int = 64
    head_dim: int = 64
    num_kv_heads: int = 8
    mlp_dim: int = 2880
    num_experts: int = 32
    experts_per_token: int = 4
    capacity_factor: float | None = None
    balance_weight: float = 0.0
    router_z_weight: float = 0.0
    swiglu_limit: float = 7.0
    context_length: int = 131072
    global_every: int = 2
    sliding_window: int = 128
    rope_theta: float = 150000.0
    rope_type: RopeType = "yarn"
    rope_scaling: float = 32.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 32.0
    rope_original_context_length: int = 4096
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    build = decoder

    def __post_init__(self) -> None:
        validate_grouped_query(self)
        validate_mixture(self)
        require_positive(self, "swiglu_limit")

    @property
    def block(self) -> Block:
        """The layers' definition; all projections have biases, the router's too."""
        attention = grouped_query(
            self, rope(self, whole_pairs=False), window=self.sliding_window,
            global_every=self.global_every, biases=True, out_bias=True, sinks=True,
        )  # fmt: skip
        experts = mixture(self, gated=ClampedSwiGLU(self.swiglu_limit), biases=True)
        norm = RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps)
        return Block(attention=attention, mlp=experts, norm=norm)
