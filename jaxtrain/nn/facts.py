"""Facts of attention, experts and layers for kernels, caches, checks and plans."""

import dataclasses

from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.kv_cache import Cached


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """Facts of a model's attention for kernels, caches and plans.

    Attributes:
      num_heads: query heads.
      num_kv_heads: key-value heads.
      key_dim: width of one head of the queries and keys.
      value_dim: width of one head of the values.
      window: tokens that a query sees, up to and including its own; None is all of them.
      causal: whether a query sees no later token.
      window_share: the fraction of the layers that have the window; the others see all tokens.
      biased: whether scores have a bias, such as relative positions.
      softcap: the bound of soft-capped scores; None is none.
      sinks: whether there are attention sinks.
      pattern: which keys a query sees by position; None is all.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    causal: bool = True
    window_share: float = 1.0
    biased: bool = False
    softcap: float | None = None
    sinks: bool = False
    pattern: Pattern | None = None

    @property
    def layers_differ(self) -> bool:
        """Whether only some layers have the window."""
        return self.window is not None and self.window_share < 1

    def visible_share(self, length: int) -> float:
        """Fraction of the query-key pairs of a sequence that the mask leaves visible, the mean
        over layers; documents and patterns aside. Used by MFU: a window W under T leaves W (1 -
        W / 2T) keys of T, a causal mask T / 2 (arXiv 2204.02311, appendix B)."""
        if not self.causal:
            return 1.0
        near = min(self.window or length, length) / length
        share = self.window_share if self.layers_differ else 1.0
        return share * near * (1 - near / 2) + (1 - share) / 2

    @property
    def keys_and_values(self) -> tuple[Cached, Cached]:
        """Cached arrays of a layer that caches its keys and values."""
        keys, values = (
            Cached(shape=(self.num_kv_heads, dim), axes=("kv_heads", "head_dim"), every_token=True)
            for dim in (self.key_dim, self.value_dim)
        )
        return keys, values


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsFacts:
    """Facts of a model's experts for checks and plans.

    Attributes:
      count: experts of a layer.
      per_token: experts per token.
      capacity_factor: as in `nn.moe.experts.Experts`; None is dropless.
      bias_speed: step size of the router biases; None: it has none.
    """

    count: int
    per_token: int
    capacity_factor: float | None = None
    bias_speed: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """Facts of a layer for checks, plans and generation.

    Attributes:
      attention: its attention; None: it has none.
      experts: its experts; None: it has none.
      cached: its cached arrays; empty: it cannot generate.
    """

    attention: AttentionFacts | None = None
    experts: ExpertsFacts | None = None
    cached: tuple[Cached, ...] = ()
