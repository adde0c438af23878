"""Tasks from JSON lines: questions, choices, accuracy.

The arithmetic is lm-eval's (EleutherAI, version 0.4), so that numbers can stand beside published
ones.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.buckets import place
from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.run.inference.inputs import Record, read_records
from jaxtrain.run.tasks.scoring import Pair, Score, encode_pair
from jaxtrain.training.objectives.losses import perplexity


@dataclasses.dataclass(frozen=True)
class Question:
    """One line of a task: a context, and one continuation or several.

    Attributes:
      where: the file and the line, for messages.
      context: what stands before.
      choices: continuations, of which the model's is the most probable; of an exact match the one.
      answer: which of them is right.
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
      is_choice: whether a question has choices; False: a target that must match exactly.
    """

    name: str
    questions: list[Question]
    is_choice: bool


def read_task(path: str) -> Task:
    """The task of a file of JSON lines.

    Each line has a `prompt`, and either `choices` and `answer` (the number of the right one, from
    0, or its text) or a `target`; all lines are of one kind.

    Raises:
      UserError: the file cannot be read, or a line is neither.
    """
    records = read_records("--tasks", path)
    is_choice = "choices" in records[0].fields
    questions = [_choice(one) if is_choice else _exact(one) for one in records]
    return Task(place(path).name.split(".")[0], questions, is_choice)


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
    """Every continuation of a task after its context, question by question.

    Args:
      task: the task.
      tokenizer: of the model.
      delimiter: stands between a context and its continuation.
      length: the model's context length.

    Raises:
      UserError: one cannot be scored; names its line.
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
    """What is said of a task: its metrics, means over its questions, and their standard errors.

    Of choices `acc`, the one with the greatest log-likelihood; `acc_norm`, divided by its
    characters before; `acc_bytes`, by its bytes of UTF-8. Of targets `exact_match`, each token of
    the target the likeliest at its place, and `perplexity`, exp of the mean negative
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
    """1 for each question whose right choice has the greatest log-likelihood by its size."""
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
    """Of a mean: the sample's standard deviation over sqrt(n); None of a single value."""
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
