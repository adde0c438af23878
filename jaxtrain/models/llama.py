"""Llama: rotary positions, grouped-query attention, SwiGLU, RMSNorm, tied or untied embeddings.

Sources: Touvron et al. 2023 (arXiv 2302.13971), Grattafiori et al. 2024 (arXiv 2407.21783).
Letters: B batch, T length, D embed, F mlp, V vocab.
"""

import dataclasses
import math
from typing import ClassVar

import jax
from flax import nnx

from jaxtrain.attention import Mask
from jaxtrain.config import configurable
from jaxtrain.layers import (
    Execution,
    constant,
    contract,
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
class Llama:
    """Sizes of a Llama; the defaults are Llama 3 8B.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads; embed_dim / num_heads is the head_dim.
      num_kv_heads: key-value heads; each serves num_heads / num_kv_heads query heads
        (grouped-query attention, arXiv 2305.13245).
      mlp_dim: width inside the SwiGLU (arXiv 2002.05202).
      context_length: the longest sequence, in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: by how much Llama 3.1 and later slow the frequencies whose wavelength is longer
        than rope_original_context_length; 1 leaves all as they are.
      rope_low_frequency_factor, rope_high_frequency_factor: wavelengths longer than
        rope_original_context_length / low are slowed in full, shorter than / high not at all.
      rope_original_context_length: the context that rope_scaling extends, in tokens.
      sliding_window: tokens a query sees back, itself included (Mistral, arXiv 2310.06825); None
        is all of them.
      norm_eps: epsilon of the RMS norms.
      tie_embeddings: the token embedding is the output matrix too.
    """

    vocab_size: int = 128256
    num_layers: int = 32
    embed_dim: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    mlp_dim: int = 14336
    context_length: int = 8192
    rope_theta: float = 500000.0
    rope_scaling: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_context_length: int = 8192
    sliding_window: int | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    objective: ClassVar[str] = "next_token"
    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads",
        "kv_heads": "num_kv_heads", "mlp": "mlp_dim", "layers": "num_layers",
        "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        check(self)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    def build(self, key: jax.Array) -> "LlamaModel":
        """The module with freshly drawn parameters."""
        return LlamaModel(self, key)

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N)."""
        layer = projection_parameters(self) + 3 * self.embed_dim * self.mlp_dim
        return self.num_layers * layer + self.vocab_size * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs a token: 6 N and the attention scores (arXiv 2204.02311, appendix B)."""
        return 6 * self.matmul_parameters() + score_flops_per_token(self, sequence_length)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, sizes: Llama, key: jax.Array) -> None:
        D, F = sizes.embed_dim, sizes.mlp_dim
        key_query, key_key, key_value, key_out, key_gate, key_up, key_down = jax.random.split(
            key, 7
        )
        # Residual projections start smaller, so that the stream's variance does not grow with L.
        into_residual = normal(0.02 / math.sqrt(2 * sizes.num_layers))
        self.attention_norm_scale = param(key, (D,), ("vector",), constant(1.0))
        keys = (key_query, key_key, key_value, key_out)
        self.query, self.key, self.value, self.out = projections(keys, sizes, into_residual)
        self.mlp_norm_scale = param(key, (D,), ("vector",), constant(1.0))
        self.gate = param(key_gate, (D, F), ("embed", "mlp"), normal(0.02))
        self.up = param(key_up, (D, F), ("embed", "mlp"), normal(0.02))
        self.down = param(key_down, (F, D), ("mlp", "embed"), into_residual)
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
        with jax.named_scope("mlp"):
            h_BTD = shard(rms_norm(x_BTD, self.mlp_norm_scale, epsilon=epsilon), HIDDEN)
            gate_BTF = jax.nn.silu(contract("BTD,DF->BTF", h_BTD, self.gate))
            h_BTF = gate_BTF * contract("BTD,DF->BTF", h_BTD, self.up)
            x_BTD += contract("BTF,FD->BTD", h_BTF, self.down, RESIDUAL)
        return x_BTD, cache


class LlamaModel(nnx.Module):
    """Tokens to hidden states to logits."""

    def __init__(self, sizes: Llama, key: jax.Array) -> None:
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
        """One layer."""
        mask = dataclasses.replace(mask, window=self.sizes.sliding_window)
        return (*layer(x_BTD, positions_BT, mask, execution, cache, start), {})

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """The normed residual stream after the last layer."""
        x_BTD = rms_norm(x_BTD, self.norm_scale, epsilon=self.sizes.norm_eps)
        return shard(x_BTD, HIDDEN)

    def output_matrix(self) -> nnx.Param:
        """The matrix [V, D] that makes logits of hidden states."""
        return self.token_embedding if self.sizes.tie_embeddings else self.output
