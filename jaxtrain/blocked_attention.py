"""Attention in tiles that stay in a CPU's cache, forward and backward, in plain JAX.

XLA's CPU compiler writes the scores of every pair of tokens to memory and reads them back several
times; here one tile of scores lives at a time, as in flash attention (arXiv 2205.14135, with whole
rows of keys, so that no running maximum is needed), and a block of queries meets only the keys that
its causal or windowed mask may show.

Letters: B batch, T query length, S key length, N query heads, K kv heads, G = N / K, H head_dim;
C = B K heads of the whole batch, c those of one tile, t queries of one block, s its keys.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

# Queries of one block: long enough for matrix products at full speed, short enough for causal
# masks to leave out nearly half of the products. Longer sequences get longer blocks, since every
# block is compiled on its own.
BLOCK = 64
MOST_BLOCKS = 16
# Scores of one tile: 256 KiB, so that the few arrays of that size which the backward pass has alive
# fit into the second-level cache of one core.
TILE = 2**16

_HIDDEN = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What of a mask is known while tracing; the attributes are those of a Mask."""

    causal: bool
    window: int | None

    def blocks(self, T: int, S: int) -> Iterator[tuple[slice, slice]]:
        """The blocks of queries, each with the keys that any of its queries may see."""
        size = max(BLOCK, -(-T // MOST_BLOCKS))
        for start in range(0, T, size):
            end = min(start + size, T)
            first = 0 if self.window is None else min(max(start - self.window + 1, 0), S - 1)
            last = min(end, S) if self.causal else S
            yield slice(start, end), slice(first, last)

    def visible(
        self,
        queries: slice,
        keys: slice,
        segments: tuple[jax.Array, ...] | None,
    ) -> jax.Array | None:
        """Booleans [1 or c, 1, t, s] of a tile; None where every query sees every key."""
        shape = (1, 1, queries.stop - queries.start, keys.stop - keys.start)
        query = lax.broadcasted_iota(jnp.int32, shape, 2) + queries.start
        key = lax.broadcasted_iota(jnp.int32, shape, 3) + keys.start
        seen = None
        if self.causal:
            seen = key <= query
        if self.window is not None:
            near = key > query - self.window
            seen = near if seen is None else seen & near
        if segments is not None:
            ids_cT, ids_cS = segments
            same = ids_cT[:, None, queries, None] == ids_cS[:, None, None, keys]
            seen = same if seen is None else seen & same
        return seen


def blocked_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask: Any,
) -> Float[Array, "B T N H"]:
    """softmax(q k / sqrt(H)) v over the visible keys of whole sequences on one device.

    Computes in float32 and returns the dtype of the queries.

    Args:
      q_BTNH: queries.
      k_BSKH: keys; N is a multiple of K.
      v_BSKH: values.
      mask: a `jaxtrain.attention.Mask` by which every query sees a key, without a cache.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    segments = None
    if mask.segment_ids_BT is not None:
        assert mask.segment_ids_BS is not None, "segment ids of the queries but not of the keys"
        segments = tuple(jnp.repeat(x, K, 0) for x in (mask.segment_ids_BT, mask.segment_ids_BS))
    rule = _Rule(mask.causal, mask.window)
    # The scale goes to the queries: they are fewer than the scores.
    q_BTKGH = q_BTNH.astype(jnp.float32).reshape(B, T, K, N // K, H) * H**-0.5
    q_CGTH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(B * K, N // K, T, H)
    k_CSH, v_CSH = (
        jnp.swapaxes(x.astype(jnp.float32), 1, 2).reshape(B * K, -1, H) for x in (k_BSKH, v_BSKH)
    )
    out_CGTH = _attend(rule, q_CGTH, k_CSH, v_CSH, segments)
    out_BKGTH = out_CGTH.reshape(B, K, N // K, T, H)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    rule: _Rule,
    q_CGTH: jax.Array,
    k_CSH: jax.Array,
    v_CSH: jax.Array,
    segments: tuple[jax.Array, ...] | None,
) -> jax.Array:
    return _forward(rule, q_CGTH, k_CSH, v_CSH, segments)[0]


def _forward(
    rule: _Rule,
    q_CGTH: jax.Array,
    k_CSH: jax.Array,
    v_CSH: jax.Array,
    segments: tuple[jax.Array, ...] | None,
) -> tuple[jax.Array, Any]:
    T, S = q_CGTH.shape[2], k_CSH.shape[1]

    def heads(parts: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q_cGTH, k_csH, v_csH, ids = parts
        outs, log_sums = [], []
        for queries, keys in rule.blocks(T, S):
            scores = _products(q_cGTH[:, :, queries], k_csH[:, keys], 3, 2)
            seen = rule.visible(queries, keys, ids)
            if seen is not None:
                scores = jnp.where(seen, scores, _HIDDEN)
            top = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - top)
            sums = weights.sum(-1, keepdims=True)
            outs.append(_products(weights, v_csH[:, keys], 3, 1) / sums)
            log_sums.append(top + jnp.log(sums))
        return jnp.concatenate(outs, 2), jnp.concatenate(log_sums, 2)

    out_CGTH, log_sums_CGT1 = _over_heads(heads, (q_CGTH, k_CSH, v_CSH, segments), T, S)
    return out_CGTH, (q_CGTH, k_CSH, v_CSH, segments, out_CGTH, log_sums_CGT1)


def _backward(rule: _Rule, kept: Any, d_out_CGTH: jax.Array) -> tuple[Any, ...]:
    q_CGTH, k_CSH, v_CSH, segments, out_CGTH, log_sums_CGT1 = kept
    T, S = q_CGTH.shape[2], k_CSH.shape[1]

    def heads(parts: tuple[Any, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_cGTH, k_csH, v_csH, ids, out_cGTH, log_sums_cGT1, d_out_cGTH = parts
        # Keys last: sums over the queries then run along the rows of the scores as they lie, and
        # only the small operand is transposed; the other way is three times slower.
        dk_cHS = jnp.zeros_like(k_csH, shape=(*k_csH.shape[:1], k_csH.shape[2], S))
        dv_cHS, dqs = dk_cHS, []
        for queries, keys in rule.blocks(T, S):
            q, d_out = q_cGTH[:, :, queries], d_out_cGTH[:, :, queries]
            k, v = k_csH[:, keys], v_csH[:, keys]
            scores = _products(q, k, 3, 2)
            seen = rule.visible(queries, keys, ids)
            if seen is not None:
                scores = jnp.where(seen, scores, _HIDDEN)
            weights = jnp.exp(scores - log_sums_cGT1[:, :, queries])
            d_weights = _products(d_out, v, 3, 2)
            mean = (out_cGTH[:, :, queries] * d_out).sum(-1, keepdims=True)
            d_scores = weights * (d_weights - mean)
            dqs.append(_products(d_scores, k, 3, 1))
            dk_cHS = dk_cHS.at[:, :, keys].add(_sums(q, d_scores))
            dv_cHS = dv_cHS.at[:, :, keys].add(_sums(d_out, weights))
        return jnp.concatenate(dqs, 2), jnp.swapaxes(dk_cHS, 1, 2), jnp.swapaxes(dv_cHS, 1, 2)

    parts = (q_CGTH, k_CSH, v_CSH, segments, out_CGTH, log_sums_CGT1, d_out_CGTH)
    dq_CGTH, dk_CSH, dv_CSH = _over_heads(heads, parts, T, S)
    return dq_CGTH, dk_CSH, dv_CSH, _no_gradient(segments)


_attend.defvjp(_forward, _backward)


def _over_heads(heads: Callable[[Any], Any], parts: Any, T: int, S: int) -> Any:
    """`heads(parts)`, a few heads of all the arrays at a time, so that a tile fits the cache."""
    C, G = parts[0].shape[:2]
    scores = G * min(T, max(BLOCK, -(-T // MOST_BLOCKS))) * S
    count = next(c for c in range(min(C, max(TILE // scores, 1)), 0, -1) if C % c == 0)
    if count == C:
        return heads(parts)
    parts = jax.tree.map(lambda x: x.reshape(C // count, count, *x.shape[1:]), parts)
    return jax.tree.map(lambda x: x.reshape(C, *x.shape[2:]), lax.map(heads, parts))


def _products(left_cGxy: jax.Array, right_czw: jax.Array, left: int, right: int) -> jax.Array:
    """Products [c, G, x, z or w], contracted over these dimensions."""
    c, G = left_cGxy.shape[:2]
    rows = left_cGxy.reshape(c, -1, left_cGxy.shape[3])
    out = lax.dot_general(rows, right_czw, (((left - 1,), (right,)), ((0,), (0,))))
    return out.reshape(c, G, -1, out.shape[-1])


def _sums(left_cGtH: jax.Array, right_cGts: jax.Array) -> jax.Array:
    """Products [c, H, s], summed over the queries of all heads that share these keys."""
    c = left_cGtH.shape[0]
    left, right = (x.reshape(c, -1, x.shape[3]) for x in (left_cGtH, right_cGts))
    return lax.dot_general(left, right, (((1,), (1,)), ((0,), (0,))))


def _no_gradient(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
