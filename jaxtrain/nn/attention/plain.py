"""Reference and XLA attention: every mask, all scores materialized.

Letters: B batch, T query length, S key length, N query heads, K kv heads, G = N / K, H head_dim,
C copies.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.attention.mask import Mask, apply_softcap
from jaxtrain.parallel.sharding import reshape

_HIDDEN = jnp.finfo(jnp.float32).min


def reference(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """Einsums in float32, whatever the arrays' dtype."""
    # Upcast, not preferred_element_type: the CPU has no float16 products.
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    return _by_einsums(q, k, v, mask).astype(q_BTNH.dtype)


def xla(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """`jax.nn.dot_product_attention`, in the arrays' dtype; einsums for unsupported masks."""
    if mask.softcap is not None or mask.sinks_N is not None or mask.pattern is not None:
        return _by_einsums(q_BTNH, k_BSKH, v_BSKH, mask)
    visible = mask.visible(q_BTNH.shape[1], k_BSKH.shape[1])
    bias = None if mask.bias_CNTS is None else _of_rows(mask.bias_CNTS, q_BTNH).astype(q_BTNH.dtype)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, bias=bias, mask=visible, implementation="xla"
    )


def _by_einsums(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask) -> jax.Array:
    """Matmuls in the arrays' dtype, scores and softmax in float32."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    logits = apply_softcap(logits * H**-0.5, mask.softcap)
    if mask.bias_CNTS is not None:
        bias = _of_rows(mask.bias_CNTS, q_BTNH).astype(jnp.float32)
        logits += bias.reshape(bias.shape[0], K, N // K, T, S)
    visible = mask.visible(T, S)
    if visible is not None:
        logits = jnp.where(visible[:, :, None], logits, _HIDDEN)
    times = mask.times(T, S, N)
    if times is not None:
        times = times.reshape(times.shape[0], -1, N // K if times.shape[1] > 1 else 1, T, S)
        logits += jnp.log(jnp.maximum(times, 1).astype(jnp.float32))
        logits = jnp.where(times > 0, logits, _HIDDEN)
    weights = _softmax(logits, mask.sinks_N).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH).reshape(B, T, N, H)


def _of_rows(bias_CNTS: jax.Array, q_BTNH: jax.Array) -> jax.Array:
    """Bias of the scores of each row, [1 or B, N, T, S]."""
    C, *rest = bias_CNTS.shape
    if C == 1:
        return bias_CNTS
    rows, *parts = jax.typeof(bias_CNTS).sharding.spec
    chunked = (C, q_BTNH.shape[0] // C, *rest)
    spread = jax.lax.broadcast_in_dim(
        bias_CNTS, chunked, (0, 2, 3, 4), out_sharding=P(rows, None, *parts)
    )
    return reshape(spread, (q_BTNH.shape[0], *rest), (rows, *parts))


def _softmax(logits_BKGTS: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
    """Softmax over the keys and an optional sink."""
    if sinks_N is None:
        return jax.nn.softmax(logits_BKGTS, axis=-1)
    sinks = sinks_N.reshape(*logits_BKGTS.shape[1:3], 1, 1)
    top = jax.lax.stop_gradient(jnp.maximum(logits_BKGTS.max(-1, keepdims=True), sinks))
    weights = jnp.exp(logits_BKGTS - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))
