"""Grouped-query self-attention with rotary positions: what Llama and Mixtral have in common.

Letters: B batch, T length, D embed, N query heads, K kv heads, H head_dim.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.attention import Mask
from jaxtrain.errors import (
    UserError,
    nearest_divisor,
    nearest_multiple,
    refuse_below,
    refuse_not_positive,
)
from jaxtrain.layers import (
    Execution,
    Initializer,
    contract,
    extend_cache,
    normal,
    param,
    rotate,
)


class Sizes(Protocol):
    """The settings of a model that attends this way; each is documented at `models.llama.Llama`."""

    @property
    def embed_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> float: ...
    @property
    def rope_low_frequency_factor(self) -> float: ...
    @property
    def rope_high_frequency_factor(self) -> float: ...
    @property
    def rope_original_context_length(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...


class Projections(Protocol):
    """A block with the four weights that `projections` makes."""

    query: nnx.Param
    key: nnx.Param
    value: nnx.Param
    out: nnx.Param


def check(sizes: Sizes) -> None:
    """Raises UserError for a size under 1, or heads, window or rotary settings that do not fit."""
    name = type(sizes).__name__
    refuse_below(
        1, sizes, "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim",
        "context_length", "rope_original_context_length",
    )  # fmt: skip
    refuse_not_positive(sizes, "rope_theta", "norm_eps")
    # The halves of a head are rotated against each other, so head_dim is even.
    if sizes.embed_dim % (2 * sizes.num_heads):
        pair = 2 * sizes.num_heads
        raise UserError(
            f"{name}.embed_dim={sizes.embed_dim} does not divide by twice {name}.num_heads="
            f"{sizes.num_heads}; the nearest embed_dim is {nearest_multiple(sizes.embed_dim, pair)}"
        )
    if sizes.num_heads % sizes.num_kv_heads:
        nearest = nearest_divisor(sizes.num_heads, sizes.num_kv_heads)
        raise UserError(
            f"{name}.num_kv_heads={sizes.num_kv_heads} does not divide {name}.num_heads="
            f"{sizes.num_heads}; the nearest num_kv_heads is {nearest}"
        )
    if sizes.sliding_window is not None and sizes.sliding_window < 1:
        raise UserError(
            f"{name}.sliding_window={sizes.sliding_window}; use None or at least 1 token"
        )
    if sizes.rope_scaling < 1:
        raise UserError(f"{name}.rope_scaling={sizes.rope_scaling}; use 1.0 (none) or more")
    if not sizes.rope_low_frequency_factor < sizes.rope_high_frequency_factor:
        raise UserError(
            f"{name}.rope_low_frequency_factor={sizes.rope_low_frequency_factor} is not below "
            f"{name}.rope_high_frequency_factor={sizes.rope_high_frequency_factor}; "
            "Llama 3.1 has 1.0 and 4.0"
        )


def frequencies(sizes: Sizes) -> jax.Array:
    """Radians a place for each pair of a head's dimensions, float32 [H/2]."""
    half = sizes.head_dim // 2
    plain = sizes.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    low, high = sizes.rope_low_frequency_factor, sizes.rope_high_frequency_factor
    # How many turns fit into the original context decides how much of the scaling applies.
    turns = sizes.rope_original_context_length * plain / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / sizes.rope_scaling


def projection_parameters(sizes: Sizes) -> int:
    """Parameters of one layer's four projections."""
    return 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim * sizes.embed_dim


def score_flops_per_token(sizes: Sizes, sequence_length: int) -> float:
    """Training FLOPs a token of the products with keys and values: 12 L D (mean keys seen).

    Source: arXiv 2204.02311, appendix B, halved for causal attention. Grouped-query attention
    does the products of all query heads. A window W under T leaves W (1 - W / 2T) keys, where
    all of them are T / 2.
    """
    T = sequence_length
    seen = T if sizes.sliding_window is None else min(sizes.sliding_window, T)
    return 12 * sizes.num_layers * sizes.embed_dim * seen * (1 - seen / (2 * T))


def projections(
    keys: Sequence[jax.Array],
    sizes: Sizes,
    into_residual: Initializer,
) -> tuple[nnx.Param, nnx.Param, nnx.Param, nnx.Param]:
    """The weights of queries [D, N, H], keys and values [D, K, H], and outputs [N, H, D]."""
    D, N, K, H = sizes.embed_dim, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    kv_axes = ("embed", "kv_heads", "head_dim")
    return (
        param(keys[0], (D, N, H), ("embed", "heads", "head_dim"), normal(0.02)),
        param(keys[1], (D, K, H), kv_axes, normal(0.02)),
        param(keys[2], (D, K, H), kv_axes, normal(0.02)),
        param(keys[3], (N, H, D), ("heads", "head_dim", "embed"), into_residual),
    )


def self_attention(
    block: Projections,
    sizes: Sizes,
    h_BTD: jax.Array,
    positions_BT: jax.Array,
    mask: Mask,
    execution: Execution,
    *,
    out: tuple[str, ...],
    cache: tuple[jax.Array, jax.Array] | None = None,
    start: jax.Array | int = 0,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Attention among the normed tokens h, and the extended cache.

    Args:
      block: holds the projections.
      sizes: the model's settings.
      h_BTD: what the norm gave.
      positions_BT: places of the tokens in their documents.
      mask: which keys a query sees, the model's window aside.
      execution: the kernel.
      out: logical axes of the result.
      cache: this layer's keys and values so far, or None.
      start: the place in the cache where the new ones go.
    """
    radians = frequencies(sizes)
    q_BTNH = contract("BTD,DNH->BTNH", h_BTD, block.query)
    k_BTKH = contract("BTD,DKH->BTKH", h_BTD, block.key)
    v_BTKH = contract("BTD,DKH->BTKH", h_BTD, block.value)
    q_BTNH = rotate(q_BTNH, positions_BT, radians)
    k_BTKH = rotate(k_BTKH, positions_BT, radians)
    if cache is not None:
        k_BTKH, v_BTKH = cache = extend_cache(k_BTKH, v_BTKH, cache, start)
    a_BTNH = execution.attention(q_BTNH, k_BTKH, v_BTKH, mask)
    return contract("BTNH,NHD->BTD", a_BTNH, block.out, out), cache
