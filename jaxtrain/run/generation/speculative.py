"""Speculative decoding: verify several draft tokens in one forward pass.

A guess is accepted with the probability that preserves the model's own distribution, and the
first rejected one is replaced by a sample from the residual distribution; greedy answers are
unchanged. Source: Leviathan et al. 2022 (arXiv 2211.17192), algorithm 1; prompt lookup is Saxena
2023. Letters: B rows, of which the first is the text, K guesses, V vocab.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import Model, TokenModel
from jaxtrain.nn.kv_cache import Cache
from jaxtrain.run.generation.answer import Answer, length_before_end
from jaxtrain.run.generation.decoding import (
    LEAST_LENGTH,
    Drawing,
    Sampling,
    adjust_logits,
    counts_slots,
    for_texts,
    next_logits,
    pad_prompts,
    prefill,
    require_text_model,
    round_up,
)
from jaxtrain.run.generation.generate import limit_of, validate_prompt, validate_seed
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """An answer with statistics of speculative decoding.

    Attributes:
      answer: the answer.
      passes: forward passes of the model, without the prompt's.
      guessed: number of draft tokens.
      accepted: number of accepted draft tokens.
    """

    answer: Answer
    passes: int
    guessed: int
    accepted: int


class DraftSource(Protocol):
    """A source of draft tokens.

    Attributes:
      count: maximum number of draft tokens, K.
    """

    count: int

    def begin(self, prompt: list[int], *, new: int, drawing: Drawing) -> None:
        """A text of this prompt, with room for `new` tokens, drawn so."""
        ...

    def propose(self, text: list[int], key: jax.Array) -> tuple[np.ndarray | jax.Array, jax.Array]:
        """Return draft tokens int32 [K] after a text, and their distributions: [K, V], rows of
        zeros without a guess.

        Args:
          text: prompt and answer so far: that of the last call with accepted guesses,
            and one more token.
          key: the random key.
        """
        ...


class PromptLookup:
    """Prompt lookup: guesses the continuation of an earlier occurrence of the last tokens.

    Args:
      vocab_size: of the model.
      count: number of draft tokens.
      match: maximum number of matched tokens; fewer if a longer match is not found.
    """

    def __init__(self, vocab_size: int, count: int, *, match: int = 3) -> None:
        self.count, self._vocab_size, self._match = count, vocab_size, match

    def begin(self, prompt: list[int], *, new: int, drawing: Drawing) -> None:
        """No state is needed."""

    def propose(self, text: list[int], key: jax.Array) -> tuple[np.ndarray | jax.Array, jax.Array]:
        """Return the tokens after the latest earlier match of the text's longest suffix."""
        del key
        tokens = np.asarray(text, np.int32)
        guesses_K, given = np.zeros(self.count, np.int32), 0
        for size in range(min(self._match, len(tokens) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            indices = np.flatnonzero((windows == tokens[-size:]).all(-1))
            if indices.size:
                follows = tokens[indices[-1] + size :][: self.count]
                given = len(follows)
                guesses_K[:given] = follows
                break
        sure_KV = jax.nn.one_hot(guesses_K, self._vocab_size)
        return guesses_K, sure_KV * (np.arange(self.count) < given)[:, None]


class DraftModel:
    """Draft model: a smaller model of the same vocabulary with its own cache.

    Args:
      program: the draft's program.
      model: its model's settings.
      state: its trained state.
      count: number of draft tokens.
    """

    def __init__(self, setup: Setup, model: Model, state: TrainState, count: int) -> None:
        self.count, self._sizes = count, rolls_back(model)
        self._program, self._state = for_texts(setup), state

    @property
    def vocab_size(self) -> int:
        """Its vocabulary size."""
        return self._sizes.vocab_size

    def begin(self, prompt: list[int], *, new: int, drawing: Drawing) -> None:
        """Run the prompt through the draft model."""
        self._drawing = drawing
        with self._program.layout.active(), self._program.precision.products():
            _, self._text = _read(self._program, self._sizes, self._state, prompt, new)

    def propose(self, text: list[int], key: jax.Array) -> tuple[np.ndarray | jax.Array, jax.Array]:
        """Sample from the draft as from the model itself."""
        seen_V = _seen_tokens(text, self.vocab_size, self._drawing)
        with self._program.layout.active(), self._program.precision.products():
            guesses_K, from_KV, cache = _draft(
                self._program, self._state, self._text.before_newest(text), self._text.padding_B,
                np.int32(text[-1]), seen_V, self._drawing, jax.random.split(key, self.count + 1),
                room=self._text.room,
            )  # fmt: skip
        self._text = dataclasses.replace(self._text, cache=cache)
        return np.asarray(guesses_K), from_KV


@dataclasses.dataclass(frozen=True)
class _Text:
    """A model's cache of one text.

    Attributes:
      cache: of its first row.
      padding_B: padding before it.
      room: slots of the cache.
    """

    cache: Cache
    padding_B: np.ndarray
    room: int

    def before_newest(self, text: list[int]) -> Cache:
        """Return the cache of all tokens but the newest: guesses that were not kept are counted
        out."""
        first_real = np.int32(self.padding_B[0] + len(text) - 1)
        return dataclasses.replace(self.cache, length=jnp.asarray(first_real))


def speculate(
    setup: Setup,
    model: Model,
    state: TrainState,
    prompt: Sequence[int] | np.ndarray,
    draft: DraftSource,
    *,
    max_new_tokens: int | None,
    sampling: Sampling,
    seed: int,
    ends: Sequence[int] = (),
) -> Speculation:
    """Complete a prompt with draft tokens that the model verifies.

    The cache is indexed by position, so a rejected guess is dropped by decreasing the length:
    nothing is recomputed.

    Args:
      setup: the state's program.
      model: its model's settings.
      state: the trained state.
      prompt: a nonempty token list.
      draft: a source of draft tokens with the same vocabulary.
      max_new_tokens: maximum number of new tokens; None: up to 100 that fit.
      sampling: the sampling settings.
      seed: of sampling.
      ends: tokens that end an answer.

    Raises:
      UserError: as in `generate`; or the model has a state that cannot be rolled back.
    """
    sizes, setup = rolls_back(model), for_texts(setup)
    text = validate_prompt(prompt, sizes)
    limit = limit_of(len(text), max_new_tokens, sizes)
    validate_seed(seed)
    K, V, key, drawing = draft.count, sizes.vocab_size, jax.random.key(seed), sampling.drawing()
    new = limit + K + 1  # the last pass may accept more than the limit
    draft.begin(text, new=new, drawing=drawing)
    drawn: list[int] = []
    log_probabilities: list[float] = []
    passes = guessed = 0
    with setup.layout.active(), setup.precision.products():
        logits_BV, kept = _read(setup, sizes, state, text, new)
        # The first token follows from the prompt alone.
        logits_TV = jnp.broadcast_to(logits_BV[0], (K + 1, V))
        guesses_K, from_KV = np.zeros(K, np.int32), jnp.zeros((K, V))
        while True:
            key, of_guess, of_draw = jax.random.split(key, 3)
            seen_V = _seen_tokens(text, V, drawing)
            found = _accept(logits_TV, guesses_K, from_KV, seen_V, drawing, of_draw)
            count, tokens_T, log_p_T = (np.asarray(part) for part in found)
            drawn += tokens_T[: count + 1].tolist()
            log_probabilities += log_p_T[: count + 1].tolist()
            text += tokens_T[: count + 1].tolist()
            length = length_before_end(drawn[:limit], ends)
            if length < len(drawn) or len(drawn) == limit:
                break
            guesses_K, from_KV = draft.propose(text, of_guess)
            guessed += int((np.asarray(from_KV).sum(-1) > 0).sum())
            passes += 1
            tokens_T = np.concatenate([text[-1:], guesses_K]).astype(np.int32)
            logits_TV, cache = _logits_after(
                setup, state, kept.before_newest(text), kept.padding_B, tokens_T, room=kept.room
            )
            kept = dataclasses.replace(kept, cache=cache)
    answer = Answer(
        tokens=drawn[:length],
        log_probabilities=log_probabilities[:length],
        ended="length" if length == limit else "end",
    )
    accepted = len(drawn) - 1 - passes
    return Speculation(answer=answer, passes=passes, guessed=guessed, accepted=accepted)


def rolls_back(model: Model) -> TokenModel:
    """Return the same model if its cache can be rolled back; UserError for others."""
    sizes = require_text_model(model)
    if not all(one.every_token for one in sizes.cached):
        raise UserError(
            f"--draft: Train.model=@{type(model).__name__}() keeps one state of all tokens "
            "so far, which cannot be rolled back; use a model with attention, or no draft"
        )
    if counts_slots(sizes):
        raise UserError(
            f"--draft: the experts of Train.model=@{type(model).__name__}() have a capacity, and "
            "guesses would take the slots of other tokens; use capacity_factor=None, or no draft"
        )
    return sizes


def _seen_tokens(text: list[int], vocab_size: int, drawing: Drawing) -> np.ndarray | None:
    """Return which tokens occur in a text, if a setting needs it."""
    if "repetition_penalty" not in drawing:
        return None
    seen_V = np.zeros(vocab_size, bool)
    seen_V[text] = True
    return seen_V


def _read(
    setup: Setup, sizes: TokenModel, state: TrainState, prompt: list[int], new: int
) -> tuple[jax.Array, _Text]:
    """Logits [B, V] after a prompt, and what is kept of it, with room for `new` tokens."""
    tokens_BT, padding_B = pad_prompts(setup, sizes, [prompt])
    room = tokens_BT.shape[1] + round_up(new, least=LEAST_LENGTH)
    logits_BV, cache = prefill(setup, sizes, state, tokens_BT, padding_B, room=room)
    return logits_BV, _Text(cache, padding_B, room)


@functools.partial(jax.jit, static_argnames=("setup", "room"), donate_argnames="cache")
def _logits_after(
    setup: Setup,
    state: TrainState,
    cache: Cache,
    padding_B: jax.Array,
    tokens_T: jax.Array,
    *,
    room: int,
) -> tuple[jax.Array, Cache]:
    """Logits [T, V] after each of these tokens, and the cache with them in it."""
    tokens_BT = jnp.broadcast_to(tokens_T, (padding_B.shape[0], tokens_T.shape[0]))
    logits_BTV, cache = next_logits(
        setup.model(state), tokens_BT, cache, padding_B, setup.execution,
        room=room, last=tokens_T.shape[0],
    )  # fmt: skip
    return logits_BTV[0], cache


@functools.partial(jax.jit, static_argnames=("setup", "room"), donate_argnames="cache")
def _draft(
    setup: Setup,
    state: TrainState,
    cache: Cache,
    padding_B: jax.Array,
    newest: jax.Array,
    seen_V: jax.Array | None,
    drawing: Drawing,
    keys: jax.Array,
    *,
    room: int,
) -> tuple[jax.Array, jax.Array, Cache]:
    """Guesses [K], what they were drawn from [K, V], and the cache with all of them in it."""
    model = setup.model(state)

    def step(carry, key):  # noqa: ANN001, ANN202 - as of jax.lax.scan
        cache, token, seen_V = carry
        tokens_B1 = jnp.broadcast_to(token, (padding_B.shape[0], 1))
        logits_B1V, cache = next_logits(
            model, tokens_B1, cache, padding_B, setup.execution, room=room, last=1
        )
        from_V = distribution(adjust_logits(logits_B1V[0, 0], seen_V, drawing), drawing)
        token = jax.random.categorical(key, jnp.log(from_V)).astype(jnp.int32)
        if seen_V is not None:
            seen_V |= token == jnp.arange(seen_V.shape[0])
        return (cache, token, seen_V), (token, from_V)

    # One more than guesses: the last guess has to be in the cache, too.
    (cache, _, _), (guesses, from_V) = jax.lax.scan(step, (cache, newest, seen_V), keys)
    return guesses[:-1], from_V[:-1], cache


def distribution(adjusted_TV: jax.Array, drawing: Drawing) -> jax.Array:
    """Return the sampling probabilities: one-hot for greedy decoding."""
    if "temperature" not in drawing:
        return jax.nn.one_hot(adjusted_TV.argmax(-1), adjusted_TV.shape[-1])
    return jax.nn.softmax(adjusted_TV, axis=-1)


@jax.jit
def _accept(
    logits_TV: jax.Array,
    guesses_K: jax.Array,
    from_KV: jax.Array,
    seen_V: jax.Array | None,
    drawing: Drawing,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the number of accepted guesses; they and one more token [T]; the model's
    log-probabilities [T]."""
    K, V = from_KV.shape
    seen_TV = None
    if seen_V is not None:
        own_KV = jnp.cumsum(jax.nn.one_hot(guesses_K, V), axis=0) > 0
        seen_TV = seen_V | jnp.concatenate([jnp.zeros((1, V), bool), own_KV])
    model_TV = distribution(adjust_logits(logits_TV, seen_TV, drawing), drawing)
    of_keeping, of_last = jax.random.split(key)
    guess_K1 = guesses_K[:, None]
    model_K = jnp.take_along_axis(model_TV[:K], guess_K1, axis=-1)[:, 0]
    from_K = jnp.take_along_axis(from_KV, guess_K1, axis=-1)[:, 0]
    # Accepted with probability min(1, p / q); without a guess q is 0 and nothing is accepted.
    keep_K = (jax.random.uniform(of_keeping, (K,)) * from_K < model_K) & (from_K > 0)
    count = jnp.cumprod(keep_K.astype(jnp.int32)).sum()
    whole_V = model_TV[count]
    left_V = jnp.maximum(whole_V - jnp.concatenate([from_KV, jnp.zeros((1, V))])[count], 0)
    # Rounding may leave no probability.
    left_V = jnp.where(left_V.sum() > 0, left_V, whole_V)
    last = jax.random.categorical(of_last, jnp.log(left_V)).astype(jnp.int32)
    guesses_T = jnp.concatenate([guesses_K, jnp.zeros(1, jnp.int32)])
    tokens_T = jnp.where(jnp.arange(K + 1) < count, guesses_T, last)
    log_p_TV = jax.nn.log_softmax(logits_TV, axis=-1)
    return count, tokens_T, jnp.take_along_axis(log_p_TV, tokens_T[:, None], axis=-1)[:, 0]
