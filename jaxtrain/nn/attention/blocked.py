"""Blocked attention for CPUs: tiles that stay in cache, forward and backward, in plain JAX.

XLA's CPU compiler writes the scores of every pair of tokens to memory and reads them back several
times; here one tile of scores is live at a time, as in flash attention (arXiv 2205.14135, with
whole rows of keys, so that no running maximum is needed), and a block of queries reads only the
keys that its causal or windowed mask may show.

Letters: B batch, T query length, S key length, N query heads, K kv heads, G = N / K, H head_dim;
b rows and k kv heads of one tile; c = b k, R = T G rows of the queries that share a kv head,
position by position, r those of one block, s its keys.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxtrain.nn.attention.mask import apply_softcap, slope
from jaxtrain.nn.remat import KEPT

# Queries of one block: enough for matmuls at full speed, few enough for causal
# masks to skip nearly half of the matmuls. Longer sequences get longer blocks, since every
# block is compiled separately.
BLOCK = 64
MOST_BLOCKS = 16
# Scores of one tile: 512 KiB, so that the L2 caches of two cores fit the few arrays of
# that size which are live in the backward pass. Smaller tiles are dominated by overhead.
TILE = 2**17

_HIDDEN = float(np.finfo(np.float32).min)

_ONE_BLOCK = contextvars.ContextVar("one_block", default=False)


@contextlib.contextmanager
def trace_as_one_block() -> Iterator[None]:
    """Trace attention in one tile and block: as many bytes are saved for the backward pass, by a
    tenth of the operations. For programs whose residuals are counted, which never run."""
    before = _ONE_BLOCK.set(True)
    try:
        yield
    finally:
        _ONE_BLOCK.reset(before)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Static part of a mask; the attributes are those of a Mask."""

    causal: bool
    window: int | None
    softcap: float | None

    def blocks(self, T: int, S: int) -> Iterator[tuple[slice, slice]]:
        """Return the blocks of queries, each with the keys that any of its queries may see."""
        size = T if _ONE_BLOCK.get() else max(BLOCK, -(-T // MOST_BLOCKS))
        for start in range(0, T, size):
            end = min(start + size, T)
            first = 0 if self.window is None else min(max(start - self.window + 1, 0), S - 1)
            last = min(end, S) if self.causal else S
            yield slice(start, end), slice(first, last)

    def visible(
        self,
        groups: int,
        queries: slice,
        keys: slice,
        segments: tuple[jax.Array, jax.Array] | None,
        heads: int,
    ) -> jax.Array | None:
        """Booleans [1 or c, r, s] of a tile; None where every query sees every key."""
        shape = (1, queries.stop - queries.start, groups, keys.stop - keys.start)
        query = lax.broadcasted_iota(jnp.int32, shape, 1) + queries.start
        key = lax.broadcasted_iota(jnp.int32, shape, 3) + keys.start
        seen = None
        if self.causal:
            seen = key <= query
        if self.window is not None:
            near = key > query - self.window
            seen = near if seen is None else seen & near
        if segments is not None:
            ids_cT, ids_cS = (jnp.repeat(ids, heads // ids.shape[0], 0) for ids in segments)
            same = ids_cT[:, queries, None, None] == ids_cS[:, None, None, keys]
            seen = same if seen is None else seen & same
        if seen is None:
            return None
        seen = jnp.broadcast_to(seen, (seen.shape[0], *shape[1:]))
        return seen.reshape(seen.shape[0], -1, shape[3])


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
      mask: an `attention.Mask` by which every query sees a key, without a cache.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    rule = _Rule(mask.causal, mask.window, mask.softcap)
    segments = None
    if mask.segment_ids_BT is not None:
        assert mask.segment_ids_BS is not None, "segment ids of the queries but not of the keys"
        segments = (mask.segment_ids_BT, mask.segment_ids_BS)
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    sinks = None
    if mask.sinks_N is not None:  # of each query: tiles split all of its dimensions
        sinks = jnp.broadcast_to(mask.sinks_N.reshape(K, N // K, 1), (B, T, K, N // K, 1))
    q = q.reshape(B, T, K, N // K, H)
    out = _attend(rule, q, k[:, :, :, None], v[:, :, :, None], segments, sinks)
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    rule: _Rule,
    q_BTKGH: jax.Array,
    k_BSK1H: jax.Array,
    v_BSK1H: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None,
    sinks_BTKG1: jax.Array | None,
) -> jax.Array:
    return _forward(rule, q_BTKGH, k_BSK1H, v_BSK1H, segments, sinks_BTKG1)[0]


def _forward(
    rule: _Rule,
    q_BTKGH: jax.Array,
    k_BSK1H: jax.Array,
    v_BSK1H: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None,
    sinks_BTKG1: jax.Array | None,
) -> tuple[jax.Array, Any]:
    T, S, G = q_BTKGH.shape[1], k_BSK1H.shape[1], q_BTKGH.shape[3]

    def tile(parts: tuple[Any, ...], segments: Any) -> tuple[jax.Array, ...]:
        q_cRH, k_cSH, v_cSH, *sinks_cR1 = map(_by_head, parts)
        outs, log_sums = [], []
        for queries, keys in rule.blocks(T, S):
            scores_crs = _scores(rule, q_cRH, k_cSH, queries, keys, segments, G)
            top_cr1 = scores_crs.max(-1, keepdims=True)
            sinks_cr1 = [x[:, queries.start * G : queries.stop * G] for x in sinks_cR1]
            for sink_cr1 in sinks_cr1:
                top_cr1 = jnp.maximum(top_cr1, sink_cr1)
            weights_crs = jnp.exp(scores_crs - top_cr1)
            sums_cr1 = weights_crs.sum(-1, keepdims=True)
            for sink_cr1 in sinks_cr1:  # a key visible to all, without a value
                sums_cr1 += jnp.exp(sink_cr1 - top_cr1)
            outs.append(_product(weights_crs, v_cSH[:, keys], 2, 1) / sums_cr1)
            log_sums.append(top_cr1 + jnp.log(sums_cr1))
        k = parts[0].shape[2]
        out_cRH, log_sums_cR1 = jnp.concatenate(outs, 1), jnp.concatenate(log_sums, 1)
        return _by_position(out_cRH, k, G), _by_position(log_sums_cR1, k, G)

    parts = (q_BTKGH, k_BSK1H, v_BSK1H, *(() if sinks_BTKG1 is None else (sinks_BTKG1,)))
    like_queries = (*q_BTKGH.shape[:4], v_BSK1H.shape[4]), (*q_BTKGH.shape[:4], 1)
    out_BTKGH, log_sums_BTKG1 = _over_tiles(tile, parts, segments, like_queries)
    # These two are saved by name, instead of the tiles' intermediates.
    kept = checkpoint_name((out_BTKGH, log_sums_BTKG1), KEPT)
    return kept[0], (q_BTKGH, k_BSK1H, v_BSK1H, segments, sinks_BTKG1, *kept)


def _backward(rule: _Rule, kept: Any, d_out_BTKGH: jax.Array) -> tuple[Any, ...]:
    q_BTKGH, k_BSK1H, v_BSK1H, segments, sinks_BTKG1, out_BTKGH, log_sums_BTKG1 = kept
    T, S, G, H = q_BTKGH.shape[1], k_BSK1H.shape[1], *q_BTKGH.shape[3:]

    def tile(parts: tuple[Any, ...], segments: Any) -> tuple[jax.Array, ...]:
        q_cRH, k_cSH, v_cSH, out_cRH, log_sums_cR1, d_out_cRH = map(_by_head, parts)
        mean_cR1 = (out_cRH * d_out_cRH).sum(-1, keepdims=True)
        # Keys last: sums over the queries then run along the rows of the scores in memory, and
        # only the small operand is transposed; the reverse is three times slower.
        dk_cHS = jnp.zeros((k_cSH.shape[0], H, S), jnp.float32)
        dv_cHS, dqs = dk_cHS, []
        for queries, keys in rule.blocks(T, S):
            rows = slice(queries.start * G, queries.stop * G)
            scores_crs = _scores(rule, q_cRH, k_cSH, queries, keys, segments, G)
            weights_crs = jnp.exp(scores_crs - log_sums_cR1[:, rows])
            d_weights_crs = _product(d_out_cRH[:, rows], v_cSH[:, keys], 2, 2)
            d_scores_crs = weights_crs * (d_weights_crs - mean_cR1[:, rows]) * H**-0.5
            d_scores_crs *= slope(scores_crs, rule.softcap)
            dqs.append(_product(d_scores_crs, k_cSH[:, keys], 2, 1))
            # Summed over the queries of all heads that share these keys.
            dk_cHS = dk_cHS.at[:, :, keys].add(_product(q_cRH[:, rows], d_scores_crs, 1, 1))
            dv_cHS = dv_cHS.at[:, :, keys].add(_product(d_out_cRH[:, rows], weights_crs, 1, 1))
        k = parts[0].shape[2]
        dk_cSH, dv_cSH = (jnp.swapaxes(x, 1, 2) for x in (dk_cHS, dv_cHS))
        dq_cRH = jnp.concatenate(dqs, 1)
        return _by_position(dq_cRH, k, G), _by_position(dk_cSH, k, 1), _by_position(dv_cSH, k, 1)

    parts = (q_BTKGH, k_BSK1H, v_BSK1H, out_BTKGH, log_sums_BTKG1, d_out_BTKGH)
    d_sinks_BTKG1 = None
    if sinks_BTKG1 is not None:  # a sink only reduces the result
        inner_BTKG1 = (out_BTKGH * d_out_BTKGH).sum(-1, keepdims=True)
        d_sinks_BTKG1 = -jnp.exp(sinks_BTKG1 - log_sums_BTKG1) * inner_BTKG1
    shapes = tuple(x.shape for x in parts[:3])
    return *_over_tiles(tile, parts, segments, shapes), _no_gradient(segments), d_sinks_BTKG1


_attend.defvjp(_forward, _backward)


def _by_head(x_btkgh: jax.Array) -> jax.Array:
    """[c, R, h]. One dimension for positions and the heads of a group: with one more, even of
    length 1, XLA's CPU compiler takes a third longer for the same scores."""
    b, _, k, _, h = x_btkgh.shape
    return jnp.swapaxes(x_btkgh, 1, 2).reshape(b * k, -1, h)


def _by_position(x_cRh: jax.Array, k: int, G: int) -> jax.Array:
    """[b, t, k, G, h], in the layout of the whole arrays."""
    c, _, h = x_cRh.shape
    return jnp.swapaxes(x_cRh.reshape(c // k, k, -1, G, h), 1, 2)


def _over_tiles(
    tile: Callable[[tuple[jax.Array, ...], Any], tuple[jax.Array, ...]],
    parts: tuple[jax.Array, ...],
    segments: tuple[jax.Array, jax.Array] | None,
    shapes: tuple[tuple[int, ...], ...],
) -> tuple[jax.Array, ...]:
    """`tile(parts, segments)` of a few rows, or a few heads of one, at a time.

    Args:
      tile: maps arrays [b, t, k, ...] to arrays [b, t, k, ...].
      parts: arrays [B, T or S, K, ...], the queries and the keys first.
      segments: of the batch's rows.
      shapes: of the results.

    Returns:
      The tile's results for the whole parts.
    """
    B, T, K, G = parts[0].shape[:4]
    scores = G * min(T, max(BLOCK, -(-T // MOST_BLOCKS))) * parts[1].shape[1]
    heads = max(TILE // scores, 1)
    if heads >= B * K or _ONE_BLOCK.get():
        return tile(parts, segments)
    rows = _divisor(B, max(heads // K, 1))
    heads = K if heads >= K else _divisor(K, heads)
    groups = K // heads

    def split(x: jax.Array) -> jax.Array:
        """[B K / (rows heads), rows T, heads ...]"""
        x = x.reshape(B // rows, rows * x.shape[1], groups, -1)
        return jnp.swapaxes(x, 1, 2).reshape(-1, *x.shape[1::2])

    def one(each: tuple[Any, Any]) -> tuple[jax.Array, ...]:
        # Dimensions of length 1 would make XLA's CPU compiler copy the loop's inputs.
        flat, segments = each
        shapes = [(rows, -1, heads, *of.shape[3:]) for of in parts]
        outs = tile(tuple(map(jnp.reshape, flat, shapes)), segments)
        return tuple(x.reshape(rows * x.shape[1], -1) for x in outs)

    of_rows = jax.tree.map(
        lambda ids: jnp.repeat(ids.reshape(-1, rows, ids.shape[1]), groups, 0), segments
    )
    outs = lax.map(one, (tuple(split(x) for x in parts), of_rows))

    def merge_tiles(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        x = x.reshape(B // rows, groups, rows * shape[1], -1)
        return jnp.swapaxes(x, 1, 2).reshape(shape)

    return tuple(map(merge_tiles, outs, shapes))


def _divisor(count: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if count % size == 0)


def _scores(
    rule: _Rule,
    q_cRH: jax.Array,
    k_cSH: jax.Array,
    queries: slice,
    keys: slice,
    segments: tuple[jax.Array, jax.Array] | None,
    G: int,
) -> jax.Array:
    q_crH = q_cRH[:, queries.start * G : queries.stop * G]
    # Fused with the mask, or with the exponential after it.
    scores_crs = _product(q_crH, k_cSH[:, keys], 2, 2) * q_cRH.shape[2] ** -0.5
    scores_crs = apply_softcap(scores_crs, rule.softcap)
    seen = rule.visible(G, queries, keys, segments, q_cRH.shape[0])
    return scores_crs if seen is None else jnp.where(seen, scores_crs, _HIDDEN)


def _product(left: jax.Array, right: jax.Array, of_left: int, of_right: int) -> jax.Array:
    """Matmul per head, contracted over these dimensions."""
    return lax.dot_general(left, right, (((of_left,), (of_right,)), ((0,), (0,))))


def _no_gradient(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
