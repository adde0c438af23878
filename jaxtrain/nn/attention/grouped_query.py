"""Grouped-query attention (arXiv 2305.13245) with rotary embeddings (RoPE).

Letters: B batch, T length, D embed, N query heads, K kv heads, H head_dim.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import (
    UserError,
    nearest_divisor,
    nearest_multiple,
    require_at_least,
    require_positive,
)
from jaxtrain.nn.attention import patterns
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.attention.rotary import Rotations
from jaxtrain.nn.execution import Execution, branch_scope
from jaxtrain.nn.facts import AttentionFacts
from jaxtrain.nn.kv_cache import Cached, LayerCache, extend_cache
from jaxtrain.nn.layers import add_bias, rotate
from jaxtrain.nn.normalization import Norm, RMSNorm
from jaxtrain.nn.parameters import (
    Weights,
    add_prefix,
    constant,
    normal,
    param,
    residual_stddev,
    under,
)
from jaxtrain.nn.remat import name_activation
from jaxtrain.parallel.gathering import gather


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Local layers with a sliding window (arXiv 2004.05150), among global ones.

    Attributes:
      layers: which of a model's layers are local.
      window: tokens that their queries see, up to and including their own.
      rotary: their rotary embedding, with the scale of the others.
    """

    layers: tuple[bool, ...]
    window: int
    rotary: Rotations

    @property
    def share(self) -> float:
        """Fraction of the layers that are local."""
        return sum(self.layers) / len(self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """Grouped-query attention: each kv head serves num_heads / num_kv_heads query heads.

    Attributes:
      embed_dim: width of the residual stream.
      num_heads, num_kv_heads: heads of queries, and of keys and values.
      head_dim: width of each.
      rotary: the rotary embedding.
      residual_stddev: standard deviation of the output projection at initialization.
      window: tokens that a query sees, up to and including its own; None is all of them.
      biases: whether the projections to queries, keys and values have biases (Qwen 2).
      norm: of each head of the queries and of the keys before rotation, each with
        its own parameters (QK-norm, arXiv 2302.05442); None: there is none.
      turned: leading dimensions of each head that are rotated; None: all of them.
      query_scale: factor of the queries, in addition to the usual 1 / sqrt(head_dim).
      local: the local layers, with their own window and rotations; None: all layers are alike.
      pattern: which of the previous tokens a query sees, instead of a window; None: all.
      softcap: the bound of soft-capped scores; None: none.
      sinks: whether each head has a learned attention sink (arXiv 2309.17453).
      out_bias: whether the output projection has a bias.
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
        """Facts of all layers: the window is that of local ones, if any."""
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

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values."""
        return self.facts.keys_and_values

    def weights(self, keys: jax.Array) -> Weights:
        """Query [D, N, H], key and value [D, K, H] and output [N, H, D] projections."""
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
        """Matmul parameters: all but biases and norms."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.embed_dim

    def score_flops_per_token(self, sequence_length: int) -> float:
        """12 N H times the mean number of keys that a query sees.

        Source: arXiv 2204.02311, appendix B, halved for causal attention. Grouped-query attention
        computes the scores of all query heads. A window W under T leaves W (1 - W / 2T) keys, where
        all of them are T / 2; averaged over layers if only some have a window. A pattern
        leaves its mean number of visible keys.
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
        """Self-attention over the normalized stream; arguments and results as in
        `block.Attends`."""
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
            # Two branches, not a dynamic window: kernels that skip masked
            # blocks need a static one.
            layers, near = len(self.local.layers), sum(self.local.layers)
            a_BTNH = jax.lax.cond(
                is_local,
                branch(branch_scope(near, layers), self.local.window),
                branch(branch_scope(layers - near, layers), self.window),
            )
        y_BTD = execution.contract("BTNH,NHD->BTD", a_BTNH, own["out"], out)
        return add_bias(y_BTD, own["out_bias"]) if self.out_bias else y_BTD, cache

    def _of_layer(self, execution: Execution) -> tuple[jax.Array | bool, jax.Array]:
        """Return whether a layer is local, and its frequencies."""
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
        # Dimensions that are not rotated are not scaled either, as in the authors' code of Phi and
        # GPT-NeoX.
        return jnp.concatenate([turned, x_BTNH[..., self.turned :]], axis=-1)


class GroupedQuerySizes(Protocol):
    """Sizes of `grouped_query`, each documented at `models.transformers.llama.Llama`.

    A model may have a `head_dim` too, the width of each head; None is embed_dim / num_heads.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


def grouped_query(
    sizes: GroupedQuerySizes,
    rotary: Rotations,
    *,
    window: int | None = None,
    global_every: int | None = None,
    local_rotary: Rotations | None = None,
    norm: RMSNorm | None = None,
    fraction: float = 1.0,
    **more: Any,
) -> GroupedQuery:
    """Return the grouped-query attention of a model.

    Args:
      sizes: the model's sizes.
      rotary: its rotary embeddings.
      window: tokens that a query sees, up to and including its own; None is all of them.
      global_every: every n-th layer is global, and only the others have the window; None: all
        layers are alike.
      local_rotary: the rotary embeddings of the local layers; None: the same.
      norm: of each head of queries and keys; None: there is none.
      fraction: the rotated fraction of each head, its first dimensions.
      **more: other attributes of `GroupedQuery`.
    """
    width, local = _head_dim(sizes), None
    if global_every is not None:
        assert window is not None, "layers differ by their window"
        numbers = range(1, sizes.num_layers + 1)
        local = Local(
            layers=tuple(number % global_every != 0 for number in numbers),
            window=window,
            rotary=local_rotary or rotary,
        )
    return GroupedQuery(
        embed_dim=sizes.embed_dim,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=width,
        rotary=rotary,
        residual_stddev=residual_stddev(sizes.num_layers),
        window=window if local is None else None,
        norm=None if norm is None else dataclasses.replace(norm, dim=width),
        turned=None if fraction == 1 else int(width * fraction),
        local=local,
        **more,
    )


def _head_dim(sizes: Any) -> int:
    width = getattr(sizes, "head_dim", None)
    return sizes.embed_dim // sizes.num_heads if width is None else width


# Settings that must be at least 1, and those that must be positive, in models that have them.
_COUNTS = (
    "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim",
    "context_length", "rope_original_context_length",
)  # fmt: skip
_POSITIVE = ("rope_theta", "norm_eps")


def validate_grouped_query(sizes: Any) -> None:
    """Raise UserError if one of a decoder's settings is out of range or does not fit the others.

    Args:
      sizes: a model's settings, a subset of those of `models.transformers.llama.Llama`.
    """
    name, fields = type(sizes).__name__, vars(sizes)
    require_at_least(1, sizes, *(setting for setting in _COUNTS if setting in fields))
    require_positive(sizes, *(setting for setting in _POSITIVE if setting in fields))
    if fields.get("global_every") is not None:
        require_at_least(1, sizes, "global_every")
    for setting in ("attention_softcap", "logit_softcap"):
        if fields.get(setting) is not None:
            require_positive(sizes, setting)
    for message in itertools.chain(_validate_heads(name, fields), _validate_rope(name, fields)):
        raise UserError(message)


def _validate_heads(name: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if the heads, their width, the window or the pattern do not fit."""
    embed_dim, num_heads = fields["embed_dim"], fields["num_heads"]
    head_dim, num_kv_heads = fields.get("head_dim"), fields["num_kv_heads"]
    # Rotary embedding pairs the halves of a head, so its width must be even.
    if head_dim is not None and (head_dim < 2 or head_dim % 2):
        yield (
            f"{name}.head_dim={head_dim} is not an even number above 0; the nearest is "
            f"{nearest_multiple(head_dim, 2)}"
        )
    if head_dim is None and embed_dim % (2 * num_heads):
        yield (
            f"{name}.embed_dim={embed_dim} does not divide by twice {name}.num_heads="
            f"{num_heads}; the nearest embed_dim is {nearest_multiple(embed_dim, 2 * num_heads)}"
        )
    if num_heads % num_kv_heads:
        yield (
            f"{name}.num_kv_heads={num_kv_heads} does not divide {name}.num_heads={num_heads}; the "
            f"nearest num_kv_heads is {nearest_divisor(num_heads, num_kv_heads)}"
        )
    window, pattern = fields.get("sliding_window"), fields.get("attention_pattern")
    if window is not None and window < 1:
        yield f"{name}.sliding_window={window}; use None or at least 1 token"
    if window is not None and pattern is not None:
        yield (
            f"{name}.sliding_window={window} with {name}.attention_pattern=@"
            f"{type(pattern).__name__}(): use one of them; @LongformerPattern() has a window"
        )
    yield from patterns.validate(pattern, num_heads=num_heads, model=name)


def _validate_rope(name: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if the settings of rotary embeddings do not fit."""
    scaling, fraction = fields.get("rope_scaling", 1.0), fields.get("rope_fraction", 1.0)
    if scaling < 1:
        yield f"{name}.rope_scaling={scaling}; use 1.0 (none) or more"
    head_dim = fields.get("head_dim") or fields["embed_dim"] // fields["num_heads"]
    turned = int(head_dim * fraction)
    if not 0 < fraction <= 1 or turned < 2 or turned % 2:
        yield (
            f"{name}.rope_fraction={fraction} rotates {turned} of the {head_dim} dimensions of "
            "a head; use 1.0 (all) or a fraction that gives an even number above 0"
        )
    rope_type = fields.get("rope_type", "llama3")
    if rope_type != "llama3" and scaling == 1:
        yield (
            f"{name}.rope_type={rope_type!r} has no effect with {name}.rope_scaling=1.0; use "
            "the ratio of the longer context to the original one, such as 4.0, or 'llama3'"
        )
    low, high = (fields.get(f"rope_{end}_frequency_factor") for end in ("low", "high"))
    if low is not None and high is not None and not 0 < low < high:
        yield (
            f"{name}.rope_low_frequency_factor={low} is not below "
            f"{name}.rope_high_frequency_factor={high} and above 0; Llama 3.1 has 1.0 and 4.0, "
            "YaRN 1.0 and 32.0"
        )
