"""Facts of attention, experts and layers, which kernels, caches, checks and plans ask for."""

import dataclasses

from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.nn.cache import Cached


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """What kernels, caches and plans ask of a model's attention.

    Attributes:
      num_heads: query heads.
      num_kv_heads: key-value heads.
      key_dim: width of one head of the queries and keys.
      value_dim: width of one head of the values.
      window: tokens that a query sees back, itself included; None is all of them.
      causal: whether a query sees no later token.
      window_share: the part of the layers that have the window; the others see all tokens.
      biased: whether something is added to the scores, as relative positions are.
      softcap: the bound that scores are flattened towards; None is none.
      sinks: whether a part of each softmax goes nowhere.
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
        """The part of the pairs of a query and a key in a sequence that the mask leaves, the mean
        over layers; documents and patterns aside. What MFU counts: a window W under T leaves W (1 -
        W / 2T) keys of T, a causal mask T / 2 (arXiv 2204.02311, appendix B)."""
        if not self.causal:
            return 1.0
        near = min(self.window or length, length) / length
        share = self.window_share if self.layers_differ else 1.0
        return share * near * (1 - near / 2) + (1 - share) / 2

    @property
    def keys_and_values(self) -> tuple[Cached, Cached]:
        """What a layer keeps in generation where it keeps its keys and values themselves."""
        keys, values = (
            Cached(shape=(self.num_kv_heads, dim), axes=("kv_heads", "head_dim"), every_token=True)
            for dim in (self.key_dim, self.value_dim)
        )
        return keys, values


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsFacts:
    """What checks and plans ask of a model's experts.

    Attributes:
      count: experts of a layer.
      per_token: how many of them a token goes through.
      capacity_factor: as in `nn.moe.experts.Experts`; None is dropless.
      bias_speed: by how much biases of the router are moved after each step; None: it has none.
    """

    count: int
    per_token: int
    capacity_factor: float | None = None
    bias_speed: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What checks, plans and generation ask of a layer.

    Attributes:
      attention: its attention; None: it has none.
      experts: its experts; None: it has none.
      cached: the arrays that it keeps of the tokens so far; empty: it cannot generate.
    """

    attention: AttentionFacts | None = None
    experts: ExpertsFacts | None = None
    cached: tuple[Cached, ...] = ()
