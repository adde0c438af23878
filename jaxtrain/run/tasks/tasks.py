"""Multiple-choice tasks from JSON lines, scored by log-likelihood on the mesh (`evaluate-tasks`).

Scores are computed as in lm-eval (EleutherAI, version 0.4), so that they can be compared with
published ones.
Letters: B rows, T length, C positions of continuations, V vocab.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.buckets import to_path
from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.models.model import Model, TokenModel
from jaxtrain.nn.kv_cache import empty_cache
from jaxtrain.run.generation.decoding import (
    batches,
    for_texts,
    next_logits,
    pad_prompts,
    require_text_model,
    round_up,
)
from jaxtrain.run.inference.inputs import Record, read_records
from jaxtrain.training.objectives.losses import perplexity
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A continuation after a context, in tokens.

    Attributes:
      tokens: both, without the last token.
      continuation: its tokens; the model predicts them at the last positions of `tokens`.
      truncated: whether the context is truncated at its beginning.
    """

    tokens: list[int]
    continuation: list[int]
    truncated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """A model's score of a continuation.

    Attributes:
      log_likelihood: the sum of its tokens' log-probabilities, natural.
      greedy: whether each of them is the likeliest at its position.
    """

    log_likelihood: float
    greedy: bool


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, *, length: int) -> Pair:
    """Return the tokens of a continuation after a context, as in lm-eval.

    White space at the context's end goes to the continuation; both are tokenized together, and
    tokens beyond the context's own are the continuation's. An empty context is the end-of-text
    token. Contexts are truncated at the beginning to fit into the model's context.

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
    """Return a language model's score of each pair.

    Args:
      setup: the state's program.
      model: its model's settings.
      state: the trained state.
      pairs: contexts and continuations.
      batch_size: pairs that are scored at once.

    Raises:
      UserError: the model is not a language model.
    """
    sizes, setup = require_text_model(model), for_texts(setup)
    found: dict[int, Score] = {}
    with setup.layout.active(), setup.precision.products():
        for numbers in batches([len(pair.tokens) for pair in pairs], sizes, batch_size):
            batch = [pairs[number] for number in numbers]
            batch_scores = _batch_scores(setup, sizes, state, batch)
            found.update(zip(numbers, batch_scores, strict=True))
    return [found[number] for number in range(len(pairs))]


def _batch_scores(
    setup: Setup, sizes: TokenModel, state: TrainState, pairs: Sequence[Pair]
) -> list[Score]:
    tokens_BT, padding_B = pad_prompts(setup, sizes, [pair.tokens for pair in pairs])
    rows, length = tokens_BT.shape
    num_targets = round_up(max(len(pair.continuation) for pair in pairs), most=length)
    targets_BC, wanted_BC = (
        np.zeros((rows, num_targets), np.int32),
        np.zeros((rows, num_targets), bool),
    )
    for row, pair in enumerate(pairs):
        targets_BC[row, -len(pair.continuation) :] = pair.continuation
        wanted_BC[row, -len(pair.continuation) :] = True
    found = _log_probabilities(setup, sizes, state, tokens_BT, padding_B, targets_BC, wanted_BC)
    log_p_B, greedy_B = (np.asarray(part) for part in found)
    return [
        Score(log_likelihood=float(log_p_B[row]), greedy=bool(greedy_B[row]))
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
    """Return sums of the log-probabilities of the continuations, and whether each is greedy."""
    (rows, room), num_targets = tokens_BT.shape, targets_BC.shape[1]
    dtype = jnp.dtype(setup.precision.compute)
    cache = empty_cache(sizes.cached, layers=sizes.layers, rows=rows, room=room, dtype=dtype)
    logits_BCV, _ = next_logits(
        setup.model(state), tokens_BT, cache, padding_B, setup.execution,
        room=room, last=num_targets,
    )  # fmt: skip
    log_p_BCV = jax.nn.log_softmax(logits_BCV, axis=-1)
    log_p_BC = jnp.take_along_axis(log_p_BCV, targets_BC[..., None], axis=-1)[..., 0]
    right_BC = (logits_BCV.argmax(-1) == targets_BC) | ~wanted_BC
    return jnp.where(wanted_BC, log_p_BC, 0).sum(-1), right_BC.all(-1)


@dataclasses.dataclass(frozen=True)
class Question:
    """One line of a task: a context, and one continuation or several.

    Attributes:
      where: the file and the line, for messages.
      context: the preceding text.
      choices: continuations, of which the model selects the most probable; for an exact match the
        only one.
      answer: the index of the correct one.
    """

    where: str
    context: str
    choices: list[str]
    answer: int


@dataclasses.dataclass(frozen=True)
class Task:
    """The questions of one file.

    Attributes:
      name: of the file, without its ending.
      questions: its lines.
      is_choice: whether questions have choices; False: a target that must match exactly.
    """

    name: str
    questions: list[Question]
    is_choice: bool


def read_task(path: str) -> Task:
    """Return the task of a file of JSON lines.

    Each line has a `prompt`, and either `choices` and `answer` (the index of the correct one, from
    0, or its text) or a `target`; all lines are of one kind.

    Raises:
      UserError: the file cannot be read, or a line is neither.
    """
    records = read_records("--tasks", path)
    is_choice = "choices" in records[0].fields
    questions = [_choice(one) if is_choice else _exact(one) for one in records]
    return Task(to_path(path).name.split(".")[0], questions, is_choice)


def _exact(record: Record) -> Question:
    target = record.text("target")
    if not target:
        raise UserError(f"{record.where}: 'target' is empty; give at least one character")
    return Question(record.where, record.text("prompt"), [target], 0)


def _choice(record: Record) -> Question:
    choices, answer = record.value("choices"), record.value("answer")
    texts = isinstance(choices, list) and all(isinstance(one, str) and one for one in choices)
    if not texts or len(choices) < 2:
        raise UserError(
            f"{record.where}: 'choices' is {choices!r}; use a list of at least two strings, none "
            "of them empty"
        )
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise UserError(
            f"{record.where}: 'answer' is {answer!r}; use 0 to {len(choices) - 1}, or the text of "
            "a choice"
        )
    return Question(record.where, record.text("prompt"), choices, answer)


def pairs(task: Task, tokenizer: Tokenizer, *, delimiter: str, length: int) -> list[Pair]:
    """Return every continuation of a task after its context, question by question.

    Args:
      task: the task.
      tokenizer: of the model.
      delimiter: text between a context and its continuation.
      length: the model's context length.

    Raises:
      UserError: one cannot be scored, with its line.
    """
    found = []
    for question in task.questions:
        for choice in question.choices:
            try:
                found.append(
                    encode_pair(tokenizer, question.context, delimiter + choice, length=length)
                )
            except UserError as error:
                raise UserError(f"{question.where}: {error}") from error
    return found


def results(task: Task, pairs: Sequence[Pair], scores: Sequence[Score]) -> dict[str, Any]:
    """Return a task's metrics, means over its questions, and their standard errors.

    For choices `acc`, by the largest log-likelihood; `acc_norm`, divided by its
    number of characters; `acc_bytes`, by its bytes of UTF-8. For targets `exact_match`, each token
    of the target the likeliest at its position, and `perplexity`, exp of the mean negative
    log-likelihood of a target.
    """
    means: dict[str, list[float]]
    if task.is_choice:
        means = {
            "acc": _right(task, scores, lambda choice: 1),
            "acc_norm": _right(task, scores, len),
            "acc_bytes": _right(task, scores, lambda choice: len(choice.encode())),
        }
    else:
        means = {"exact_match": [float(one.greedy) for one in scores]}
    line: dict[str, Any] = {"task": task.name, "questions": len(task.questions)}
    for name, values in means.items():
        line[name] = sum(values) / len(values)
        line[f"{name}_stderr"] = _standard_error(values)
    if not task.is_choice:
        line["perplexity"] = perplexity(-sum(one.log_likelihood for one in scores) / len(scores))
    return {**line, "truncated": sum(pair.truncated for pair in pairs)}


def _right(task: Task, scores: Sequence[Score], size: Callable[[str], int]) -> list[float]:
    """Return 1 for each question whose correct choice has the largest normalized log-likelihood,
    else 0."""
    found, first = [], 0
    for question in task.questions:
        own = scores[first : first + len(question.choices)]
        each = [
            one.log_likelihood / size(choice)
            for one, choice in zip(own, question.choices, strict=True)
        ]
        found.append(float(int(np.argmax(each)) == question.answer))
        first += len(question.choices)
    return found


def _standard_error(values: Sequence[float]) -> float | None:
    """Return a mean's standard error, the sample's deviation over sqrt(n); None for one value."""
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
