"""Mixtral: Llama's attention, and a mixture of SwiGLU experts in place of the MLP.

Sources: Jiang et al. 2024 (arXiv 2401.04088); attention as in Llama (arXiv 2302.13971).
Letters: B batch, T length, D embed, F mlp, V vocab.
"""

import dataclasses
import math
from typing import ClassVar

import jax
from flax import nnx

from jaxtrain.attention import Mask
from jaxtrain.config import configurable
from jaxtrain.errors import UserError, refuse_below
from jaxtrain.experts import Experts
from jaxtrain.layers import (
    Execution,
    constant,
    embed,
    normal,
    param,
    rms_norm,
    stack,
)
from jaxtrain.self_attention import (
    check,
    projection_parameters,
    projections,
    score_flops_per_token,
    self_attention,
)
from jaxtrain.sharding import shard
from jaxtrain.transformer import Auxiliary

RESIDUAL = ("batch", "residual_length", "embed")
HIDDEN = ("batch", "length", "embed")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixtral:
    """Sizes of a Mixtral; the defaults are Mixtral 8x7B.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads; embed_dim / num_heads is the head_dim.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads
        (grouped-query attention, arXiv 2305.13245).
      mlp_dim: width inside each expert's SwiGLU (arXiv 2002.05202).
      num_experts: experts in each layer.
      experts_per_token: how many of them a token goes through.
      capacity_factor: None lets every expert take all tokens that choose it (dropless); a number
        gives it ceil(capacity_factor T experts_per_token / num_experts) slots a row of T tokens,
        and what comes later in the row is dropped: the token goes on without that expert.
      balance_weight: what the load-balancing loss (mean over layers, k where the load is even) is
        multiplied by; `router_aux_loss_coef` in transformers.
      router_z_weight: what the router's z-loss (ST-MoE, arXiv 2202.08906; 1e-3 there) is
        multiplied by, mean over layers.
      context_length: the longest sequence, in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: by how much frequencies whose wavelength is longer than
        rope_original_context_length are slowed (Llama 3.1); 1 leaves all as they are.
      rope_low_frequency_factor, rope_high_frequency_factor: wavelengths longer than
        rope_original_context_length / low are slowed in full, shorter than / high not at all.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      sliding_window: tokens a query sees back, itself included; None is all of them.
      norm_eps: epsilon of the RMS norms.
      tie_embeddings: the token embedding is the output matrix too.
    """

    vocab_size: int = 32000
    num_layers: int = 32
    embed_dim: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    mlp_dim: int = 14336
    num_experts: int = 8
    experts_per_token: int = 2
    capacity_factor: float | None = None
    balance_weight: float = 0.02
    router_z_weight: float = 0.0
    context_length: int = 32768
    rope_theta: float = 1000000.0
    rope_scaling: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_context_length: int = 32768
    sliding_window: int | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    objective: ClassVar[str] = "next_token"
    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads",
        "kv_heads": "num_kv_heads", "mlp": "mlp_dim", "experts": "num_experts",
        "layers": "num_layers", "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        refuse_below(1, self, "num_experts")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"Mixtral.experts_per_token={self.experts_per_token} with Mixtral.num_experts="
                f"{self.num_experts}; use 1 to {self.num_experts}"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise UserError(
                f"Mixtral.capacity_factor={self.capacity_factor}; use None (dropless) or a number "
                "above 0, such as 1.25"
            )
        for name in ("balance_weight", "router_z_weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"Mixtral.{name}={getattr(self, name)}; use 0 (none) or more")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    def build(self, key: jax.Array) -> "MixtralModel":
        """The module with freshly drawn parameters."""
        return MixtralModel(self, key)

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N): of the
        experts, the k that a token goes through."""
        active = 3 * self.embed_dim * self.mlp_dim * self.experts_per_token
        layer = projection_parameters(self) + active + self.embed_dim * self.num_experts
        return self.num_layers * layer + self.vocab_size * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs a token: 6 N and the attention scores (arXiv 2204.02311, appendix B)."""
        return 6 * self.matmul_parameters() + score_flops_per_token(self, sequence_length)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, sizes: Mixtral, key: jax.Array) -> None:
        D = sizes.embed_dim
        *keys, key_experts = jax.random.split(key, 5)
        # Residual projections start smaller, so that the stream's variance does not grow with L.
        into_residual = normal(0.02 / math.sqrt(2 * sizes.num_layers))
        self.attention_norm_scale = param(key, (D,), ("vector",), constant(1.0))
        self.query, self.key, self.value, self.out = projections(keys, sizes, into_residual)
        self.mlp_norm_scale = param(key, (D,), ("vector",), constant(1.0))
        self.experts = Experts(
            key_experts,
            embed_dim=D,
            mlp_dim=sizes.mlp_dim,
            num_experts=sizes.num_experts,
            experts_per_token=sizes.experts_per_token,
            capacity_factor=sizes.capacity_factor,
            into_residual=into_residual,
        )
        self.sizes = sizes

    def __call__(self, x_BTD, positions_BT, mask, execution, cache=None, start=0):  # noqa: ANN001, ANN204
        epsilon = self.sizes.norm_eps
        with jax.named_scope("attention"):
            h_BTD = shard(rms_norm(x_BTD, self.attention_norm_scale, epsilon=epsilon), HIDDEN)
            a_BTD, cache = self_attention(
                self, self.sizes, h_BTD, positions_BT, mask, execution,
                out=RESIDUAL, cache=cache, start=start,
            )  # fmt: skip
            x_BTD += a_BTD
        with jax.named_scope("experts"):
            h_BTD = shard(rms_norm(x_BTD, self.mlp_norm_scale, epsilon=epsilon), HIDDEN)
            e_BTD, router = self.experts(h_BTD, mask.segment_ids_BT, RESIDUAL)
            x_BTD += e_BTD
        return x_BTD, cache, router


class MixtralModel(nnx.Module):
    """Tokens to hidden states to logits."""

    def __init__(self, sizes: Mixtral, key: jax.Array) -> None:
        key_tokens, key_output, key_layers = jax.random.split(key, 3)
        V, D = sizes.vocab_size, sizes.embed_dim
        self.token_embedding = param(key_tokens, (V, D), ("vocab", "vocab_embed"), normal(0.02))
        self.layers = stack(lambda k: Block(sizes, k), sizes.num_layers, key_layers)
        self.norm_scale = param(key, (D,), ("vector",), constant(1.0))
        if not sizes.tie_embeddings:
            self.output = param(key_output, (V, D), ("vocab", "vocab_embed"), normal(0.02))
        self.sizes = sizes

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """The residual stream [B, T, D] that goes into the first layer."""
        del positions_BT  # each layer rotates by them
        with jax.named_scope("embedding"):
            return shard(embed(tokens_BT, self.token_embedding), RESIDUAL)

    def run_layer(
        self,
        layer: Block,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: tuple[jax.Array, jax.Array] | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None, Auxiliary]:
        """One layer, and its part of the mean over layers of the router's sums.

        The sums run over the tokens of documents; the step divides them by the targets that count,
        which are all of these but the last token of each document.
        """
        sizes = self.sizes
        mask = dataclasses.replace(mask, window=sizes.sliding_window)
        x_BTD, cache, router = layer(x_BTD, positions_BT, mask, execution, cache, start)
        mean = {name: total / sizes.num_layers for name, total in router.items()}
        weighted = sizes.balance_weight * mean["balance"] + sizes.router_z_weight * mean["z"]
        auxiliary = {
            "auxiliary": weighted,
            "router_balance_loss": mean["balance"],
            "router_z_loss": mean["z"],
            "router_dropped": mean["dropped"],
            "router_max_load": mean["max_load"],
        }
        return x_BTD, cache, auxiliary

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """The normed residual stream after the last layer."""
        x_BTD = rms_norm(x_BTD, self.norm_scale, epsilon=self.sizes.norm_eps)
        return shard(x_BTD, HIDDEN)

    def output_matrix(self) -> nnx.Param:
        """The matrix [V, D] that makes logits of hidden states."""
        return self.token_embedding if self.sizes.tie_embeddings else self.output
