"""Multi-head attention with biases and a fused QKV weight.

Source: Vaswani et al. 2017 (arXiv 1706.03762), laid out as GPT-2 has it.
Letters: B batch, T length, D embed, N heads, H head_dim.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.cache import Cached, extend_cache
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.facts import AttentionFacts
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.parameters import Weights, constant, normal, param
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.language_model import LayerCache
from jaxtrain.parallel.gathering import gather


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHead:
    """As many heads of keys and values as of queries; positions come with the embedding.

    Attributes:
      embed_dim: width of the residual stream.
      num_heads: heads.
      head_dim: width of each.
      residual_stddev: spread of the weight that makes the result.
      pattern: which keys a query sees; None: all before it.
      causal: whether the model's mask is: for `facts` and FLOPs, as the objective masks.
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
        """With as many heads of keys and values as of queries."""
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
        """Projections to queries, keys and values [3, D, N, H], and back [N, H, D]."""
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
        """All but the biases."""
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
        """Attention among the normed tokens; arguments and results as in `block.Attends`."""
        del positions_BT
        (qkv,) = execution.project(h_BTD, ("BTD,PDNH->PBTNH", own["qkv"]))
        qkv = qkv + gather(own["qkv_bias"])[:, None, None].astype(h_BTD.dtype)
        # Split rather than indexed: the gradients are then put together in one pass.
        parts = zip(jnp.split(qkv, 3), ("query", "key", "value"), strict=True)
        q_BTNH, k_BTNH, v_BTNH = (name_activation(part[0], name) for part, name in parts)
        if cache is not None:
            k_BTNH, v_BTNH = cache = extend_cache(k_BTNH, v_BTNH, cache, start)
        mask = dataclasses.replace(mask, pattern=self.pattern)
        a_BTNH = execution.attention(q_BTNH, k_BTNH, v_BTNH, mask)
        a_BTD = execution.contract("BTNH,NHD->BTD", a_BTNH, own["out"], out)
        return add_bias(a_BTD, own["out_bias"]), cache
