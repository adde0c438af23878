"""Block-sparse attention that computes only the scores of a pattern.

The keys of a query come in disjoint parts: the near keys, in its own block of the
row and the adjacent blocks, and the few distant ones, gathered. Each part has the largest score,
the sum of exponentials and the weighted values of its queries; together they are one softmax (arXiv
2205.14135, section 3.1). Documents may begin anywhere in a block: masks of pairs select what is
visible.

Letters: B batch, T length, N query heads, K kv heads, G = N / K, H head_dim; C blocks of a row of b
tokens, X batched matmuls, q queries and k keys of one of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.nn.attention.mask import apply_softcap
from jaxtrain.nn.attention.patterns import (
    DilatedPattern,
    FixedPattern,
    LongformerPattern,
    Pattern,
    StridedPattern,
    segment_positions,
)
from jaxtrain.nn.remat import KEPT

# The named scope of all matmuls with keys and values.
SCOPE = "sparse_products"

_HIDDEN = float(np.finfo(np.float32).min)
_NOWHERE = -2  # the document id of positions outside of a row


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Static part of a mask; the attributes are those of a Mask."""

    pattern: Any
    causal: bool
    softcap: float | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _TokenPositions:
    """Positions of tokens: in the row, document id, and in the document; arrays of one shape."""

    row: jax.Array
    document: jax.Array
    position: jax.Array


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Queries, keys and values of a row, or of a part of one, and their positions."""

    q_BTKGH: jax.Array
    k_BTKH: jax.Array
    v_BTKH: jax.Array
    at_BT: _TokenPositions

    @property
    def length(self) -> int:
        return self.q_BTKGH.shape[1]


@dataclasses.dataclass(frozen=True)
class _Part:
    """Unnormalized softmax over some keys."""

    top_BTKG: jax.Array
    sum_BTKG: jax.Array
    out_BTKGH: jax.Array

    def with_nothing(self, change: Callable[[jax.Array, float], jax.Array]) -> "_Part":
        """Return the same, with each array replaced by its neutral value for queries that have no
        key."""
        return _Part(
            change(self.top_BTKG, _HIDDEN), change(self.sum_BTKG, 0), change(self.out_BTKGH, 0)
        )

    def over(self, change: Callable[[jax.Array], jax.Array]) -> "_Part":
        """Return the same with each array changed in its order or shape."""
        return _Part(change(self.top_BTKG), change(self.sum_BTKG), change(self.out_BTKGH))


# (positions of queries, of keys, which broadcast) -> whether one sees the other.
_Sees = Callable[[_TokenPositions, _TokenPositions], jax.Array]


def sparse_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, mask: Any
) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the keys of `mask.pattern`, of whole sequences on one device.

    Matmuls in the arrays' dtype, scores and sums in float32.

    Args:
      q_BTNH: queries.
      k_BTKH: keys; N is a multiple of K.
      v_BTKH: values.
      mask: an `attention.Mask` with a pattern, without a window, a cache, a bias and sinks.
    """
    rule = _Rule(mask.pattern, mask.causal, mask.softcap)
    return _attend(rule, q_BTNH, k_BTKH, v_BTKH, mask.segment_ids_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: _Rule, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> jax.Array:
    return _attend_padded(rule, q, k, v, ids)


def _forward(
    rule: _Rule, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any
) -> tuple[jax.Array, Any]:
    # This is saved by name, instead of its intermediates.
    return checkpoint_name(_attend_padded(rule, q, k, v, ids), KEPT), (q, k, v, ids)


def _backward(rule: _Rule, kept: Any, d_out: jax.Array) -> tuple[Any, ...]:
    """Recompute the scores in the backward pass instead of saving them."""
    *qkv, ids = kept
    gradients = jax.vjp(lambda q, k, v: _attend_padded(rule, q, k, v, ids), *qkv)[1](d_out)
    return *gradients, None if ids is None else np.zeros(ids.shape, jax.dtypes.float0)


_attend.defvjp(_forward, _backward)


def _attend_padded(
    rule: _Rule, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, ids_BT: Any
) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    K, step = k_BTKH.shape[2], _step(rule.pattern, T)
    whole = -(-T // step) * step

    def long(x: jax.Array, value: int = 0) -> jax.Array:
        """Pad to whole blocks."""
        return jnp.pad(x, [(0, 0), (0, whole - T), *[(0, 0)] * (x.ndim - 2)], constant_values=value)

    position_BT = long(segment_positions(ids_BT, T))
    document_BT = long(jnp.zeros((1, T), jnp.int32) if ids_BT is None else ids_BT, -1)
    row_BT = jnp.broadcast_to(jnp.arange(whole), position_BT.shape)
    at_BT = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (B, whole)), _TokenPositions(row_BT, document_BT, position_BT)
    )
    q_BTKGH = long(q_BTNH).reshape(B, whole, K, N // K, H)
    tokens = _Tokens(q_BTKGH, long(k_BTKH), long(v_BTKH), at_BT)
    with jax.named_scope(SCOPE):
        parts = _PARTS[type(rule.pattern)](rule, tokens)
    top = functools.reduce(jnp.maximum, [part.top_BTKG for part in parts])
    total, out = jnp.zeros_like(top), jnp.zeros((*top.shape, H))
    for part in parts:
        scale = jnp.exp(part.top_BTKG - top)
        total += scale * part.sum_BTKG
        out += scale[..., None] * part.out_BTKGH
    out_BTNH = (out / total[..., None]).reshape(B, whole, N, H)[:, :T]
    return out_BTNH.astype(q_BTNH.dtype)


# -- the parts of each pattern ---------------------------------------------------------------------


def _longformer(rule: _Rule, tokens: _Tokens) -> list[_Part]:
    """Parts of Longformer: the window, the global keys of the document that a block begins in,
    their queries.

    Other documents of a block begin in it or in an adjacent one: their global tokens are near.
    """
    pattern, block = rule.pattern, rule.pattern.window
    sees = _parts_of(rule)
    parts = [_near(rule, tokens, block, sees)]
    G, C = pattern.global_tokens, tokens.length // block
    if not G or C < 3:
        return parts
    first = jax.tree.map(lambda x: _blocks(x, block)[:, 2:, 0], tokens.at_BT)
    begin_BC = first.row - first.position
    global_BCk = jnp.minimum(begin_BC[..., None] + jnp.arange(G), tokens.length - 1)
    far = _far(sees, block)
    q, at = _blocks(tokens.q_BTKGH, block)[:, 2:], _in_blocks(tokens.at_BT, block, slice(2, None))
    k, v, at_keys = _gather(tokens, global_BCk)
    found = _part(rule, q, k, v, far(_queries(at), _keys(at_keys)))
    parts.append(_from(2 * block, found.over(_join)))
    if not rule.causal:
        parts.append(_of_global_queries(rule, tokens, global_BCk, block, sees))
    return parts


def _of_global_queries(
    rule: _Rule, tokens: _Tokens, global_BCq: jax.Array, block: int, sees: _Sees
) -> _Part:
    """Global queries with each block of later keys, summed at the queries."""
    q_BCqKGH = _rows(tokens.q_BTKGH, global_BCq)
    k, v = (_blocks(x, block)[:, 2:] for x in (tokens.k_BTKH, tokens.v_BTKH))
    at_queries = jax.tree.map(lambda x: _rows(x, global_BCq), tokens.at_BT)
    at_keys = _in_blocks(tokens.at_BT, block, slice(2, None))
    after = _far(lambda key, query: sees(query, key), block)
    found = _part(rule, q_BCqKGH, k, v, after(_keys(at_keys), _queries(at_queries)))
    index_Bi = global_BCq.reshape(len(global_BCq), -1)
    batch_B1 = jnp.arange(len(index_Bi))[:, None]
    top, total, out = (_join(x) for x in (found.top_BTKG, found.sum_BTKG, found.out_BTKGH))
    shape = tokens.q_BTKGH.shape[:-1]
    top_BTKG = jnp.full(shape, _HIDDEN).at[batch_B1, index_Bi].max(top)
    scale = jnp.exp(top - top_BTKG[batch_B1, index_Bi])
    sum_BTKG = jnp.zeros(shape).at[batch_B1, index_Bi].add(scale * total)
    summed = jnp.zeros((*shape, out.shape[-1])).at[batch_B1, index_Bi].add(scale[..., None] * out)
    return _Part(top_BTKG, sum_BTKG, summed)


def _strided_parts(rule: _Rule, tokens: _Tokens) -> list[_Part]:
    """Parts of strided attention: adjacent blocks, and the columns of the row as a matrix of stride
    columns."""
    stride, sees = rule.pattern.stride, _parts_of(rule)
    parts = [_near(rule, tokens, stride, sees)]
    if tokens.length // stride < 3:
        return parts

    def columns(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(_blocks(x, stride), 1, 2)

    q, k, v = map(columns, (tokens.q_BTKGH, tokens.k_BTKH, tokens.v_BTKH))
    at = jax.tree.map(columns, tokens.at_BT)
    at_queries = jax.tree.map(lambda x: x[:, :, 2:], at)
    at_keys = jax.tree.map(lambda x: x[:, :, :-2], at)
    far = _far(sees, stride)(_queries(at_queries), _keys(at_keys))
    found = _part(rule, q[:, :, 2:], k[:, :, :-2], v[:, :, :-2], far)
    found = found.over(lambda x: _join(jnp.swapaxes(x, 1, 2)))
    return [*parts, _from(2 * stride, found)]


def _fixed_parts(rule: _Rule, tokens: _Tokens) -> list[_Part]:
    """Parts of fixed attention: adjacent blocks, and earlier summaries: at most one block of a
    document ends in each block of the row, since both have the same length."""
    stride, sees, B = rule.pattern.stride, _parts_of(rule), len(tokens.q_BTKGH)
    parts = [_near(rule, tokens, stride, sees)]
    if tokens.length // stride < 3:
        return parts
    at_BT = tokens.at_BT
    ends_BT = jnp.where(at_BT.position % stride == stride - 1, at_BT.row, -1)
    # That of the second to last block may start in the block before.
    end_BC = _blocks(ends_BT, stride)[:, :-1].max(-1)
    index_B1k = (end_BC[..., None] - jnp.arange(rule.pattern.summary_tokens)).reshape(B, 1, -1)
    k, v, at_keys = _gather(tokens, index_B1k)
    at = jax.tree.map(lambda x: x[:, None, 2 * stride :], at_BT)
    far = _far(sees, stride)(_queries(at), _keys(at_keys))
    found = _part(rule, tokens.q_BTKGH[:, None, 2 * stride :], k, v, far)
    return [*parts, _from(2 * stride, found.over(_join))]


def _dilated_parts(rule: _Rule, tokens: _Tokens) -> list[_Part]:
    """Parts of LongNet, one per length and ratio; keys in several parts count as
    often."""
    B, T, K, G, H = tokens.q_BTKGH.shape
    k_BTNH, v_BTNH = (jnp.repeat(x, G, 2) for x in (tokens.k_BTKH, tokens.v_BTKH))
    alone = _Tokens(tokens.q_BTKGH.reshape(B, T, K * G, 1, H), k_BTNH, v_BTNH, tokens.at_BT)

    def group_heads(x_BTN1: jax.Array) -> jax.Array:
        return x_BTN1.reshape(B, T, K, G, *x_BTN1.shape[4:])

    return [_of_segments(rule, alone, *pair).over(group_heads) for pair in rule.pattern.pairs]


def _of_segments(rule: _Rule, tokens: _Tokens, length: int, ratio: int) -> _Part:
    """Group the N / r heads of each token in columns: positions of one segment that a head
    has are r apart in the row too."""
    B, T = tokens.q_BTKGH.shape[:2]
    block = min(-(-length // ratio), T // ratio)
    own_BTr = tokens.at_BT.position[..., None] % length % ratio == jnp.arange(ratio)

    def of_its_heads(x: jax.Array) -> jax.Array:
        x = x.reshape(B, T, -1, ratio, *x.shape[3:])
        own = own_BTr.reshape(B, T, 1, ratio, *[1] * (x.ndim - 4))
        return jnp.where(own, x, 0).sum(3)

    def of_all_heads(x: jax.Array, nothing: float) -> jax.Array:
        own = own_BTr.reshape(B, T, 1, ratio, *[1] * (x.ndim - 3))
        return jnp.where(own, x[:, :, :, None], nothing).reshape(B, T, -1, *x.shape[3:])

    def columns(x: jax.Array, beyond: int = 0) -> jax.Array:
        """Reshape to [B r, T / r, ...], in whole blocks."""
        x = jnp.swapaxes(_blocks(x, ratio), 1, 2)
        x = x.reshape(-1, *x.shape[2:])
        widths = [(0, 0), (0, -x.shape[1] % block), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, widths, constant_values=beyond)

    def rows(x: jax.Array) -> jax.Array:
        x = x[:, : T // ratio]
        return _join(jnp.swapaxes(x.reshape(B, ratio, *x.shape[1:]), 1, 2))

    def sees(query: _TokenPositions, key: _TokenPositions) -> jax.Array:
        return _same(rule, query, key) & (query.position // length == key.position // length)

    q, k, v = (columns(of_its_heads(x)) for x in (tokens.q_BTKGH, tokens.k_BTKH, tokens.v_BTKH))
    at = jax.tree.map(lambda x: columns(x, _NOWHERE), tokens.at_BT)
    found = _near(rule, _Tokens(q, k, v, at), block, sees)
    return found.over(rows).with_nothing(of_all_heads)


_PARTS: dict[type, Callable[[_Rule, _Tokens], list[_Part]]] = {
    LongformerPattern: _longformer,
    StridedPattern: _strided_parts,
    FixedPattern: _fixed_parts,
    DilatedPattern: _dilated_parts,
}


def _step(pattern: Pattern, length: int) -> int:
    """Return the number of tokens of which rows are padded to a multiple."""
    if isinstance(pattern, LongformerPattern):
        return pattern.window
    if isinstance(pattern, StridedPattern | FixedPattern):
        return pattern.stride
    assert isinstance(pattern, DilatedPattern), pattern
    return math.lcm(*pattern.dilated_ratios)


def products(pattern: Pattern, length: int) -> int:
    """Number of query-key pairs that one head of a causal row computes, in whole blocks.

    Of C blocks of b tokens 2 b keys for each token, b where there is one block. For the tokens that
    have two blocks before theirs besides g global ones (Longformer), C - 2 of their column
    (strided) or c of C - 1 blocks (fixed). LongNet has a part of the first kind for each ratio r,
    with 1 / r of the tokens.
    """
    whole = -(-length // _step(pattern, length)) * _step(pattern, length)
    if isinstance(pattern, DilatedPattern):
        count = 0
        for segment, ratio in pattern.pairs:
            block = min(-(-segment // ratio), whole // ratio)
            blocks = -(-(whole // ratio) // block)
            count += blocks * block * block * min(blocks, 2)
        return count
    block = _step(pattern, length)
    blocks = whole // block
    near, before = whole * block * min(blocks, 2), max(blocks - 2, 0)
    far = before
    if isinstance(pattern, LongformerPattern):
        far = pattern.global_tokens
    if isinstance(pattern, FixedPattern):
        far = (blocks - 1) * pattern.summary_tokens
    return near + before * block * far


# -- one part --------------------------------------------------------------------------------------


def _near(rule: _Rule, tokens: _Tokens, block: int, sees: _Sees) -> _Part:
    """Queries of each block, and keys of it, of the one before, and if not causal the one after."""
    last = tokens.length // block - 1
    sides = (min(last, 1), 0 if rule.causal else min(last, 1))
    q = _blocks(tokens.q_BTKGH, block)
    k, v = (_with_neighbors(_blocks(x, block), *sides) for x in (tokens.k_BTKH, tokens.v_BTKH))
    at = _in_blocks(tokens.at_BT, block, slice(None))
    at_keys = jax.tree.map(lambda x: _with_neighbors(x, *sides, value=_NOWHERE), at)
    return _part(rule, q, k, v, sees(_queries(at), _keys(at_keys))).over(_join)


def _part(
    rule: _Rule, q_BXqKGH: jax.Array, k_BXkKH: jax.Array, v_BXkKH: jax.Array, seen_BXqk: jax.Array
) -> _Part:
    products = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = products("BXqKGH,BXkKH->BXKGqk", q_BXqKGH, k_BXkKH) * q_BXqKGH.shape[-1] ** -0.5
    seen = seen_BXqk[:, :, None, None]
    scores = jnp.where(seen, apply_softcap(scores, rule.softcap), _HIDDEN)
    top = jax.lax.stop_gradient(scores.max(-1))
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
    out_BXqKGH = products("BXKGqk,BXkKH->BXqKGH", weights.astype(v_BXkKH.dtype), v_BXkKH)
    top, total = (jnp.moveaxis(x, -1, 2) for x in (top, weights.sum(-1)))
    return _Part(top, total, out_BXqKGH)


def _from(start: int, part: _Part) -> _Part:
    """Return the part of the whole row, in which queries before `start` have no key."""

    def pad_front(x: jax.Array, value: float) -> jax.Array:
        widths = [(0, 0), (start, 0), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, widths, constant_values=value)

    return part.with_nothing(pad_front)


def _same(rule: _Rule, query: _TokenPositions, key: _TokenPositions) -> jax.Array:
    same = query.document == key.document
    return same & (key.row <= query.row) if rule.causal else same


def _parts_of(rule: _Rule) -> _Sees:
    return lambda query, key: (
        _same(rule, query, key) & rule.pattern.sees(query.position, key.position)
    )


def _far(sees: _Sees, block: int) -> _Sees:
    """Return what is visible of the keys before those that `_near` has."""
    return lambda query, key: sees(query, key) & (key.row // block < query.row // block - 1)


def _queries(at: _TokenPositions) -> _TokenPositions:
    return jax.tree.map(lambda x: x[..., :, None], at)


def _keys(at: _TokenPositions) -> _TokenPositions:
    return jax.tree.map(lambda x: x[..., None, :], at)


def _blocks(x_BT: jax.Array, block: int) -> jax.Array:
    """[B, C, b, ...]."""
    return x_BT.reshape(x_BT.shape[0], -1, block, *x_BT.shape[2:])


def _join(x_BCb: jax.Array) -> jax.Array:
    """[B, C b, ...]."""
    return x_BCb.reshape(x_BCb.shape[0], -1, *x_BCb.shape[3:])


def _in_blocks(at_BT: _TokenPositions, block: int, which: slice) -> _TokenPositions:
    return jax.tree.map(lambda x: _blocks(x, block)[:, which], at_BT)


def _with_neighbors(x_BCb: jax.Array, before: int, after: int, *, value: int = 0) -> jax.Array:
    """Return each block with its neighbors: [B, C, (1 + before + after) b, ...]."""
    C = x_BCb.shape[1]
    widths = [(0, 0), (before, after), *[(0, 0)] * (x_BCb.ndim - 2)]
    padded = jnp.pad(x_BCb, widths, constant_values=value)
    return jnp.concatenate([padded[:, i : i + C] for i in range(1 + before + after)], axis=2)


def _gather(tokens: _Tokens, index_BXk: jax.Array) -> tuple[jax.Array, jax.Array, _TokenPositions]:
    """Keys and values of these positions of the row, and where they are; invalid, below position
    0."""
    index = jnp.maximum(index_BXk, 0)
    at = jax.tree.map(lambda x: _rows(x, index), tokens.at_BT)
    document = jnp.where(index_BXk < 0, _NOWHERE, at.document)
    at = dataclasses.replace(at, document=document)
    return _rows(tokens.k_BTKH, index), _rows(tokens.v_BTKH, index), at


def _rows(x_BT: jax.Array, index_BXk: jax.Array) -> jax.Array:
    batch = jnp.arange(x_BT.shape[0])[:, None, None]
    return x_BT[batch, index_BXk]
