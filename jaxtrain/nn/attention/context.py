"""Context parallelism: sequences sharded over devices; ring order, Ulysses, restrictions.

Letters: B batch, T length, N query heads, K kv heads, H head_dim.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError, nearest_multiple
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.patterns import Pattern
from jaxtrain.parallel.sharding import (
    activation_spec,
    current_layout,
    on_each_device,
    parts_of,
    shard,
)

ContextParallel = Literal["ring", "ulysses"]

AXIS = "context"
QUERIES = ("inner_batch", "length", "heads", "head_dim")
KEYS = ("inner_batch", "length", "kv_heads", "head_dim")
SEGMENTS = ("inner_batch", "length")
HEADS = ("heads",)

# Late queries and early keys first: under a causal mask every rank needs that block at every step.
_SLOT_PAIRS = ((1, 0), (0, 0), (1, 1), (0, 1))


def split() -> int:
    """Number of devices that sequences are split over."""
    layout = current_layout()
    if layout is None:
        return 1
    return layout.size(layout.activation(("length",))[0]) * split_before()


def split_before() -> int:
    """Number of devices that sequences were split over outside of the code being traced."""
    layout = current_layout()
    return 1 if layout is None else layout.size(tuple(layout.one_batch & {AXIS}))


def sum_of_sequence(sums: jax.Array) -> jax.Array:
    """Turn sums over local positions into sums over all positions of their sequences."""
    return jax.lax.psum(sums, AXIS) if split_before() > 1 else sums


def shard_mask(mask: Mask) -> Mask:
    """Return a mask whose arrays are sharded like queries and keys: documents by rows, sinks by
    heads."""
    return _by_field(lambda x, axes: shard(x, axes), mask)


def specs(mask: Mask, *, exchanged: bool = False) -> Any:
    """Specs of the arrays of a mask that is `laid_out`.

    Args:
      mask: itself.
      exchanged: whether heads are split along `context` too.
    """

    def spec(_: jax.Array, axes: tuple[str, ...]) -> P | None:
        found = activation_spec(axes)
        by_head = exchanged and axes == HEADS and found is not None
        return P((*parts_of(found[0]), AXIS)) if by_head else found

    return _by_field(spec, mask)


def _by_field(function: Callable[[jax.Array, tuple[str, ...]], Any], mask: Mask) -> Any:
    """Apply `function` to each array of a mask and its logical axes."""

    def one(path: tuple[Any, ...], x: jax.Array) -> Any:
        return function(x, HEADS if path[-1].name == "sinks_N" else SEGMENTS)

    return jax.tree_util.tree_map_with_path(one, mask)


def along_context(x_BT: jax.Array, method: str) -> jax.Array:
    """Shard per-token values of whole sequences like activations.

    A ring has zig-zag order: cut into 2c chunks, rank i gets chunk i and chunk 2c-1-i, so that
    under a causal mask every rank has equal work. Positions and targets move with their tokens, so
    that only attention depends on the order. No communication: every rank has the whole batch.

    Args:
      x_BT: values in the order of the text, or vectors [B, T, F]; a device's own part of them
        is unchanged.
      method: an `Attention.context_parallel`.
    """
    c = split() // split_before()
    if c > 1 and method == "ring":
        B, T, *rest = x_BT.shape
        if T % (2 * c):
            raise UserError("\n".join(validate(method, context=c, length=T)))
        x = x_BT.reshape(B, 2, c, T // (2 * c), *rest)
        x_BT = jnp.stack([x[:, 0], jnp.flip(x[:, 1], 1)], axis=2).reshape(B, T, *rest)
    return shard(x_BT, ("batch", "length", "narrow")[: x_BT.ndim])


@dataclasses.dataclass(frozen=True)
class Product:
    """Matmul of a chunk of queries with a chunk of keys, on every rank at once.

    Attributes:
      query_slots: by rank, which of its own chunks: 0 the early one, 1 the late one.
      key_slots: by rank, which chunk of the keys that it has at this step.
      whole: every query sees every key, on every rank: no positional mask is needed.
    """

    query_slots: tuple[int, ...]
    key_slots: tuple[int, ...]
    whole: bool


def run_of(rank: Any, slot: Any, c: int) -> Any:
    """Return the chunk of the sequence that a rank has in a slot; numbers or arrays."""
    return rank + slot * (2 * c - 1 - 2 * rank)


@functools.cache
def work(c: int, r: int, *, causal: bool, window: int | None) -> tuple[tuple[Product, ...], ...]:
    """Return the blocks of each of the c steps of the ring, without fully masked ones.

    At step s rank i has the keys of rank (i - s) mod c. Every rank computes as many blocks as the
    rank that needs most; a rank that needs fewer gets a block that is fully masked.

    Args:
      c: ranks.
      r: tokens of a chunk.
      causal: as in Mask.
      window: as in Mask.
    """

    def runs(rank: int, step: int, pair: tuple[int, int]) -> tuple[int, int]:
        return run_of(rank, pair[0], c), run_of((rank - step) % c, pair[1], c)

    def is_visible(query: int, key: int) -> bool:
        near = window is None or (query - key - 1) * r + 1 < window
        return near and (not causal or key <= query)

    def is_full(query: int, key: int) -> bool:
        near = window is None or (query - key + 1) * r - 1 < window
        return near and (not causal or key < query)

    steps = []
    for step in range(c):
        needed = [[p for p in _SLOT_PAIRS if is_visible(*runs(i, step, p))] for i in range(c)]
        count = max(len(pairs) for pairs in needed)
        union = [p for p in _SLOT_PAIRS if any(p in pairs for pairs in needed)]
        # The same pairs on every rank where that costs nothing: then no chunk is selected by rank.
        table = [union] * c
        if len(union) > count:
            hidden = [[p for p in _SLOT_PAIRS if p not in pairs] for pairs in needed]
            table = [(needed[i] + hidden[i])[:count] for i in range(c)]
        products = []
        for pairs in zip(*table, strict=True):
            query_slots, key_slots = zip(*pairs, strict=True)
            is_whole = all(is_full(*runs(i, step, pair)) for i, pair in enumerate(pairs))
            products.append(Product(query_slots, key_slots, is_whole))
        steps.append(tuple(products))
    return tuple(steps)


def ulysses(
    kernel: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    mask: Mask,
) -> jax.Array:
    """Attention over sequences split over `context`, by exchanging heads (arXiv 2309.14509).

    One all-to-all gives each device whole sequences of 1/c of its heads, `kernel` runs on them,
    and another one returns them. If c does not divide the kv heads, each is repeated:
    c / gcd(K, c) times the bytes of keys and values.

    Args:
      kernel: attention on one device, called as kernel(q, k, v, mask).
      q_BTNH: queries of the whole batch, as the other two.
      k_BTKH: keys.
      v_BTKH: values.
      mask: a Mask over whole sequences in the order of the text.
    """
    c = split()

    def run(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        # Documents are compared over whole sequences: 4 bytes per token are gathered.
        ids = (mask.segment_ids_BT, mask.segment_ids_BS)
        ids = jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True), ids)
        mask = dataclasses.replace(mask, segment_ids_BT=ids[0], segment_ids_BS=ids[1])
        repeats = c // math.gcd(k.shape[2], c)
        # For each device of the axis its heads of q, k and v, so that one collective moves them.
        parts = [q, jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2)]
        parts = [x.reshape(*x.shape[:2], c, x.shape[2] // c, x.shape[3]) for x in parts]
        heads = [x.shape[3] for x in parts]
        there = jax.lax.all_to_all(jnp.concatenate(parts, 3), AXIS, 2, 1, tiled=True)[:, :, 0]
        out = kernel(*jnp.split(there, [heads[0], heads[0] + heads[1]], axis=2), mask)
        return jax.lax.all_to_all(out, AXIS, 1, 2, tiled=True)

    of_mask = specs(mask, exchanged=True)
    mask = jax.tree.map(jax.sharding.reshard, shard_mask(mask), of_mask)
    queries, keys = activation_spec(QUERIES), activation_spec(KEYS)
    in_specs = (queries, keys, keys, of_mask)
    run = on_each_device(run, in_specs, queries)
    return run(shard(q_BTNH, QUERIES), shard(k_BTKH, KEYS), shard(v_BTKH, KEYS), mask)


def validate(
    method: str,
    *,
    context: int,
    length: int,
    tensor: int = 1,
    num_heads: int | None = None,
    kernel: str | None = None,
    model: str = "Model",
    pattern: Pattern | None = None,
) -> Iterator[str]:
    """Yield each reason why sequences cannot be split like this.

    Args:
      method: an `Attention.context_parallel`.
      context: the size of the mesh axis; 1 is always possible.
      length: tokens of a sequence.
      tensor: the size of the mesh axis that splits the heads first.
      num_heads: query heads; None leaves them unchecked.
      kernel: an `Attention.kernel`; None leaves it unchecked.
      model: the model's name, for the message.
      pattern: the model's; None: it has none.
    """
    if context == 1:
        return
    c = context
    heads_divide = num_heads is None or num_heads % (tensor * c) == 0
    runs = 2 * c if method == "ring" else c
    if length % runs:
        yield (
            f"TextData.sequence_length={length} does not divide into the {runs} parts of "
            f"Attention.context_parallel={method!r} on Mesh.context={c}; the nearest is "
            f"{nearest_multiple(length, runs)}"
        )
    if method == "ring" and pattern is not None:
        yield (
            f"Attention.context_parallel='ring' (Mesh.context={c}) supports causal and windowed "
            f"masks, not a {type(pattern).__name__}; use Attention.context_parallel='ulysses'"
        )
    elif method == "ring" and kernel in KERNELS and not KERNELS[kernel].plain:
        other = f", or Attention.context_parallel='ulysses' with {kernel!r}"
        yield (
            f"Attention.kernel={kernel!r} gives no log-sum-exp, so Attention.context_parallel="
            f"'ring' (Mesh.context={c}) cannot merge its blocks; use Attention.kernel='xla'"
            f"{other if heads_divide else ''}"
        )
    if method == "ulysses" and not heads_divide:
        assert num_heads is not None
        own = max(num_heads // tensor, 1)
        fits = max(d for d in range(1, c + 1) if own % d == 0 and c % d == 0)
        yield (
            f"{model}.num_heads={num_heads} does not divide over Mesh.tensor x Mesh.context="
            f"{tensor * c}, and Attention.context_parallel='ulysses' gives each device whole heads;"
            f" the nearest is {nearest_multiple(num_heads, tensor * c)}, or set Mesh.context={fits}"
            " or Attention.context_parallel='ring'"
        )
