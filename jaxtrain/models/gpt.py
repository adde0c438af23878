"""GPT-2: learned positions, pre-LayerNorm blocks, GELU, tied embeddings.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
Letters: B batch, T length, D embed, N heads, H head_dim, F mlp, V vocab, L layers.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.attention import Mask
from jaxtrain.config import configurable
from jaxtrain.errors import UserError, nearest_multiple, refuse_below, refuse_not_positive
from jaxtrain.gathering import gather
from jaxtrain.kernels import platform_of
from jaxtrain.layers import (
    Execution,
    add_bias,
    constant,
    contract,
    embed,
    extend_cache,
    layer_norm,
    normal,
    param,
    stack,
)
from jaxtrain.sharding import shard
from jaxtrain.transformer import Auxiliary

RESIDUAL = ("batch", "residual_length", "embed")
HIDDEN = ("batch", "length", "embed")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT:
    """Sizes of a GPT-2; the defaults are the 124M model.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: attention heads; embed_dim / num_heads is the head_dim.
      context_length: the longest sequence, in tokens.
      norm_eps: epsilon of the layer norms.
    """

    vocab_size: int = 50257
    num_layers: int = 12
    embed_dim: int = 768
    num_heads: int = 12
    context_length: int = 1024
    norm_eps: float = 1e-5

    objective: ClassVar[str] = "next_token"
    # Which setting gives a logical axis its size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads", "mlp": "embed_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim", "place": "context_length",
    }  # fmt: skip

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "context_length")
        refuse_below(1, self, *sizes)
        refuse_not_positive(self, "norm_eps")
        if self.embed_dim % self.num_heads:
            nearest = nearest_multiple(self.embed_dim, self.num_heads)
            raise UserError(
                f"GPT.embed_dim={self.embed_dim} does not divide by GPT.num_heads={self.num_heads};"
                f" the nearest embed_dim is {nearest}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads: as many as query heads."""
        return self.num_heads

    def build(self, key: jax.Array) -> "GPTModel":
        """The module with freshly drawn parameters."""
        return GPTModel(self, key)

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N)."""
        return self.num_layers * 12 * self.embed_dim**2 + self.vocab_size * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs a token, attention causal: 6 N + 6 L T D (arXiv 2204.02311, app. B)."""
        attention = 6 * self.num_layers * sequence_length * self.embed_dim
        return 6 * self.matmul_parameters() + attention


def gelu(x: jax.Array) -> jax.Array:
    """The Gaussian error linear unit by tanh (arXiv 1606.08415, section 2), in float32.

    Off CPUs (1 + tanh u) / 2 is sigmoid(2u). XLA's compiler for GPUs does not compute a tanh twice:
    the backward pass, which does this again, would write it out and read it back.
    """
    x32 = x.astype(jnp.float32)
    if platform_of(jax.sharding.get_abstract_mesh()) == "cpu":
        return jax.nn.gelu(x32, approximate=True).astype(x.dtype)
    u = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3)
    return (x32 * jax.nn.sigmoid(2 * u)).astype(x.dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, sizes: GPT, key: jax.Array) -> None:
        D, N, H, F = sizes.embed_dim, sizes.num_heads, sizes.head_dim, 4 * sizes.embed_dim
        key_qkv, key_out, key_up, key_down = jax.random.split(key, 4)
        # Residual projections start smaller, so that the stream's variance does not grow with L.
        into_residual = normal(0.02 / math.sqrt(2 * sizes.num_layers))
        self.attention_norm_scale = param(key, (D,), ("vector",), constant(1.0))
        self.attention_norm_bias = param(key, (D,), ("vector",), constant(0.0))
        qkv_axes = ("qkv", "embed", "heads", "head_dim")
        self.qkv = param(key_qkv, (3, D, N, H), qkv_axes, normal(0.02))
        self.qkv_bias = param(key, (3, N, H), ("qkv", "heads", "head_dim"), constant(0.0))
        self.out = param(key_out, (N, H, D), ("heads", "head_dim", "embed"), into_residual)
        self.out_bias = param(key, (D,), ("vector",), constant(0.0))
        self.mlp_norm_scale = param(key, (D,), ("vector",), constant(1.0))
        self.mlp_norm_bias = param(key, (D,), ("vector",), constant(0.0))
        self.up = param(key_up, (D, F), ("embed", "mlp"), normal(0.02))
        self.up_bias = param(key, (F,), ("mlp",), constant(0.0))
        self.down = param(key_down, (F, D), ("mlp", "embed"), into_residual)
        self.down_bias = param(key, (D,), ("vector",), constant(0.0))
        self.norm_eps = sizes.norm_eps

    def __call__(self, x_BTD, mask, execution, cache=None, start=0):  # noqa: ANN001, ANN204
        with jax.named_scope("attention"):
            h_BTD = layer_norm(
                x_BTD, self.attention_norm_scale, self.attention_norm_bias, epsilon=self.norm_eps
            )
            h_BTD = shard(h_BTD, HIDDEN)
            qkv = contract("BTD,PDNH->PBTNH", h_BTD, self.qkv)
            qkv = qkv + gather(self.qkv_bias)[:, None, None].astype(h_BTD.dtype)
            # Split rather than indexed: the gradients are then put together in one pass.
            q_BTNH, k_BTNH, v_BTNH = (part[0] for part in jnp.split(qkv, 3))
            if cache is not None:
                k_BTNH, v_BTNH = cache = extend_cache(k_BTNH, v_BTNH, cache, start)
            a_BTNH = execution.attention(q_BTNH, k_BTNH, v_BTNH, mask)
            x_BTD += add_bias(contract("BTNH,NHD->BTD", a_BTNH, self.out, RESIDUAL), self.out_bias)
        with jax.named_scope("mlp"):
            h_BTD = layer_norm(
                x_BTD, self.mlp_norm_scale, self.mlp_norm_bias, epsilon=self.norm_eps
            )
            h_BTD = shard(h_BTD, HIDDEN)
            h_BTF = gelu(add_bias(contract("BTD,DF->BTF", h_BTD, self.up), self.up_bias))
            x_BTD += add_bias(contract("BTF,FD->BTD", h_BTF, self.down, RESIDUAL), self.down_bias)
        return x_BTD, cache


class GPTModel(nnx.Module):
    """Tokens to hidden states to logits."""

    def __init__(self, sizes: GPT, key: jax.Array) -> None:
        key_tokens, key_positions, key_layers = jax.random.split(key, 3)
        V, D, C = sizes.vocab_size, sizes.embed_dim, sizes.context_length
        self.token_embedding = param(key_tokens, (V, D), ("vocab", "vocab_embed"), normal(0.02))
        self.position_embedding = param(
            key_positions, (C, D), ("place", "vocab_embed"), normal(0.01)
        )
        self.layers = stack(lambda k: Block(sizes, k), sizes.num_layers, key_layers)
        self.norm_scale = param(key, (D,), ("vector",), constant(1.0))
        self.norm_bias = param(key, (D,), ("vector",), constant(0.0))
        self.norm_eps = sizes.norm_eps

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """The residual stream [B, T, D] that goes into the first layer."""
        with jax.named_scope("embedding"):
            x_BTD = embed(tokens_BT, self.token_embedding)
            x_BTD += embed(positions_BT, self.position_embedding)
            return shard(x_BTD, RESIDUAL)

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
        """One layer; positions went in with the embedding."""
        del positions_BT
        return (*layer(x_BTD, mask, execution, cache, start), {})

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """The normed residual stream after the last layer."""
        x_BTD = layer_norm(x_BTD, self.norm_scale, self.norm_bias, epsilon=self.norm_eps)
        return shard(x_BTD, HIDDEN)

    def output_matrix(self) -> nnx.Param:
        """The matrix [V, D] that makes logits of hidden states: the token embedding."""
        return self.token_embedding
