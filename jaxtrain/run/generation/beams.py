"""Beam search.

The devices run the model and rank continuations; the host selects the beams.
Letters: P prompts, W beams, B = P W rows, K candidates of a prompt, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import TokenModel
from jaxtrain.nn.kv_cache import Cache
from jaxtrain.run.generation.answer import Answer, length_before_end
from jaxtrain.run.generation.decoding import (
    LEAST_LENGTH,
    Drawing,
    adjust_logits,
    clip_float32,
    next_logits,
    pad_prompts,
    prefill,
    round_up,
    validate_penalty,
)
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

NEVER = -1e9  # the score of unused beams


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Settings of beam search.

    A continuation of n tokens has the score (sum of their log-probabilities) / n^length_penalty,
    including its end token. It is finished if its end token is among the `beams` best
    continuations of a step, or at the maximum length. As in transformers.

    Attributes:
      beams: number of beams.
      length_penalty: above 0 favors longer answers, below 0 shorter ones.
      early_stopping: when a prompt's search ends. True: as soon as `beams` are finished. False:
        when the best unfinished one is no better than the worst of these at its present length;
        "never": nor at its maximum length.
      repetition_penalty: as in `Sampling`, on log-probabilities.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise UserError(f"--beams {self.beams}: use at least 1")
        validate_penalty(self.repetition_penalty)

    def drawing(self) -> Drawing:
        """Return the arrays that adjust log-probabilities."""
        penalty = clip_float32(self.repetition_penalty)
        return {} if penalty is None else {"repetition_penalty": penalty}


class Candidate(NamedTuple):
    """One token after one beam: the sum of log-probabilities with it, the beam, the token, and
    the model's own log-probability of it."""

    total: np.float32
    beam: int
    token: int
    log_p: float


class Hypothesis(NamedTuple):
    """A continuation: its score (its sum while unfinished), tokens and their log-probabilities."""

    score: np.float32
    tokens: list[int]
    log_probabilities: list[float]


class Search:
    """The continuations of one prompt.

    Args:
      settings: of the search.
      limit: the maximum length.
      ends: tokens that end a continuation.
    """

    def __init__(self, settings: BeamSearch, limit: int, ends: Sequence[int]) -> None:
        self._settings, self._limit, self._ends = settings, limit, set(ends)
        none = [Hypothesis(np.float32(NEVER), [], []) for _ in range(settings.beams - 1)]
        # Only one beam at first: all are the prompt itself.
        self.running = [Hypothesis(np.float32(0), [], []), *none]
        self.finished: list[Hypothesis] = []
        self._may_improve = True

    @property
    def done(self) -> bool:
        """Whether the best continuation is settled."""
        full = len(self.finished) == self._settings.beams
        at_limit = len(self.running[0].tokens) == self._limit
        return at_limit or not self._may_improve or (full and self._settings.early_stopping is True)

    def take(self, candidates: Sequence[Candidate]) -> list[int]:
        """Extend the beams by the best of these sorted candidates; return their parent beams.

        There must be enough candidates that at least `beams` of them do not end.
        """
        settings = self._settings
        going, ending = [], []
        length = len(self.running[0].tokens) + 1
        for rank, one in enumerate(candidates):
            before = self.running[one.beam]
            after = Hypothesis(
                one.total, [*before.tokens, one.token], [*before.log_probabilities, one.log_p]
            )
            if one.token in self._ends or length == self._limit:
                if rank < settings.beams:
                    score = np.float32(one.total / np.float32(length**settings.length_penalty))
                    ending.append(after._replace(score=score))
                if length < self._limit:
                    continue
            going.append((after, one.beam))
        best = sorted([*self.finished, *ending], key=lambda one: -one.score)
        self.finished = best[: settings.beams]
        self.running = [after for after, _ in going[: settings.beams]]
        self._may_improve = self._can_improve(length)
        return [beam for _, beam in going[: settings.beams]]

    def _can_improve(self, length: int) -> bool:
        if len(self.finished) < self._settings.beams:
            return True
        penalty = self._settings.length_penalty
        if self._settings.early_stopping == "never" and penalty > 0:
            length = self._limit
        best = self.running[0].score / np.float32(length**penalty)
        return bool(best > self.finished[-1].score)

    def answer(self) -> Answer:
        """Return the best continuation that is finished."""
        score, tokens, log_probabilities = self.finished[0]
        length = length_before_end(tokens, list(self._ends))
        return Answer(
            tokens=tokens[:length],
            log_probabilities=log_probabilities[:length],
            ended="length" if length == len(tokens) else "end",
            score=float(score),
        )


def search(
    setup: Setup,
    sizes: TokenModel,
    state: TrainState,
    prompts: list[list[int]],
    limits: list[int],
    *,
    settings: BeamSearch,
    ends: Sequence[int],
) -> list[Answer]:
    """Return the answers to one batch of prompts.

    Args:
      setup: from `for_texts`, whose layout is active.
      sizes: the model's settings.
      state: the trained state.
      prompts: tokens.
      limits: maximum number of new tokens of each.
      settings: of the search.
      ends: tokens that end an answer.
    """
    tokens_PT, padding_P = pad_prompts(setup, sizes, prompts)
    room = tokens_PT.shape[1] + round_up(max(limits), least=LEAST_LENGTH, most=sizes.context_length)
    logits_PV, cache = prefill(setup, sizes, state, tokens_PT, padding_P, room=room)
    return grow(
        setup, state, logits_PV, cache, padding_P, prompts, limits,
        settings=settings, ends=ends, room=room, following=next_logits, rows_of=rows_of,
    )  # fmt: skip


def grow(
    setup: Setup,
    state: TrainState,
    logits_PV: jax.Array,
    cache: Any,
    padding_P: np.ndarray,
    seen: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    settings: BeamSearch,
    ends: Sequence[int],
    room: int,
    following: Callable[..., Any],
    rows_of: Callable[..., Any],
) -> list[Answer]:
    """Return the answers to texts whose first tokens are known to a cache.

    Args:
      program, state, settings, ends: as in `search`.
      logits_PV: of each text's next token.
      cache: of the texts, one row each.
      padding_P: padding before a row's text.
      seen: tokens of each text, for a repetition penalty.
      limits: maximum number of new tokens of each.
      room: slots of the cache.
      following: computes the next logits, like `next_logits`.
      rows_of: (cache, rows_B, generating) -> the cache of these rows, any of them as often as it is
        named; once the search has started, each of them replaces a row of its own text.
    """
    (rows, V), W = logits_PV.shape, settings.beams
    every_B = np.repeat(np.arange(rows, dtype=np.int32), W)
    logits_BV, cache = _select_rows(logits_PV, cache, every_B, rows_of=rows_of)
    padding_B, drawing, seen_BV = padding_P[every_B], settings.drawing(), None
    if drawing:
        seen_BV = np.zeros((rows * W, V), bool)
        for row, tokens in enumerate(seen):
            seen_BV[row * W : (row + 1) * W, tokens] = True
    searches = [Search(settings, limit, ends) for limit in limits]
    # Enough that W of them continue even if every end token is among the best of every beam.
    K = min(max(2, 1 + len(ends)) * W, W * V)
    while True:
        totals_PW = np.zeros((rows, W), np.float32)
        for row, one in enumerate(searches):
            totals_PW[row] = [beam.score for beam in one.running]
        ranked = _rank(logits_BV, totals_PW, seen_BV, drawing, count=K)
        totals_PK, choices_PK, log_p_PK = (np.asarray(part) for part in ranked)
        parents_B, drawn_B = every_B * W, np.zeros(rows * W, np.int32)
        for row, one in enumerate(searches):
            if one.done:
                continue
            candidates = [
                Candidate(total, int(choice) // V, int(choice) % V, float(log_p))
                for total, choice, log_p in zip(
                    totals_PK[row], choices_PK[row], log_p_PK[row], strict=True
                )
            ]
            beams = one.take(candidates)
            own = slice(row * W, row * W + len(beams))
            parents_B[own] = row * W + np.array(beams, np.int32)
            drawn_B[own] = [beam.tokens[-1] for beam in one.running]
        if all(one.done for one in searches):
            return [one.answer() for one in searches]
        logits_BV, cache, seen_BV = _grown(
            setup, state, cache, padding_B, seen_BV, parents_B, drawn_B,
            room=room, following=following, rows_of=rows_of,
        )  # fmt: skip


@functools.partial(jax.jit, static_argnames="count")
def _rank(
    logits_BV: jax.Array,
    totals_PW: jax.Array,
    seen_BV: jax.Array | None,
    drawing: Drawing,
    *,
    count: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the best continuations of each prompt: their sums, their indices in [W V], and the
    model's log-probabilities of their last tokens; [P, K] each."""
    rows, W = totals_PW.shape
    log_p_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    all_BV = adjust_logits(log_p_BV, seen_BV, drawing) + totals_PW.reshape(-1, 1)
    totals_PK, choices_PK = jax.lax.top_k(all_BV.reshape(rows, -1), count)
    log_p_PK = jnp.take_along_axis(log_p_BV.reshape(rows, -1), choices_PK, axis=-1)
    return totals_PK, choices_PK, log_p_PK


@functools.partial(
    jax.jit,
    static_argnames=("setup", "room", "following", "rows_of"),
    donate_argnames="cache",
)
def _grown(
    setup: Setup,
    state: TrainState,
    cache: Any,
    padding_B: jax.Array,
    seen_BV: jax.Array | None,
    parents_B: jax.Array,
    drawn_B: jax.Array,
    *,
    room: int,
    following: Callable[..., Any],
    rows_of: Callable[..., Any],
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Logits, cache and tokens seen after each row became its parent with one token more."""
    if seen_BV is not None:
        seen_BV = seen_BV[parents_B] | (drawn_B[:, None] == jnp.arange(seen_BV.shape[1]))
    logits_B1V, cache = following(
        setup.model(state), drawn_B[:, None], rows_of(cache, parents_B, generating=True), padding_B,
        setup.execution, room=room, last=1,
    )  # fmt: skip
    return logits_B1V[:, 0], cache, seen_BV


@functools.partial(jax.jit, static_argnames="rows_of")
def _select_rows(
    logits_PV: jax.Array, cache: Any, every_B: jax.Array, *, rows_of: Callable[..., Any]
) -> tuple[jax.Array, Any]:
    """Some rows of both, any of them as often as it is named."""
    return logits_PV[every_B], rows_of(cache, every_B, generating=False)


def rows_of(cache: Cache, rows_B: jax.Array, *, generating: bool) -> Cache:
    """Return the cache of these rows, laid out as before."""
    del generating
    return Cache(tuple(take_rows(x, rows_B) for x in cache.layers), cache.length)


def take_rows(x: jax.Array, rows_B: jax.Array) -> jax.Array:
    """These rows of an array [L, B, ...], laid out as before."""
    sharding = jax.typeof(x).sharding
    out = P() if sharding.mesh.empty else sharding.spec
    return x.at[:, rows_B].get(out_sharding=out)
