"""Attention mask: causal, window, segments, and score transformations.

Letters: B batch, T query length, S key length, N query heads, C copies.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.nn.attention.patterns import Pattern, segment_positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees; conditions are combined. And transformations of its scores.

    Attributes:
      causal: a query at position t sees keys at positions <= t.
      window: a query at position t sees keys at positions > t - window; None is no limit.
      segment_ids_BT, segment_ids_BS: documents of queries and keys: a query sees its own document.
      query_start: the position of the first query among the keys, where these come from a key-value
        cache; None where there is no cache and queries and keys start together.
      bias_CNTS: float32, bias of the scores of each head, such as relative positions (arXiv
        1910.10683); None: none. Each of C equal copies is for 1/C of the rows.
      softcap: the bound of the scores (see `apply_softcap`), applied before masking; None: none.
      sinks_N: float32, each head's attention sink: the score of a key without a value
        that every query sees (arXiv 2309.17453, equation 2); None: none.
      pattern: which keys a query sees by the positions of both in their document; None: all.
    """

    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    segment_ids_BT: Int[Array, "B T"] | None = None
    segment_ids_BS: Int[Array, "B S"] | None = None
    query_start: Int[Array, ""] | int | None = None
    bias_CNTS: Float[Array, "C N T S"] | None = None
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks_N: Float[Array, " N"] | None = None
    pattern: Pattern | None = dataclasses.field(default=None, metadata={"static": True})

    def visible(self, T: int, S: int) -> jax.Array | None:
        """Booleans [1 or B, 1, T, S], the pattern aside; None where every query sees every key."""
        query = jnp.arange(T)[:, None] + (0 if self.query_start is None else self.query_start)
        key = jnp.arange(S)[None, :]
        seen = None
        if self.causal:
            seen = (key <= query)[None, None]
        if self.window is not None:
            near = (key > query - self.window)[None, None]
            seen = near if seen is None else seen & near
        if self.segment_ids_BT is not None:
            assert self.segment_ids_BS is not None, "segment ids of the queries but not of the keys"
            same = self.segment_ids_BT[:, :, None] == self.segment_ids_BS[:, None, :]
            seen = same[:, None] if seen is None else seen & same[:, None]
        return seen

    def times(self, T: int, S: int, N: int) -> jax.Array | None:
        """Multiplicity of each key in a query's softmax by the pattern, [1 or B, 1 or N, T, S];
        None: 1."""
        if self.pattern is None:
            return None
        key_BS = segment_positions(self.segment_ids_BS, S)
        start = 0 if self.query_start is None else self.query_start
        query_BT = jax.lax.dynamic_slice_in_dim(key_BS, start, T, axis=1)
        return self.pattern.times(query_BT, key_BS, N)


def apply_softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """Apply the softcap cap tanh(x / cap), in float32, to x's dtype; x itself where cap is None.

    Source: Gemma 2, arXiv 2408.00118, section 2.
    """
    if cap is None:
        return x
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


def slope(capped: jax.Array, cap: float | None) -> jax.Array | float:
    """Derivative of `apply_softcap` from its result: 1 - (capped / cap)^2; 0 for masked keys."""
    if cap is None:
        return 1.0
    return 1 - jnp.square(jnp.clip(capped / cap, -1, 1))
