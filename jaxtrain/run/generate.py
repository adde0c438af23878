"""Sampling from a language model with a cache: one compiled prefill, one compiled loop.

Letters: B batch (1), T length, V vocab, S longest sequence.
"""

import dataclasses
import unicodedata
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import Model, TokenModel, reads_tokens
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.cache import Cache, empty_cache
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.remat import POLICIES
from jaxtrain.nn.transformer import Transformer, hidden, logits
from jaxtrain.parallel.sharding import Layout, shard
from jaxtrain.training.settings import MAX_SEED, TextSource, Train
from jaxtrain.training.step import Program, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      temperature: logits are divided by it; 0 always takes the likeliest token.
      top_k: only the k likeliest tokens; None is no limit.
      top_p: only the likeliest tokens that together have this probability (arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"--temperature {self.temperature}: use 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k {self.top_k}: use at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: use a probability above 0 and at most 1")


def sample(logits_BV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """A token a row, int32 [B], drawn from softmax(logits / temperature) within top-k and top-p."""
    logits_BV = logits_BV.astype(jnp.float32)
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    ranked_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    keep_BV = jnp.ones(ranked_BV.shape, bool)
    if sampling.top_k is not None:
        keep_BV &= jnp.arange(ranked_BV.shape[-1]) < sampling.top_k
    if sampling.top_p is not None:
        # A token stays while what stands before it has not reached top_p: the first always does.
        probability_BV = jax.nn.softmax(jnp.where(keep_BV, ranked_BV, -jnp.inf), axis=-1)
        keep_BV &= jnp.cumsum(probability_BV, axis=-1) - probability_BV < sampling.top_p
    choice_B = jax.random.categorical(key, jnp.where(keep_BV, ranked_BV, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order_BV, choice_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


def write(
    program: Program,
    train: Train,
    state: TrainState,
    prompt: str,
    *,
    max_new_tokens: int | None,
    sampling: Sampling,
    seed: int,
) -> str:
    """What a trained language model writes after `prompt`.

    Args:
      program: the program whose state it is.
      train: its model and the data whose tokenizer it knows.
      state: the trained state.
      prompt: at least one character.
      max_new_tokens: how many tokens to draw; None: as far as 100 fit.
      sampling: how to draw them.
      seed: seed of the draws.

    Raises:
      UserError: the model is no language model, or the prompt is no text or does not fit into
        its context.
    """
    if not isinstance(train.data, TextSource):
        raise UserError(
            f"generate: Train.data=@{type(train.data).__name__}() has no tokenizer; only models "
            "trained on text generate"
        )
    _refuse_without_memory(train.model)
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt {prompt!r} is not UTF-8 text (character {error.start}); give it in UTF-8"
        ) from error
    tokenizer = train.data.open_tokenizer()
    tokens = continued(
        program,
        train,
        state,
        tokenizer.encode(prompt),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
    )
    if tokenizer.end_of_text in tokens:
        tokens = tokens[: tokens.index(tokenizer.end_of_text)]
    return tokenizer.decode(tokens)


def continued(
    program: Program,
    train: Train,
    state: TrainState,
    prompt: Sequence[int] | np.ndarray,
    *,
    max_new_tokens: int | None,
    sampling: Sampling,
    seed: int,
) -> list[int]:
    """The tokens that a trained language model lets follow after others.

    Args:
      program: the program whose state it is.
      train: its model.
      state: the trained state.
      prompt: integers [T], at least one.
      max_new_tokens, sampling, seed: as of `write`.

    Raises:
      UserError: the model is no language model, or the prompt holds no tokens of it or more than
        its context.
    """
    tokens, sizes = np.asarray(prompt), _refuse_without_memory(train.model)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise UserError(
            f"generate: the prompt is {tokens.dtype.name}{list(tokens.shape)}; use text, or the "
            "token ids of one text: integers [T]"
        )
    outside = tokens[(tokens < 0) | (tokens >= sizes.vocab_size)]
    if outside.size:
        raise UserError(
            f"generate: the prompt has the token {outside[0]}; use 0 to {sizes.vocab_size - 1} "
            f"({type(sizes).__name__}.vocab_size={sizes.vocab_size})"
        )
    if max_new_tokens is None:
        max_new_tokens = max(min(100, sizes.context_length - len(tokens)), 1)
    return generate(
        dataclasses.replace(program, layout=for_one_text(program.layout)),
        sizes,
        state,
        tokens.tolist(),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
    )


def _refuse_without_memory(model: Model) -> TokenModel:
    """The same model, one that looks back; UserError for others."""
    if not reads_tokens(model):
        raise UserError(
            f"generate: Train.model=@{type(model).__name__}() reads {model.inputs}; only models "
            "that read tokens generate"
        )
    if not model.cached:
        raise UserError(
            f"generate: Train.model=@{type(model).__name__}() keeps nothing of the tokens so far: "
            "it reads whole texts, and only models that look back generate"
        )
    return model


def printable(text: str) -> str:
    """The text with its control characters escaped, but for newlines and tabs.

    A byte-level model may write any: a terminal would obey them.
    """
    return "".join(
        repr(one)[1:-1] if unicodedata.category(one) == "Cc" and one not in "\n\t" else one
        for one in text
    )


def for_one_text(layout: Layout) -> Layout:
    """The layout in which every device works on the same text, and layers in their order."""
    return dataclasses.replace(
        layout, split_batch=False, sequence_parallel=False, manual=frozenset({"pipe"})
    )


def generate(
    program: Program,
    sizes: TokenModel,
    state: TrainState,
    prompt: list[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> list[int]:
    """The tokens that follow `prompt`.

    Args:
      program: the program whose state it is, with a layout of `for_one_text`.
      sizes: the model's settings.
      state: the trained state.
      prompt: at least one token.
      max_new_tokens: how many to draw.
      sampling: how to draw them.
      seed: seed of the draws.

    Raises:
      UserError: an empty prompt, a seed of more than 32 bits, or more tokens than the context.
    """
    if not prompt:
        raise UserError("--prompt is empty: give at least one character to go on from")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: use at least 1")
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed {seed}: use 0 to {MAX_SEED}")
    room = sizes.context_length - len(prompt)
    if max_new_tokens > room:
        name = type(sizes).__name__
        raise UserError(
            f"--max-new-tokens {max_new_tokens} after a prompt of {len(prompt)} tokens is more "
            f"than {name}.context_length={sizes.context_length}; use at most {max(room, 0)}"
        )
    # Cached decoding always runs the reference kernel: one query a step is no work for the others.
    execution = dataclasses.replace(program.execution, kernel="reference", remat=POLICIES["none"])
    program = dataclasses.replace(program, execution=execution)
    S = len(prompt) + max_new_tokens
    key = jax.random.key(seed)
    run = jax.jit(_run, static_argnums=(0, 1, 4, 5, 6))
    with program.layout.active():
        tokens_BT = np.asarray([prompt], np.int32)
        drawn = run(program, sizes, state, tokens_BT, S, sampling, max_new_tokens, key)
        return np.asarray(drawn)[:, 0].tolist()


def _run(
    program: Program,
    sizes: TokenModel,
    state: TrainState,
    tokens_BT: jax.Array,
    S: int,
    sampling: Sampling,
    count: int,
    key: jax.Array,
) -> jax.Array:
    model, dtype = program.model(state), jnp.dtype(program.precision.compute)
    cache = empty_cache(sizes.cached, layers=sizes.layers, rows=1, room=S, dtype=dtype)
    logits_BV, cache = next_logits(model, tokens_BT, cache, program.execution)

    def draw(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        logits_BV, cache = carry
        token_B = sample(logits_BV, key, sampling)
        return next_logits(model, token_B[:, None], cache, program.execution), token_B

    return jax.lax.scan(draw, (logits_BV, cache), jax.random.split(key, count))[1]


def next_logits(
    model: Transformer, tokens_BT: jax.Array, cache: Cache, execution: Execution
) -> tuple[jax.Array, Cache]:
    """Logits [B, V] after the last of these tokens, and the cache with them in it."""
    B, T = tokens_BT.shape
    positions_BT = jnp.broadcast_to(cache.length + jnp.arange(T, dtype=jnp.int32), (B, T))
    mask = Mask(query_start=cache.length)
    h_BTD, longer, _ = hidden(model, tokens_BT, positions_BT, mask, execution, cache)
    assert longer is not None, "a cache went in"
    logits_BV = logits(model, h_BTD[:, -1:])[:, 0]
    return shard(logits_BV, ("batch", "classes")).astype(jnp.float32), longer
