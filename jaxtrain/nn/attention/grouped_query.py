"""Grouped-query attention (arXiv 2305.13245) with rotary embeddings (RoPE).

Letters: B batch, T length, D embed, N query heads, K kv heads, H head_dim.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.cache import extend_cache
from jaxtrain.nn.execution import Execution, branch_scope
from jaxtrain.nn.facts import AttentionFacts
from jaxtrain.nn.layers import Norm, add_bias, rotate
from jaxtrain.nn.parameters import Weights, add_prefix, constant, normal, param, under
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.language_model import LayerCache
from jaxtrain.nn.transformer.rotary import Rotations
from jaxtrain.parallel.gathering import gather


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Layers that see only what is near (arXiv 2004.05150), among others that see everything.

    Attributes:
      layers: which of a model's layers those are.
      window: tokens that their queries see back, itself included.
      rotary: how positions turn their queries and keys, with the scale of the others.
    """

    layers: tuple[bool, ...]
    window: int
    rotary: Rotations

    @property
    def share(self) -> float:
        """The part of the layers that they are."""
        return sum(self.layers) / len(self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """Each key-value head serves num_heads / num_kv_heads query heads.

    Attributes:
      embed_dim: width of the residual stream.
      num_heads, num_kv_heads: heads of queries, and of keys and values.
      head_dim: width of each.
      rotary: how positions turn queries and keys.
      residual_stddev: spread of the weight that makes the result.
      window: tokens a query sees back, itself included; None is all of them.
      biases: whether the projections to queries, keys and values have biases (Qwen 2).
      norm: of each head of the queries and of the keys before they are turned, each with
        parameters of its own (QK-norm, arXiv 2302.05442); None: there is none.
      turned: dimensions of each head that positions turn, its first ones; None: all of them.
      query_scale: what queries are multiplied by, beside the 1 / sqrt(head_dim) of all attention.
      local: which layers have another window and other rotations than these; None: all are alike.
      pattern: which of the tokens before it a query sees, in place of a window; None: all.
      softcap: the bound that scores are flattened towards; None: none.
      sinks: whether each head has the score of a key without a value, learned (arXiv 2309.17453).
      out_bias: whether the projection back has a bias.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotations
    residual_stddev: float
    window: int | None = None
    biases: bool = False
    norm: Norm | None = None
    turned: int | None = None
    query_scale: float = 1.0
    local: Local | None = None
    pattern: Pattern | None = None
    softcap: float | None = None
    sinks: bool = False
    out_bias: bool = False

    num_keys: ClassVar[int] = 4

    @property
    def facts(self) -> AttentionFacts:
        """Of all layers: the window is that of the local ones, if there are such."""
        local = self.local
        return AttentionFacts(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            window=self.window if local is None else local.window,
            window_share=1.0 if local is None else local.share,
            pattern=self.pattern,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def weights(self, keys: jax.Array) -> Weights:
        """Projections to queries [D, N, H], keys and values [D, K, H], and back [N, H, D]."""
        D, N, K, H = self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim
        kv_axes = ("embed", "kv_heads", "head_dim")
        into_residual = normal(self.residual_stddev)
        own = {
            "query": param(keys[0], (D, N, H), ("embed", "heads", "head_dim"), normal(0.02)),
            "key": param(keys[1], (D, K, H), kv_axes, normal(0.02)),
            "value": param(keys[2], (D, K, H), kv_axes, normal(0.02)),
            "out": param(keys[3], (N, H, D), ("heads", "head_dim", "embed"), into_residual),
        }
        if self.biases:
            zero = constant(0.0)
            own |= {
                "query_bias": param(keys[0], (N, H), ("heads", "head_dim"), zero),
                "key_bias": param(keys[1], (K, H), ("kv_heads", "head_dim"), zero),
                "value_bias": param(keys[2], (K, H), ("kv_heads", "head_dim"), zero),
            }
        if self.out_bias:
            own["out_bias"] = param(keys[3], (D,), ("vector",), constant(0.0))
        if self.sinks:
            own["sinks"] = param(keys[0], (N,), ("heads",), constant(0.0))
        if self.norm is not None:
            for name, key in (("query_norm", keys[0]), ("key_norm", keys[1])):
                own |= add_prefix(name, self.norm.weights(key))
        return own

    def matmul_parameters(self) -> int:
        """All but biases and norms."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.embed_dim

    def score_flops_per_token(self, sequence_length: int) -> float:
        """12 N H times the mean number of keys that a query sees.

        Source: arXiv 2204.02311, appendix B, halved for causal attention. Grouped-query attention
        does the products of all query heads. A window W under T leaves W (1 - W / 2T) keys, where
        all of them are T / 2. The mean over layers, where some of them have a window. A pattern
        leaves the mean number of keys that it shows.
        """
        T = sequence_length
        if self.pattern is not None:
            return 12 * self.num_heads * self.head_dim * self.pattern.mean_keys(T)

        def keys(window: int | None) -> float:
            seen = T if window is None else min(window, T)
            return seen * (1 - seen / (2 * T))

        mean = keys(self.window)
        if self.local is not None:
            near = self.local.share
            mean = near * keys(self.local.window) + (1 - near) * mean
        return 12 * self.num_heads * self.head_dim * mean

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
        q_BTNH, k_BTKH, v_BTKH = execution.project(
            h_BTD,
            ("BTD,DNH->BTNH", own["query"]),
            ("BTD,DKH->BTKH", own["key"]),
            ("BTD,DKH->BTKH", own["value"]),
        )
        if self.biases:
            q_BTNH = add_bias(q_BTNH, own["query_bias"])
            k_BTKH = add_bias(k_BTKH, own["key_bias"])
            v_BTKH = add_bias(v_BTKH, own["value_bias"])
        q_BTNH, k_BTKH = name_activation(q_BTNH, "query"), name_activation(k_BTKH, "key")
        v_BTKH = name_activation(v_BTKH, "value")
        if self.norm is not None:
            q_BTNH = self.norm(under("query_norm", own), q_BTNH)
            k_BTKH = self.norm(under("key_norm", own), k_BTKH)
        is_local, radians = self._of_layer(execution)
        scale = self.rotary.scale
        q_BTNH = self._rotate(q_BTNH, positions_BT, radians, scale * self.query_scale)
        k_BTKH = self._rotate(k_BTKH, positions_BT, radians, scale)
        if cache is not None:
            k_BTKH, v_BTKH = cache = extend_cache(k_BTKH, v_BTKH, cache, start)

        sinks_N = gather(own["sinks"]).astype(jnp.float32) if self.sinks else None

        def attend(window: int | None) -> jax.Array:
            own_mask = dataclasses.replace(
                mask, window=window, pattern=self.pattern, softcap=self.softcap, sinks_N=sinks_N
            )
            return execution.attention(q_BTNH, k_BTKH, v_BTKH, own_mask)

        def branch(scope: str, window: int | None) -> Callable[[], jax.Array]:
            return jax.named_scope(scope)(lambda: attend(window))

        if self.local is None:
            a_BTNH = attend(self.window)
        else:
            # Two programs and no window that is a number of the program's: kernels that skip what
            # is not seen know what that is when they are compiled.
            layers, near = len(self.local.layers), sum(self.local.layers)
            a_BTNH = jax.lax.cond(
                is_local,
                branch(branch_scope(near, layers), self.local.window),
                branch(branch_scope(layers - near, layers), self.window),
            )
        y_BTD = execution.contract("BTNH,NHD->BTD", a_BTNH, own["out"], out)
        return add_bias(y_BTD, own["out_bias"]) if self.out_bias else y_BTD, cache

    def _of_layer(self, execution: Execution) -> tuple[jax.Array | bool, jax.Array]:
        """Whether a layer is local, and its frequencies."""
        width = self.turned or self.head_dim
        radians = self.rotary.frequencies(width)
        if self.local is None:
            return False, radians
        assert execution.layer is not None, "layers that differ need their number"
        is_local = jnp.asarray(self.local.layers)[execution.layer]
        return is_local, jnp.where(is_local, self.local.rotary.frequencies(width), radians)

    def _rotate(
        self, x_BTNH: jax.Array, positions_BT: jax.Array, radians: jax.Array, scale: float
    ) -> jax.Array:
        if self.turned is None:
            return rotate(x_BTNH, positions_BT, radians, scale=scale)
        turned = rotate(x_BTNH[..., : self.turned], positions_BT, radians, scale=scale)
        # What is not turned is not scaled either, as in the authors' code of Phi and GPT-NeoX.
        return jnp.concatenate([turned, x_BTNH[..., self.turned :]], axis=-1)
