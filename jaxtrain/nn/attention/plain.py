"""Attention in operations that XLA splits over devices by itself: every mask, all scores at once.

Letters: B batch, T query length, S key length, N query heads, K kv heads, G = N / K, H head_dim.
"""

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask


def reference(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """Einsums in float32, whatever the arrays' dtype."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    # Upcast, not preferred_element_type: the CPU has no float16 products.
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q.reshape(B, T, K, N // K, H), k) * H**-0.5
    if mask.bias_NTS is not None:
        logits += mask.bias_NTS.astype(jnp.float32).reshape(K, N // K, T, S)
    visible = mask.visible(T, S)
    if visible is not None:
        logits = jnp.where(visible[:, :, None], logits, jnp.finfo(jnp.float32).min)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(logits, axis=-1), v)
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype)


def xla(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """`jax.nn.dot_product_attention`, in the arrays' dtype."""
    visible = mask.visible(q_BTNH.shape[1], k_BSKH.shape[1])
    bias = None if mask.bias_NTS is None else mask.bias_NTS[None].astype(q_BTNH.dtype)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, bias=bias, mask=visible, implementation="xla"
    )
