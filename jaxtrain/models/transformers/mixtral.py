"""Mixtral: Llama's attention, and a mixture of SwiGLU experts instead of the MLP.

Sources: Jiang et al. 2024 (arXiv 2401.04088); attention as in Llama (arXiv 2302.13971). With
qk_norm it is the mixture of Qwen 3 (arXiv 2505.09388); with qkv_bias and shared_mlp_dim that of
Qwen 2 (arXiv 2407.10671, section 2.2.2).
"""

import dataclasses

from jaxtrain.config.errors import require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.nn.attention.grouped_query import grouped_query, validate_grouped_query
from jaxtrain.nn.attention.rotary import RopeType, rope
from jaxtrain.nn.moe.experts import SharedExperts, mixture, validate_mixture
from jaxtrain.nn.moe.routing import Softmax
from jaxtrain.nn.normalization import RMSNorm
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.decoder import decoder
from jaxtrain.nn.transformer.mlp import gated_mlp


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixtral(LanguageModel):
    """Sizes of a Mixtral; the defaults are Mixtral 8x7B.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      head_dim: width of each head; None is embed_dim / num_heads.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads
        (grouped-query attention, arXiv 2305.13245).
      mlp_dim: width inside each expert's SwiGLU (arXiv 2002.05202).
      shared_mlp_dim: width inside a shared expert, applied to every token with a gate
        (Qwen 2); None: there is none.
      num_experts: experts in each layer.
      experts_per_token: experts per token.
      normalize_gates: a token's experts are weighted by the softmax over them; else by
        the softmax over all experts, so that the weights sum to less than 1.
      capacity_factor: None lets every expert take all tokens that choose it (dropless); a number
        gives it ceil(capacity_factor T experts_per_token / num_experts) slots per row of T tokens,
        and later assignments are dropped: the token skips that expert.
      balance_weight: weight of the load-balancing loss (per row and layer, averaged over both;
        k for an even load). `router_aux_loss_coef` of transformers
        weights one loss of all rows and layers together.
      router_z_weight: weight of the router's z-loss (ST-MoE, arXiv 2202.08906; 1e-3 there),
        averaged over layers.
      context_length: the longest sequence, in tokens.
      rope_theta: base of the rotary frequencies.
      rope_type: scaling of frequencies for a longer context: 'llama3', 'yarn' or 'linear'.
      rope_scaling: factor by which frequencies with a wavelength longer than
        rope_original_context_length are slowed (Llama 3.1); 1 leaves all unchanged.
      rope_low_frequency_factor, rope_high_frequency_factor: wavelengths longer than
        rope_original_context_length / low are scaled in full, shorter than / high not at all.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      sliding_window: tokens that a query sees, up to and including its own; None is all of them.
      qkv_bias: whether queries, keys and values have biases (Qwen 2).
      qk_norm: whether each head of queries and keys is normalized before rotation (Qwen 3, arXiv
        2505.09388).
      norm_eps: epsilon of the RMS norms.
      tie_embeddings: whether the token embedding is the output matrix too.
    """

    vocab_size: int = 32000
    num_layers: int = 32
    embed_dim: int = 4096
    num_heads: int = 32
    head_dim: int | None = None
    num_kv_heads: int = 8
    mlp_dim: int = 14336
    shared_mlp_dim: int | None = None
    num_experts: int = 8
    experts_per_token: int = 2
    normalize_gates: bool = True
    capacity_factor: float | None = None
    balance_weight: float = 0.02
    router_z_weight: float = 0.0
    context_length: int = 32768
    rope_theta: float = 1000000.0
    rope_type: RopeType = "llama3"
    rope_scaling: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_context_length: int = 32768
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    build = decoder

    def __post_init__(self) -> None:
        validate_grouped_query(self)
        validate_mixture(self)
        require_at_least(1, self, "shared_mlp_dim")

    @property
    def block(self) -> Block:
        """The layers' definition."""
        norm = RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps)
        attention = grouped_query(
            self, rope(self), window=self.sliding_window, biases=self.qkv_bias,
            norm=norm if self.qk_norm else None,
        )  # fmt: skip
        mlp = mixture(self, router=Softmax(normalized=self.normalize_gates))
        if self.shared_mlp_dim is not None:
            shared = gated_mlp(self, self.shared_mlp_dim)
            mlp = SharedExperts(shared=shared, routed=mlp, gated=True)
        return Block(attention=attention, mlp=mlp, norm=norm)
