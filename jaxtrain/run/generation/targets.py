"""Generation with encoder-decoders: sources to targets.

Letters: B rows, S source length, T target length, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.source import PairData
from jaxtrain.data.pairs.spans import SpanData
from jaxtrain.models.model import TokenModel, pair_model
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import Cache, empty_cache
from jaxtrain.nn.transformer.language_model import PairModule, logits
from jaxtrain.parallel.sharding import shard
from jaxtrain.run.generation import beams
from jaxtrain.run.generation.answer import Answer, Stopping, encode_prompt
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.decoding import (
    LEAST_LENGTH,
    ROWS,
    Sampling,
    Texts,
    for_texts,
    round_up,
)
from jaxtrain.run.generation.generate import Watch, validate_seed, validate_watch, write_answers
from jaxtrain.training.settings import Train
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

USUAL_LENGTH = 100  # tokens of a target, by default


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """Caches of sources, and of their targets so far.

    Attributes:
      cache: the decoder's cache of the targets' tokens.
      remembered: its cache of the sources.
      source_segment_ids_BS: 1 where a source has a token.
    """

    cache: Cache
    remembered: Any
    source_segment_ids_BS: jax.Array


def write_targets(
    setup: Setup,
    train: Train,
    state: TrainState,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None,
    sampling: Sampling | BeamSearch,
    stop: Sequence[str],
    seed: int,
    batch_size: int,
    show: Callable[[str], None] | None = None,
    ends: Sequence[int],
) -> list[Answer]:
    """Return the targets of a trained encoder-decoder for sources: texts for texts, or token ids.

    Args:
      setup: the state's program.
      train: its model, and the data that it was trained on.
      state: the trained state.
      prompts: the sources.
      max_new_tokens, sampling, seed, batch_size: as in `targets`.
      stop: strings before which the target of a text ends.
      show: called with the first text's target piece by piece while it is generated.
      ends: tokens that end a target.

    Raises:
      UserError: the data are not pairs, there is no end token, a source cannot be read,
        a stop string is empty, or a beam search is to stop at one.
    """
    if not isinstance(train.data, PairData | SpanData):
        raise UserError(
            f"generate: Train.data=@{type(train.data).__name__}() does not say what a target "
            "begins and ends with; a model of pairs generates targets if its data are "
            "@PairData() or @SpanData()"
        )
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    tokenizer = train.data.open_tokenizer() if train.data.source != "synthetic" else None
    section = "PairData" if isinstance(train.data, PairData) else "TextData"
    if tokenizer is None and (texts or not ends):
        raise UserError(
            f"generate: {section}.source = 'synthetic' are random tokens, so there is nothing to "
            f"generate; bind {section}.source and {section}.tokenizer"
        )
    request: dict[str, Any] = {
        "begin": train.data.begin, "ends": ends, "max_new_tokens": max_new_tokens,
        "sampling": sampling, "seed": seed, "batch_size": batch_size,
    }  # fmt: skip
    sizes = pair_model(train.model)
    if tokenizer is None or not texts:
        ids: list[Any] = list(prompts)
        return targets(setup, sizes, state, ids, **request)
    ids = [encode_prompt(tokenizer, text) for text in texts]
    # A target has no prompt: it is the text of its own tokens alone.
    watch = Stopping(tokenizer, [[]] * len(ids), stop, show)
    answers = targets(setup, sizes, state, ids, **request, watch=watch if stop or show else None)
    written = [watch.answer(number, answer) for number, answer in enumerate(answers)]
    watch.show_rest(written[0].text or "")
    return written


def targets(
    setup: Setup,
    sizes: TokenModel,
    state: TrainState,
    sources: Sequence[Sequence[int]],
    *,
    begin: int,
    ends: Sequence[int],
    max_new_tokens: int | None,
    sampling: Sampling | BeamSearch,
    seed: int,
    batch_size: int,
    watch: Watch | None = None,
) -> list[Answer]:
    """Return the target that an encoder-decoder generates from each source, in their order.

    Args:
      setup: the state's program.
      sizes: its model's settings.
      state: the trained state.
      sources: nonempty token lists.
      begin: the decoder's start token.
      ends: tokens that end a target.
      max_new_tokens: maximum number of new tokens of each; None: up to 100 that fit.
      sampling: sampling or beam search settings.
      seed: of sampling; combined with a source's index.
      batch_size: sources that are answered at once.
      watch: may end a target early.

    Raises:
      UserError: a source is empty, has tokens outside of the vocabulary or does not fit into
        its context, or a number is out of range.
    """
    validate_watch(sampling, watch)
    limit = _limit(max_new_tokens, sizes)
    validate_seed(seed)
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size}: use at least 1")
    for source in sources:
        _validate_source(source, sizes)
    setup, key, answers = for_texts(setup), jax.random.key(seed), []
    with setup.layout.active(), setup.precision.products():
        for first in range(0, len(sources), batch_size):
            some = sources[first : first + batch_size]
            rows = _rows(len(some), setup)
            source_BS, real_BS = _pad(some, rows, sizes)
            # One slot more than new tokens: the first holds `begin`, and the last token's
            # logits are computed and ignored.
            new = round_up(limit, least=LEAST_LENGTH, most=sizes.context_length)
            logits_BV, read = _encode(setup, sizes, state, source_BS, real_BS, begin, room=new + 1)
            limits = [limit] * len(some)
            if isinstance(sampling, BeamSearch):
                answers += beams.grow(
                    setup, state, logits_BV, read, np.zeros(rows, np.int32),
                    [[begin]] * len(some), limits, settings=sampling, ends=ends, room=new + 1,
                    following=_advance, rows_of=_rows_of,
                )  # fmt: skip
                continue
            numbers = np.minimum(first + np.arange(rows), len(sources) - 1)
            keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
            drawing = sampling.drawing()
            texts = _begin(
                read, logits_BV, limits, begin, new, seen="repetition_penalty" in drawing
            )
            answers += write_answers(
                setup, state, texts, range(first, first + len(some)), limits,
                drawing=drawing, keys_B=keys_B, ends=ends, room=new + 1, watch=watch,
                following=_advance,
            )[0]  # fmt: skip
    return answers


def _limit(max_new_tokens: int | None, sizes: TokenModel) -> int:
    most, name = sizes.context_length, type(sizes).__name__
    if max_new_tokens is None:
        return min(USUAL_LENGTH, most)
    if not 1 <= max_new_tokens <= most:
        raise UserError(
            f"--max-new-tokens {max_new_tokens}: use 1 to {most} ({name}.context_length={most})"
        )
    return max_new_tokens


def _validate_source(source: Sequence[int], sizes: TokenModel) -> None:
    name, most = type(sizes).__name__, sizes.context_length
    if not len(source):
        raise UserError("--prompt is empty: give at least one character, the source")
    if len(source) > most:
        raise UserError(
            f"--prompt has {len(source)} tokens, more than {name}.context_length={most}; give a "
            "shorter source"
        )
    outside = [token for token in source if not 0 <= token < sizes.vocab_size]
    if outside:
        raise UserError(
            f"generate: the source has the token {outside[0]}; use 0 to {sizes.vocab_size - 1} "
            f"({name}.vocab_size={sizes.vocab_size})"
        )


def _rows(count: int, setup: Setup) -> int:
    devices = setup.layout.batch_devices()
    return -(-round_up(count) // devices) * devices


def _pad(
    sources: Sequence[Sequence[int]], rows: int, sizes: TokenModel
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [B, S] of sources, and their masks; padding rows repeat the first."""
    longest = max(len(source) for source in sources)
    S = round_up(longest, least=LEAST_LENGTH, most=sizes.context_length)
    tokens_BS, real_BS = np.zeros((2, rows, S), np.int32)
    for row in range(rows):
        source = sources[row] if row < len(sources) else sources[0]
        tokens_BS[row, : len(source)], real_BS[row, : len(source)] = source, 1
    return tokens_BS, real_BS


def _begin(
    read: Encoded, logits_BV: jax.Array, limits: Sequence[int], begin: int, new: int, *, seen: bool
) -> Texts:
    """Return targets with only `begin`; rows beyond the limits are padding."""
    rows, V = logits_BV.shape
    seen_BV = jnp.broadcast_to(jnp.arange(V) == begin, (rows, V)) if seen else None
    return Texts(
        cache=read,
        logits_BV=logits_BV,
        padding_B=jnp.zeros(rows, jnp.int32),
        seen_BV=seen_BV,
        finished_B=jnp.arange(rows) >= len(limits),
        limit_B=jnp.full(rows, max(limits), jnp.int32),
        drawn_BN=jnp.zeros((rows, new), jnp.int32),
        log_p_BN=jnp.zeros((rows, new), jnp.float32),
        count=jnp.zeros((), jnp.int32),
    )


def _rows_of(read: Encoded, rows_B: jax.Array, *, generating: bool) -> Encoded:
    """Return the cache of these rows. All beams of a source share its memory, so that beams
    that are swapped only move the cache of their targets."""
    cache = beams.rows_of(read.cache, rows_B, generating=generating)
    if generating:
        return dataclasses.replace(read, cache=cache)
    return Encoded(
        cache,
        jax.tree.map(lambda x: beams.take_rows(x, rows_B), read.remembered),
        beams.take_rows(read.source_segment_ids_BS[None], rows_B)[0],
    )


@functools.partial(jax.jit, static_argnames=("setup", "sizes", "room"))
def _encode(
    setup: Setup,
    sizes: TokenModel,
    state: TrainState,
    source_BS: jax.Array,
    real_BS: jax.Array,
    begin: jax.Array | int,
    *,
    room: int,
) -> tuple[jax.Array, Encoded]:
    """Logits [B, V] of the first token of each target, and what is kept of the sources."""
    model: PairModule = setup.model(state)
    dtype, rows = jnp.dtype(setup.precision.compute), source_BS.shape[0]
    source_BS, real_BS = shard(source_BS, ROWS), shard(real_BS, ROWS)
    seen = Mask(causal=False, segment_ids_BT=real_BS, segment_ids_BS=real_BS)
    memory = model.encode(source_BS, seen, setup.execution)
    read = Encoded(
        empty_cache(sizes.cached, layers=sizes.layers, rows=rows, room=room, dtype=dtype),
        model.remember(memory, setup.execution),
        real_BS,
    )
    first_B1 = jnp.full((rows, 1), begin, jnp.int32)
    logits_BTV, read = _advance(
        model, first_B1, read, jnp.zeros(rows, jnp.int32), setup.execution, room=room, last=1
    )
    return logits_BTV[:, 0], read


def _advance(
    model: PairModule,
    tokens_BT: jax.Array,
    read: Encoded,
    padding_B: jax.Array,
    execution: Execution,
    *,
    room: int,
    last: int,
) -> tuple[jax.Array, Encoded]:
    """Float32 logits after each of the last tokens, and what is kept then; as `next_logits`, of
    rows without left padding."""
    del padding_B, room
    tokens_BT = shard(tokens_BT, ROWS)
    of_memory = Mask(
        causal=False,
        segment_ids_BT=jnp.ones_like(tokens_BT),
        segment_ids_BS=read.source_segment_ids_BS,
    )
    h_BTD, cache = model.go_on(tokens_BT, read.remembered, of_memory, execution, read.cache)
    logits_BTV = logits(model, h_BTD[:, -last:]).astype(jnp.float32)
    if not jax.sharding.get_abstract_mesh().empty:
        # Each device samples for every row: results do not depend on the mesh.
        logits_BTV = jax.sharding.reshard(logits_BTV, P())
    return logits_BTV, dataclasses.replace(read, cache=cache)
