"""Ring attention: keys and values are sent around the mesh axis `context`.

Liu et al. 2023 (arXiv 2310.01889), in the zig-zag order of `context`: the sequence is cut into 2c
runs (contiguous parts) and rank i of c has run i, its early one, and run 2c-1-i, its late one.
Under a causal mask every rank then has equal work at every step.

Letters: B batch, t tokens of a rank, r = t / 2 tokens of a run, n chunks of a run, Q queries of a
chunk, N query heads, K kv heads, G = N / K, H head_dim; everything on one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.context import (
    AXIS,
    HEADS,
    KEYS,
    QUERIES,
    SEGMENTS,
    Product,
    run_of,
    shard_mask,
    split_before,
    work,
)
from jaxtrain.nn.attention.mask import Mask, apply_softcap, slope
from jaxtrain.nn.remat import name_activation
from jaxtrain.parallel.sharding import (
    Layout,
    activation_spec,
    current_layout,
    on_each_device,
    shard,
)

# Queries whose scores are live at once: memory then grows with a run and not with its square.
QUERY_CHUNK = 1024


def ring_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    mask: Mask,
    *,
    exact: bool,
) -> jax.Array:
    """Attention over sequences split over `context` in zig-zag order.

    A query that sees no key gets 0; a sink is a key visible to all, without a value. Keys and
    values are sent around once forward and once backward, where their float32 gradients follow
    them; only the local shards, the output and its log-sum-exp are saved between the two.

    Args:
      q_BTNH: queries of the whole batch, as the other two.
      k_BTKH: keys.
      v_BTKH: values.
      mask: without a cache and bias.
      exact: multiply in float32 instead of the arrays' own dtype (sums always are float32).
    """
    layout = current_layout()
    assert layout is not None, "no layout is active"
    ring, mask = _Ring(layout, mask.causal, mask.window, mask.softcap, exact), shard_mask(mask)
    return _ring(
        ring, shard(q_BTNH, QUERIES), shard(k_BTKH, KEYS), shard(v_BTKH, KEYS),
        mask.segment_ids_BT, mask.segment_ids_BS, mask.sinks_N,
    )  # fmt: skip


def queries_at_once(run: int) -> int:
    """Return how many queries of a run of tokens have their scores in memory at once."""
    return max(d for d in range(1, min(run, QUERY_CHUNK) + 1) if run % d == 0)


# -- custom derivative around the communication ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Ring:
    layout: Layout  # the backward pass may be traced under another layout
    causal: bool
    window: int | None
    softcap: float | None
    exact: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, q: Any, k: Any, v: Any, ids_T: Any, ids_S: Any, sinks: Any) -> jax.Array:
    return _ring_forward(ring, q, k, v, ids_T, ids_S, sinks)[0]


def _ring_forward(
    ring: _Ring, q: Any, k: Any, v: Any, ids_T: Any, ids_S: Any, sinks: Any
) -> tuple[jax.Array, Any]:
    with ring.layout.current():
        queries, keys = activation_spec(QUERIES), activation_spec(KEYS)
        rank, ids = activation_spec(("length",)), activation_spec(SEGMENTS)
        run = on_each_device(
            functools.partial(_forward, ring),
            (rank, queries, keys, keys, ids, ids, activation_spec(HEADS)),
            (queries, activation_spec(QUERIES[:3])),
        )
        results = run(_ranks(ring), q, k, v, ids_T, ids_S, sinks)
    out, lse = (name_activation(x, "attention") for x in results)
    return out, (q, k, v, ids_T, ids_S, sinks, out, lse)


def _ring_backward(ring: _Ring, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, ids_T, ids_S, sinks, out, lse = saved
    with ring.layout.current():
        queries, keys = activation_spec(QUERIES), activation_spec(KEYS)
        rank, ids = activation_spec(("length",)), activation_spec(SEGMENTS)
        run = on_each_device(
            functools.partial(_backward, ring),
            (rank, queries, keys, keys, ids, ids, queries, activation_spec(QUERIES[:3]), queries),
            (queries, keys, keys),
        )
        d_out = shard(d_out, QUERIES)
        found = run(_ranks(ring), q, k, v, ids_T, ids_S, out, lse, d_out)
        if sinks is None:
            return *found, None, None, None
        # As for any key, but its value is 0: it only reduces the result.
        inner = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
        d_sinks = -(jnp.exp(sinks - lse) * inner).sum((0, 1))
        return *found, None, None, d_sinks


_ring.defvjp(_ring_forward, _ring_backward)


def _ranks(ring: _Ring) -> jax.Array:
    # An array with one number on each device: axis_index has no lowering inside a pipeline stage.
    if split_before() > 1:
        return jax.lax.axis_index(AXIS)[None]
    return shard(jnp.arange(ring.layout.mesh.shape[AXIS]), ("length",))


# -- on one device -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Between a rank's arrays and their runs: queries in chunks [n, B, K, G, Q, ...]."""

    B: int
    t: int
    N: int
    K: int

    @property
    def r(self) -> int:
        return self.t // 2

    @property
    def Q(self) -> int:  # noqa: N802 - a letter of the legend
        return queries_at_once(self.r)

    def chunks(self, x: jax.Array) -> list[jax.Array]:
        """[B, t, N, ...] to the early and the late run's [n, B, K, G, Q, ...]."""
        shape = (self.B, 2, self.r // self.Q, self.Q, self.K, self.N // self.K, *x.shape[3:])
        x = jnp.moveaxis(x.reshape(shape), (1, 2, 0, 4, 5, 3), range(6))
        return [x[0], x[1]]

    def unchunk(self, runs: list[jax.Array]) -> jax.Array:
        """Return the inverse."""
        x = jnp.moveaxis(jnp.stack(runs), range(6), (1, 2, 0, 4, 5, 3))
        return x.reshape(self.B, self.t, self.N, *x.shape[6:])

    def runs(self, x: jax.Array) -> list[jax.Array]:
        """[B, t, ...] to the early and the late run's [B, r, ...]."""
        return [x[:, : self.r], x[:, self.r :]]


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A slot of a block on this rank: static if all ranks agree, else selected by rank."""

    slots: tuple[int, ...]
    rank: jax.Array

    @property
    def fixed(self) -> bool:
        return len(set(self.slots)) == 1

    @property
    def slot(self) -> Any:
        return self.slots[0] if self.fixed else jnp.asarray(self.slots)[self.rank]

    def take(self, runs: list[Any]) -> Any:
        if self.fixed:
            return runs[self.slots[0]]
        late = self.slot == 1
        return jax.tree.map(lambda a, b: jnp.where(late, b, a), *runs)

    def put(self, runs: list[Any], new: Any) -> list[Any]:
        if self.fixed:
            return [new if slot == self.slots[0] else old for slot, old in enumerate(runs)]
        return [
            jax.tree.map(lambda a, b, here=self.slot == slot: jnp.where(here, b, a), old, new)
            for slot, old in enumerate(runs)
        ]


@dataclasses.dataclass(frozen=True)
class _Block:
    """A run of keys and values in a block."""

    ring: _Ring
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    ids_BS: jax.Array | None
    position_S: jax.Array
    whole: bool

    def visible(self, position_Q: jax.Array, ids_BQ: jax.Array | None) -> jax.Array | None:
        """Booleans that broadcast against scores [B, K, G, Q, S]; None where all is seen."""
        seen = None
        if not self.whole:
            distance = position_Q[:, None] - self.position_S[None, :]
            seen = jnp.ones(distance.shape, bool)
            if self.ring.causal:
                seen &= distance >= 0
            if self.ring.window is not None:
                seen &= distance < self.ring.window
        if ids_BQ is not None:
            assert self.ids_BS is not None, "segment ids of the queries but not of the keys"
            same = (ids_BQ[:, :, None] == self.ids_BS[:, None, :])[:, None, None]
            seen = same if seen is None else seen & same
        return seen

    def scores(self, q: jax.Array, position_Q: jax.Array, ids_BQ: jax.Array | None) -> jax.Array:
        """[B, K, G, Q, S] in float32; -inf for masked keys."""
        seen = self.visible(position_Q, ids_BQ)
        scores = self.dot("BKGQH,BSKH->BKGQS", q, self.k_BSKH) * q.shape[-1] ** -0.5
        scores = apply_softcap(scores, self.ring.softcap)
        return scores if seen is None else jnp.where(seen, scores, -jnp.inf)

    def dot(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """einsum of operands in the keys' dtype, or exactly; summed in float32."""
        dtype = jnp.float32 if self.ring.exact else self.k_BSKH.dtype
        a, b = a.astype(dtype), b.astype(dtype)
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _attend(block: _Block, carry: None, chunk: Any) -> tuple[None, Any]:
    """Update the online softmax of a chunk of queries (arXiv 2205.14135) with this block's keys."""
    (largest, total, weighted), q, position_Q, ids_BQ = chunk
    scores = block.scores(q, position_Q, ids_BQ)
    new = jnp.maximum(largest, scores.max(-1))
    # A fully masked row has -inf here, and -inf minus itself is NaN.
    safe = jnp.where(jnp.isneginf(new), 0.0, new)
    p, shrink = jnp.exp(scores - safe[..., None]), jnp.exp(largest - safe)
    weighted = weighted * shrink[..., None] + block.dot("BKGQS,BSKH->BKGQH", p, block.v_BSKH)
    return carry, (new, total * shrink + p.sum(-1), weighted)


def _differentiate(block: _Block, d_kv: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
    """Gradients of a block's keys and values, and of a chunk of queries, accumulated."""
    d_q, (q, d_out, lse, inner), position_Q, ids_BQ = chunk
    scores = block.scores(q, position_Q, ids_BQ)
    p = jnp.exp(scores - lse[..., None])
    d_p = block.dot("BKGQH,BSKH->BKGQS", d_out, block.v_BSKH)
    d_scores = p * (d_p - inner[..., None]) * slope(scores, block.ring.softcap)
    d_scores *= q.shape[-1] ** -0.5
    d_k = block.dot("BKGQS,BKGQH->BSKH", d_scores, q)
    d_v = block.dot("BKGQS,BKGQH->BSKH", p, d_out)
    d_q += block.dot("BKGQS,BSKH->BKGQH", d_scores, block.k_BSKH)
    return d_kv + jnp.stack([d_k, d_v]), d_q


def _over_chunks(function: Callable[..., Any], carry: Any, xs: Any) -> tuple[Any, Any]:
    """lax.scan, without a loop for one chunk."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(function, carry, xs)
    carry, out = function(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


class _Rank:
    """Per-rank constants: its shapes, the number of steps, and which chunk of which rank is
    where."""

    def __init__(self, ring: _Ring, ranks: jax.Array, q: jax.Array, k: jax.Array) -> None:
        self.ring, self.rank, self.c = ring, ranks[0], ring.layout.mesh.shape[AXIS]
        B, t, N = q.shape[:3]
        self.shapes = _Shapes(B, t, N, k.shape[2])
        self.steps = work(self.c, self.shapes.r, causal=ring.causal, window=ring.window)

    def permute(self, x: Any) -> Any:
        """To the next rank."""
        pairs = [(i, (i + 1) % self.c) for i in range(self.c)]
        return jax.lax.ppermute(x, AXIS, pairs)

    def documents(self, ids_Bt: jax.Array | None) -> list[Any]:
        """Segment ids [n, B, Q] of each run of queries; None if there are none."""
        if ids_Bt is None:
            return [None, None]
        shape = (self.shapes.B, -1, self.shapes.Q)
        return [jnp.moveaxis(x.reshape(shape), 1, 0) for x in self.shapes.runs(ids_Bt)]

    def product(self, product: Product, step: int, held: Any) -> tuple[Any, Any, Any, _Block]:
        """Return the switches of a block matmul, the positions [n, Q] of its queries, and its block
        of keys."""
        own, other = (_Choice(s, self.rank) for s in (product.query_slots, product.key_slots))
        (keys, values), ids = held
        runs = self.shapes.runs
        block = _Block(
            self.ring,
            other.take(runs(keys)),
            other.take(runs(values)),
            None if ids is None else other.take(runs(ids)),
            self._positions((self.rank - step) % self.c, other),
            product.whole,
        )
        return own, other, self._positions(self.rank, own).reshape(-1, self.shapes.Q), block

    def _positions(self, rank: jax.Array, choice: _Choice) -> jax.Array:
        return run_of(rank, choice.slot, self.c) * self.shapes.r + jnp.arange(self.shapes.r)


def _forward(
    ring: _Ring,
    ranks: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids_T: jax.Array | None,
    ids_S: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Output [B, t, N, H] and log-sum-exp [B, t, N], infinite where a query sees no key."""
    me = _Rank(ring, ranks, q, k)
    queries, documents = me.shapes.chunks(q), me.documents(ids_T)
    # The running maximum, sum of exponentials and weighted values.
    row = queries[0].shape[:-1]
    largest, total = jnp.full(row, -jnp.inf, jnp.float32), jnp.zeros(row, jnp.float32)
    if sinks is not None:
        by_head = sinks.reshape(me.shapes.K, -1, 1)
        largest, total = jnp.broadcast_to(by_head, row), jnp.ones(row, jnp.float32)
    sums: list[Any] = [(largest, total, jnp.zeros((*row, q.shape[-1]), jnp.float32))] * 2
    held: Any = (jnp.stack([k, v]), ids_S)

    for step, products in enumerate(me.steps):
        following = me.permute(held) if step < me.c - 1 else None
        for product in products:
            own, _, positions, block = me.product(product, step, held)
            xs = (own.take(sums), own.take(queries), positions, own.take(documents))
            _, new = _over_chunks(functools.partial(_attend, block), None, xs)
            sums = own.put(sums, new)
        if following is not None:
            # At most one step ahead, or all keys of the sequence could be live at once.
            held, sums = jax.lax.optimization_barrier((following, sums))

    out, lse = [], []
    for largest, total, weighted in sums:
        divisor = jnp.where(total > 0, total, 1.0)
        out.append(weighted / divisor[..., None])
        lse.append(jnp.where(total > 0, largest + jnp.log(divisor), jnp.inf))
    return me.shapes.unchunk(out).astype(q.dtype), me.shapes.unchunk(lse)


def _backward(
    ring: _Ring,
    ranks: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids_T: jax.Array | None,
    ids_S: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values."""
    me = _Rank(ring, ranks, q, k)
    shapes, documents = me.shapes, me.documents(ids_T)
    inner = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
    rows = [*zip(*(shapes.chunks(x) for x in (q, d_out, lse, inner)), strict=True)]
    d_q = [jnp.zeros(rows[0][0].shape, jnp.float32)] * 2
    none = jnp.zeros((2, *shapes.runs(k)[0].shape), jnp.float32)
    held: Any = (jnp.stack([k, v]), ids_S)
    home = travelling = None

    for step, products in enumerate(me.steps):
        following = me.permute(held) if step < me.c - 1 else None
        arriving = None if travelling is None else me.permute(travelling)
        d_held = [none, none]
        for product in products:
            own, other, positions, block = me.product(product, step, held)
            xs = (own.take(d_q), own.take(rows), positions, own.take(documents))
            d_run, d_chunks = _over_chunks(
                functools.partial(_differentiate, block), other.take(d_held), xs
            )
            d_q, d_held = own.put(d_q, d_chunks), other.put(d_held, d_run)
        d_kv = jnp.concatenate(d_held, axis=2)
        # The rank's own part stays; the sums of the others' keys are sent with these.
        if home is None:
            home = d_kv
        else:
            travelling = d_kv if arriving is None else arriving + d_kv
        if following is not None:
            held, travelling, home, d_q = jax.lax.optimization_barrier(
                (following, travelling, home, d_q)
            )

    d_k, d_v = home + me.permute(travelling)
    return shapes.unchunk(d_q).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)
