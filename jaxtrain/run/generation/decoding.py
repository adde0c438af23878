"""Batched decoding: a compiled prefill and a compiled decode loop with a KV cache.

Rows are padded on the left, so that all end at the same place; padding is another document, which
no token of the text sees, and positions count from the text's first token. Numbers of rows, lengths
of prompts and of answers are rounded up, so that few programs are compiled.
Letters: B rows, T length, S longest sequence, N new tokens, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.models.model import TokenModel
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.cache import Cache, empty_cache
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.parameters import unstack
from jaxtrain.nn.remat import POLICIES
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.nn.transformer.language_model import Transformer, hidden_states, logits
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import Layout, shard
from jaxtrain.run.generation.sampling import Drawing, adjust_logits, draw
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

LEAST_LENGTH = 16  # that lengths are rounded up to
# Layers that are decoded without a loop over them, for each of which the program compiles longer.
MOST_UNSTACKED = 16
ROWS = ("batch", "length")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """Rows that are being written.

    Attributes:
      cache: what the layers keep of the tokens so far, padding too; a `Cache` where `next_logits`
        goes on with them, else what the function keeps that does.
      logits_BV: of the next token, float32.
      padding_B: places before a row's text.
      seen_BV: tokens that stand in the text so far; None where no setting asks.
      finished_B: rows whose draws are not wanted any more.
      limit_B: how many tokens a row may draw.
      drawn_BN: the tokens, int32.
      told_BN: the model's log-probability of each, before anything was adjusted.
      count: how many were drawn.
    """

    cache: Any
    logits_BV: jax.Array
    padding_B: jax.Array
    seen_BV: jax.Array | None
    finished_B: jax.Array
    limit_B: jax.Array
    drawn_BN: jax.Array
    told_BN: jax.Array
    count: jax.Array


def round_up(size: int, *, least: int = 1, most: int | None = None) -> int:
    """The power of two that is at least `size` and `least`, or `most`."""
    up = max(least, 1 << (size - 1).bit_length())
    return up if most is None else min(up, most)


def for_one_text(layout: Layout) -> Layout:
    """The layout in which every device works on the same rows, and layers in their order."""
    layout = layout.with_manual("pipe")
    return dataclasses.replace(layout, split_batch=False, sequence_parallel=False)


def for_texts(setup: Setup) -> Setup:
    """The program that writes: rows split over the batch's devices, and nothing along length.

    Cached decoding always runs the reference kernel: one query a step is no work for the others.
    """
    layout = setup.layout.with_manual("pipe", "context")
    layout = dataclasses.replace(layout, sequence_parallel=False)
    execution = dataclasses.replace(setup.execution, kernel="reference", remat=POLICIES["none"])
    return dataclasses.replace(setup, layout=layout, execution=execution)


def pad_prompts(
    setup: Setup, sizes: TokenModel, prompts: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows int32 [B, T], and the padding before each [B].

    B and T are rounded up, B to what divides over the batch's devices; rows that are none have
    one token. Where padding would take an expert's slots, T is not rounded.
    """
    longest = max(len(prompt) for prompt in prompts)
    if not counts_slots(sizes):
        longest = round_up(longest, least=LEAST_LENGTH, most=sizes.context_length)
    devices = setup.layout.batch_devices()
    rows = -(-round_up(len(prompts)) // devices) * devices
    tokens_BT = np.zeros((rows, longest), np.int32)
    padding_B = np.full(rows, 0 if counts_slots(sizes) else longest - 1, np.int32)
    for row, prompt in enumerate(prompts):
        padding_B[row] = longest - len(prompt)
        tokens_BT[row, padding_B[row] :] = prompt
    return tokens_BT, padding_B


def batches(lengths: list[int], sizes: TokenModel, batch_size: int) -> Iterator[list[int]]:
    """Numbers of prompts that go on together: of lengths that are near, or equal where they must
    be."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        unlike = batch and counts_slots(sizes) and lengths[number] != lengths[batch[0]]
        if len(batch) == batch_size or unlike:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def counts_slots(sizes: TokenModel) -> bool:
    """Whether a row's own length says how many of its tokens an expert takes."""
    return sizes.experts is not None and sizes.experts.capacity_factor is not None


@functools.partial(jax.jit, static_argnames=("setup", "sizes", "room"))
def prefill(
    setup: Setup,
    sizes: TokenModel,
    state: TrainState,
    tokens_BT: jax.Array,
    padding_B: jax.Array,
    *,
    room: int,
) -> tuple[jax.Array, Cache]:
    """Logits [B, V] of the token after each row, and a cache of `room` places with them in it."""
    model, dtype = setup.model(state), jnp.dtype(setup.precision.compute)
    rows = tokens_BT.shape[0]
    cache = empty_cache(sizes.cached, layers=sizes.layers, rows=rows, room=room, dtype=dtype)
    logits_BTV, cache = next_logits(
        model, tokens_BT, cache, padding_B, setup.execution, room=room, last=1
    )
    return logits_BTV[:, 0], cache


@functools.partial(jax.jit, static_argnames=("setup", "room", "following"), donate_argnames="texts")
def advance(
    setup: Setup,
    state: TrainState,
    texts: Texts,
    drawing: Drawing,
    keys_B: jax.Array,
    ends_E: jax.Array,
    until: jax.Array | int,
    *,
    room: int,
    following: Callable[..., Any] | None = None,
) -> Texts:
    """The texts with `until` tokens drawn for each, or as many as any of them wants.

    Args:
      setup: from `for_texts`.
      state: the trained state.
      texts: the texts so far, which are taken away.
      drawing: how tokens are chosen.
      keys_B: a row's own, of all its draws.
      ends_E: tokens that end a text.
      until: how many tokens there are then.
      room: places of the cache.
      following: makes the next logits as `next_logits` does, which None means.
    """
    model: Any = setup.model(state)
    unstacks = following is None and unstacks_layers(model, setup.layout)
    if unstacks:
        model.layers = nnx.data(unstack(model.layers))
        texts = dataclasses.replace(texts, cache=texts.cache.unstack())
    following = following or next_logits

    def is_unfinished(texts: Texts) -> jax.Array:
        return (texts.count < until) & ~texts.finished_B.all()

    def step(texts: Texts) -> Texts:
        keys_of_draw_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, texts.count)
        adjusted_BV = adjust_logits(texts.logits_BV, texts.seen_BV, drawing)
        token_B = draw(adjusted_BV, keys_of_draw_B, drawing)
        told_BV = jax.nn.log_softmax(texts.logits_BV, axis=-1)
        told_B1 = jnp.take_along_axis(told_BV, token_B[:, None], axis=-1)
        seen_BV = texts.seen_BV
        if seen_BV is not None:
            seen_BV |= token_B[:, None] == jnp.arange(seen_BV.shape[1])
        count = texts.count + 1
        logits_BTV, cache = following(
            model, token_B[:, None], texts.cache, texts.padding_B, setup.execution,
            room=room, last=1,
        )  # fmt: skip
        return dataclasses.replace(
            texts,
            cache=cache,
            logits_BV=logits_BTV[:, 0],
            seen_BV=seen_BV,
            finished_B=texts.finished_B | jnp.isin(token_B, ends_E) | (count >= texts.limit_B),
            drawn_BN=jax.lax.dynamic_update_slice_in_dim(
                texts.drawn_BN, token_B[:, None], texts.count, axis=1
            ),
            told_BN=jax.lax.dynamic_update_slice_in_dim(
                texts.told_BN, told_B1, texts.count, axis=1
            ),
            count=count,
        )

    texts = jax.lax.while_loop(is_unfinished, step, texts)
    return dataclasses.replace(texts, cache=texts.cache.restack()) if unstacks else texts


def unstacks_layers(model: Transformer, layout: Layout) -> bool:
    """Whether `advance` decodes without a loop over layers.

    XLA's loop for CPUs copies every layer's weights and cache for each token. Elsewhere, and for
    deep models, programs stay as they are.
    """
    if not isinstance(model, Decoder) or model.leading:
        return False
    is_one_cpu = layout.mesh.size == 1 and platform_of(layout.mesh) == "cpu"
    return is_one_cpu and jax.tree.leaves(model.layers)[0].shape[0] <= MOST_UNSTACKED


def next_logits(
    model: Transformer,
    tokens_BT: jax.Array,
    cache: Cache,
    padding_B: jax.Array,
    execution: Execution,
    *,
    room: int,
    last: int,
) -> tuple[jax.Array, Cache]:
    """Float32 logits after each of the last tokens, whole on every device, and the longer cache.

    Args:
      model: the model.
      tokens_BT: what follows the tokens of the cache.
      cache: of `room` places.
      padding_B: places before each row's text.
      execution: how the model is run.
      room: places of the cache.
      last: of how many of the tokens logits [B, last, V] are wanted.
    """
    place_T = cache.length + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    before_B1 = padding_B[:, None]
    positions_BT = jnp.maximum(place_T - before_B1, 0)
    mask = Mask(
        query_start=cache.length,
        segment_ids_BT=shard((place_T >= before_B1).astype(jnp.int32), ROWS),
        segment_ids_BS=shard((jnp.arange(room) >= before_B1).astype(jnp.int32), ROWS),
    )
    tokens_BT, positions_BT = shard(tokens_BT, ROWS), shard(positions_BT, ROWS)
    h_BTD, longer, _ = hidden_states(model, tokens_BT, positions_BT, mask, execution, cache)
    assert longer is not None, "a cache went in"
    logits_BTV = logits(model, h_BTD[:, -last:]).astype(jnp.float32)
    if not jax.sharding.get_abstract_mesh().empty:
        # Each device draws for every row: the draws do not depend on the mesh.
        logits_BTV = jax.sharding.reshard(logits_BTV, P())
    return logits_BTV, longer
