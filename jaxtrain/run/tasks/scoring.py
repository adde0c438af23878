"""Log-likelihood of continuations, computed on the mesh.

Letters: B rows, T length, C places of continuations, V vocab.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.models.model import Model, TokenModel
from jaxtrain.nn.cache import empty_cache
from jaxtrain.run.generation.decoding import (
    batches,
    for_texts,
    next_logits,
    pad_prompts,
    round_up,
    writes,
)
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A continuation after a context, in tokens.

    Attributes:
      tokens: both, without the last token.
      continuation: its tokens; the model predicts them at the last positions of `tokens`.
      truncated: whether tokens at the context's beginning are left out.
    """

    tokens: list[int]
    continuation: list[int]
    truncated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """What a model says of a continuation.

    Attributes:
      log_likelihood: the sum of its tokens' log-probabilities, natural.
      greedy: whether each of them is the likeliest at its place.
    """

    log_likelihood: float
    greedy: bool


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, *, length: int) -> Pair:
    """The tokens of a continuation after a context, as lm-eval takes them.

    White space at the context's end goes to the continuation; both are tokenized together, and what
    is beyond the context's own tokens is the continuation's. An empty context is the end-of-text
    token. What does not fit into the model's context is left out at the beginning.

    Args:
      tokenizer: of the model.
      context, continuation: text; the continuation is not empty.
      length: the model's context length.

    Raises:
      UserError: the context is empty and the tokenizer has no end-of-text token, or the
        continuation has no token or more than the model's context.
    """
    if context == "":
        if tokenizer.end_of_text is None:
            raise UserError("the context is empty, and the tokenizer has no end-of-text token")
        before, after = [tokenizer.end_of_text], tokenizer.encode(continuation)
        if after[:1] == before:
            after = after[1:]
    else:
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context)
        after = whole[len(before) :]
        before = whole[: len(before)]
    if not after:
        raise UserError(f"the continuation {continuation!r} has no token of its own")
    if len(after) > length:
        raise UserError(
            f"the continuation has {len(after)} tokens, more than the model's context of {length}"
        )
    tokens = [*before, *after][:-1]
    return Pair(tokens=tokens[-length:], continuation=after, truncated=len(tokens) > length)


def scores(
    setup: Setup, model: Model, state: TrainState, pairs: Sequence[Pair], *, batch_size: int
) -> list[Score]:
    """What a trained language model says of each pair.

    Args:
      setup: the program whose state it is.
      model: its model's settings.
      state: the trained state.
      pairs: contexts and continuations.
      batch_size: pairs that are scored at once.

    Raises:
      UserError: the model is no language model.
    """
    sizes, setup = writes(model), for_texts(setup)
    found: dict[int, Score] = {}
    with setup.layout.active(), setup.precision.products():
        for numbers in batches([len(pair.tokens) for pair in pairs], sizes, batch_size):
            batch = [pairs[number] for number in numbers]
            told = _batch_scores(setup, sizes, state, batch)
            found.update(zip(numbers, told, strict=True))
    return [found[number] for number in range(len(pairs))]


def _batch_scores(
    setup: Setup, sizes: TokenModel, state: TrainState, pairs: Sequence[Pair]
) -> list[Score]:
    tokens_BT, padding_B = pad_prompts(setup, sizes, [pair.tokens for pair in pairs])
    rows, length = tokens_BT.shape
    places = round_up(max(len(pair.continuation) for pair in pairs), most=length)
    targets_BC, wanted_BC = np.zeros((rows, places), np.int32), np.zeros((rows, places), bool)
    for row, pair in enumerate(pairs):
        targets_BC[row, -len(pair.continuation) :] = pair.continuation
        wanted_BC[row, -len(pair.continuation) :] = True
    found = _log_probabilities(setup, sizes, state, tokens_BT, padding_B, targets_BC, wanted_BC)
    told_B, greedy_B = (np.asarray(part) for part in found)
    return [
        Score(log_likelihood=float(told_B[row]), greedy=bool(greedy_B[row]))
        for row in range(len(pairs))
    ]


@functools.partial(jax.jit, static_argnames=("setup", "sizes"))
def _log_probabilities(
    setup: Setup,
    sizes: TokenModel,
    state: TrainState,
    tokens_BT: jax.Array,
    padding_B: jax.Array,
    targets_BC: jax.Array,
    wanted_BC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sums of the log-probabilities of what is wanted, and whether all of it is the likeliest."""
    (rows, room), places = tokens_BT.shape, targets_BC.shape[1]
    dtype = jnp.dtype(setup.precision.compute)
    cache = empty_cache(sizes.cached, layers=sizes.layers, rows=rows, room=room, dtype=dtype)
    logits_BCV, _ = next_logits(
        setup.model(state), tokens_BT, cache, padding_B, setup.execution,
        room=room, last=places,
    )  # fmt: skip
    told_BCV = jax.nn.log_softmax(logits_BCV, axis=-1)
    told_BC = jnp.take_along_axis(told_BCV, targets_BC[..., None], axis=-1)[..., 0]
    right_BC = (logits_BCV.argmax(-1) == targets_BC) | ~wanted_BC
    return jnp.where(wanted_BC, told_BC, 0).sum(-1), right_BC.all(-1)
