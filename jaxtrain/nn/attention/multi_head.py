"""Multi-head attention: with one QKV weight (GPT-2), or with separate ones (cross-attention).

Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2. Positions are in the embedding, or
in the mask's bias.
Letters: B batch, T (query) length, S key length, D embed, N heads, H head_dim.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.facts import AttentionFacts
from jaxtrain.nn.kv_cache import Cached, LayerCache, extend_cache
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.parameters import Weights, constant, normal, param
from jaxtrain.nn.remat import name_activation
from jaxtrain.parallel.gathering import gather


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHead:
    """Self-attention with biases and a fused QKV weight, as in GPT-2.

    Attributes:
      embed_dim: width of the residual stream.
      num_heads: heads.
      head_dim: width of each.
      residual_stddev: standard deviation of the output projection at initialization.
      pattern: which keys a query sees; None: all before it.
      causal: whether the objective's mask is causal: for `facts` and FLOPs.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    residual_stddev: float
    pattern: Pattern | None = None
    causal: bool = True

    num_keys: ClassVar[int] = 2

    @property
    def facts(self) -> AttentionFacts:
        """Facts: as many kv heads as query heads."""
        N, H = self.num_heads, self.head_dim
        return AttentionFacts(
            num_heads=N, num_kv_heads=N, key_dim=H, value_dim=H, causal=self.causal,
            pattern=self.pattern,
        )  # fmt: skip

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values."""
        return self.facts.keys_and_values

    def weights(self, keys: jax.Array) -> Weights:
        """QKV projection [3, D, N, H], and output projection [N, H, D]."""
        D, N, H = self.embed_dim, self.num_heads, self.head_dim
        key_qkv, key_out = keys
        axes, into_residual = ("qkv", "embed", "heads", "head_dim"), normal(self.residual_stddev)
        return {
            "qkv": param(key_qkv, (3, D, N, H), axes, normal(0.02)),
            "qkv_bias": param(key_qkv, (3, N, H), ("qkv", "heads", "head_dim"), constant(0.0)),
            "out": param(key_out, (N, H, D), ("heads", "head_dim", "embed"), into_residual),
            "out_bias": param(key_out, (D,), ("vector",), constant(0.0)),
        }

    def matmul_parameters(self) -> int:
        """Matmul parameters: all but the biases."""
        return 4 * self.num_heads * self.head_dim * self.embed_dim

    def score_flops_per_token(self, sequence_length: int) -> float:
        """12 T N H (arXiv 2204.02311, appendix B), halved if attention is causal.

        With a pattern 12 N H times the mean number of keys that a query sees.
        """
        if self.pattern is not None:
            keys = self.pattern.mean_keys(sequence_length)
            return 12 * self.num_heads * self.head_dim * keys
        return (6 if self.causal else 12) * sequence_length * self.num_heads * self.head_dim

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Self-attention over the normalized stream; arguments and results as in
        `block.Attends`."""
        del positions_BT
        (qkv,) = execution.project(h_BTD, ("BTD,PDNH->PBTNH", own["qkv"]))
        qkv = qkv + gather(own["qkv_bias"])[:, None, None].astype(h_BTD.dtype)
        # Split rather than indexed: the gradients are then concatenated in one pass.
        parts = zip(jnp.split(qkv, 3), ("query", "key", "value"), strict=True)
        q_BTNH, k_BTNH, v_BTNH = (name_activation(part[0], name) for part, name in parts)
        if cache is not None:
            k_BTNH, v_BTNH = cache = extend_cache(k_BTNH, v_BTNH, cache, start)
        mask = dataclasses.replace(mask, pattern=self.pattern)
        a_BTNH = execution.attention(q_BTNH, k_BTNH, v_BTNH, mask)
        a_BTD = execution.contract("BTNH,NHD->BTD", a_BTNH, own["out"], out)
        return add_bias(a_BTD, own["out_bias"]), cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projections:
    """The weights of multi-head attention.

    Attributes:
      embed_dim: width of inputs and outputs.
      num_heads: heads.
      head_dim: width of each.
      residual_stddev: standard deviation of the output projection at initialization.
      stddev: standard deviation of the others.
      query_stddev: standard deviation of the query projection.
      biases: whether each projection has a bias.
      query_scale: factor of the queries, before the scores are divided by sqrt(H).
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    residual_stddev: float
    stddev: float = 0.02
    query_stddev: float = 0.02
    biases: bool = True
    query_scale: float = 1.0

    num_keys: ClassVar[int] = 4

    @property
    def facts(self) -> AttentionFacts:
        """Of a query that sees all keys."""
        N, H = self.num_heads, self.head_dim
        return AttentionFacts(num_heads=N, num_kv_heads=N, key_dim=H, value_dim=H, causal=False)

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values."""
        shape, axes = (self.num_heads, self.head_dim), ("heads", "head_dim")
        return (Cached(shape=shape, axes=axes, every_token=True),) * 2

    def weights(self, keys: jax.Array) -> Weights:
        """Query, key and value projections [D, N, H], and output projection [N, H, D]."""
        D, N, H = self.embed_dim, self.num_heads, self.head_dim
        shape, axes = (D, N, H), ("embed", "heads", "head_dim")
        into_residual = normal(self.residual_stddev)
        own = {
            "query": param(keys[0], shape, axes, normal(self.query_stddev)),
            "key": param(keys[1], shape, axes, normal(self.stddev)),
            "value": param(keys[2], shape, axes, normal(self.stddev)),
            "out": param(keys[3], (N, H, D), ("heads", "head_dim", "embed"), into_residual),
        }
        if self.biases:
            zero = constant(0.0)
            for name in ("query", "key", "value"):
                own[f"{name}_bias"] = param(keys[0], (N, H), ("heads", "head_dim"), zero)
            own["out_bias"] = param(keys[0], (D,), ("vector",), zero)
        return own

    def matmul_parameters(self) -> int:
        """Matmul parameters: all but the biases."""
        return 4 * self.num_heads * self.head_dim * self.embed_dim

    def score_flops_per_token(self, sequence_length: int) -> float:
        """12 S N H: every key of a sequence of S is scored."""
        return 12 * sequence_length * self.num_heads * self.head_dim

    def of(
        self, names: tuple[str, ...], own: Weights, x_BTD: jax.Array, execution: Execution
    ) -> list[jax.Array]:
        """Return the queries, keys or values [B, T, N, H] of a sequence; `names` are the
        weights'."""
        products = [("BTD,DNH->BTNH", own[name]) for name in names]

        def finish(name: str, x_BTNH: jax.Array) -> jax.Array:
            if self.biases:
                x_BTNH = add_bias(x_BTNH, own[f"{name}_bias"])
            x_BTNH = name_activation(x_BTNH, name)
            return x_BTNH * self.query_scale if name == "query" else x_BTNH

        return [*map(finish, names, execution.project(x_BTD, *products))]

    def back(
        self, own: Weights, a_BTNH: jax.Array, execution: Execution, out: tuple[str, ...]
    ) -> jax.Array:
        """Output projection of the heads, [B, T, D], sharded by `out`."""
        a_BTD = execution.contract("BTNH,NHD->BTD", a_BTNH, own["out"], out)
        return add_bias(a_BTD, own["out_bias"]) if self.biases else a_BTD


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAttention(Projections):
    """Self-attention: a part of a block, `block.Attends`."""

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Self-attention; arguments and results as in `block.Attends`."""
        del positions_BT
        q, k, v = self.of(("query", "key", "value"), own, h_BTD, execution)
        if cache is not None:
            k, v = cache = extend_cache(k, v, cache, start)
        return self.back(own, execution.attention(q, k, v, mask), execution, out), cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttention(Projections):
    """Cross-attention of a sequence to another one, the memory."""

    def keys_and_values(
        self, own: Weights, memory_BSD: jax.Array, execution: Execution
    ) -> LayerCache:
        """Return the memory's keys and values, both [B, S, N, H]: the same for every query."""
        key, value = self.of(("key", "value"), own, memory_BSD, execution)
        return key, value

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        keys_and_values: LayerCache,
        mask: Mask,
        execution: Execution,
        *,
        out: tuple[str, ...],
    ) -> jax.Array:
        """Return the update of the residual stream [B, T, D].

        Args:
          own: the parameters.
          h_BTD: the queries' inputs, sharded like the stream.
          keys_and_values: the memory's.
          mask: which of them a query sees.
          execution: the kernel, and the precision of the matmuls.
          out: logical axes of the result.
        """
        (q_BTNH,), (keys, values) = self.of(("query",), own, h_BTD, execution), keys_and_values
        return self.back(own, execution.attention(q_BTNH, keys, values, mask), execution, out)
