"""attention(q, k, v, mask): the reference and every kernel behind one signature.

Letters: B batch, T query length, S key length, N query heads, K kv heads, G = N / K, H head_dim.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.config import configurable

Kernel = Literal["reference", "xla"]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Which attention kernel runs.

    Attributes:
      kernel: 'reference' (plain einsums, every mask), 'xla' (jax.nn.dot_product_attention).
    """

    kernel: Kernel = "xla"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees; all conditions hold together.

    Attributes:
      causal: a query at place t sees keys at places <= t.
      window: a query at place t sees keys at places > t - window; None is no limit.
      segment_ids_BT, segment_ids_BS: documents of queries and keys: a query sees its own document.
      query_start: the place of the first query among the keys (what a key-value cache holds).
    """

    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    segment_ids_BT: Int[Array, "B T"] | None = None
    segment_ids_BS: Int[Array, "B S"] | None = None
    query_start: Int[Array, ""] | int = 0

    def visible(self, T: int, S: int) -> jax.Array | None:
        """Booleans [1 or B, 1, T, S]; None where every query sees every key."""
        query = jnp.arange(T)[:, None] + self.query_start
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


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask: Mask,
    *,
    kernel: str = "reference",
) -> Float[Array, "B T N H"]:
    """softmax(q k / sqrt(H)) v over the visible keys, softmax in float32, N a multiple of K."""
    return _KERNELS[kernel](q_BTNH, k_BSKH, v_BSKH, mask)


def _reference(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    logits = logits * H**-0.5
    visible = mask.visible(T, S)
    if visible is not None:
        logits = jnp.where(visible[:, :, None], logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH).reshape(B, T, N, H)


def _xla(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    visible = mask.visible(q_BTNH.shape[1], k_BSKH.shape[1])
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=visible, implementation="xla"
    )


_KERNELS = {"reference": _reference, "xla": _xla}
