"""What `jaxtrain generate` does: one prompt's text, or a file of prompts and JSON lines back."""

import argparse
import json
import sys

from jaxtrain.config.errors import UserError
from jaxtrain.run.commands import open_run
from jaxtrain.run.generation.generate import Answer
from jaxtrain.run.generation.sampling import Sampling
from jaxtrain.run.generation.write import printable
from jaxtrain.run.json_records import read_records
from jaxtrain.run.status import DONE


def generate(arguments: argparse.Namespace) -> int:
    """Prints what a trained language model writes, to a terminal as it is drawn."""
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    records = []
    if arguments.prompts is not None:
        records = read_records("--prompts", arguments.prompts)
        prompts = [record.text("prompt") for record in records]
        for record, prompt in zip(records, prompts, strict=True):
            if not prompt:
                raise UserError(f"{record.where}: 'prompt' is empty; give at least one character")
    else:
        prompts = [arguments.prompt]
    trainer = open_run(arguments)
    in_lines = arguments.prompts is not None or arguments.log_probabilities
    streams = sys.stdout.isatty() and not in_lines
    if streams:
        _show(arguments.prompt)
    answers = trainer.answers(
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        sampling=sampling,
        seed=arguments.seed,
        stop=arguments.stop,
        batch_size=arguments.batch_size,
        show=_show if streams else None,
    )
    if streams:
        print()  # noqa: T201
    elif not in_lines:
        # A file or a pipe gets the text itself.
        print(f"{arguments.prompt}{answers[0].text}")  # noqa: T201
    else:
        given = [record.fields for record in records] or [{"prompt": arguments.prompt}]
        for fields, answer in zip(given, answers, strict=True):
            line = {**fields, **_line(answer, log_probabilities=arguments.log_probabilities)}
            print(json.dumps(line, ensure_ascii=False))  # noqa: T201
    return DONE


def _line(answer: Answer, *, log_probabilities: bool) -> dict[str, object]:
    """What a line has besides the fields of its prompt's record."""
    line: dict[str, object] = {"answer": answer.text, "ended": answer.ended}
    if log_probabilities:
        line |= {"tokens": answer.tokens, "log_probabilities": answer.log_probabilities}
    return line


def _show(piece: str) -> None:
    sys.stdout.write(printable(piece))
    sys.stdout.flush()
