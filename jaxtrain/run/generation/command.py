"""The command `generate`: a prompt, or a file of prompts to JSON lines."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import reads_tokens
from jaxtrain.run.commands.train import open_run
from jaxtrain.run.generation.answer import Answer
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.chat import converse
from jaxtrain.run.generation.drafting import generate_with_draft, validate_guesses
from jaxtrain.run.generation.published_defaults import Defaults, published_defaults
from jaxtrain.run.generation.sampling import Sampling
from jaxtrain.run.generation.write import printable, show
from jaxtrain.run.inference.json_records import read_records
from jaxtrain.run.status import DONE

_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_EARLY_STOPPING: dict[str | None, bool | Literal["never"]] = {
    None: False,
    "false": False,
    "true": True,
    "never": "never",
}


def generate(arguments: argparse.Namespace) -> int:
    """Prints what a trained language model writes, to a terminal as it is drawn."""
    _sampling(arguments, Defaults())  # wrong options are reported before a run is opened
    validate_guesses(arguments)
    if arguments.chat:
        return converse(arguments, _sampling)
    if arguments.system is not None:
        raise UserError("--system is of a conversation; add --chat, or leave it out")
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
    sampling = _sampling(arguments, published_defaults(trainer.config, trainer.workdir))
    in_lines = arguments.prompts is not None or arguments.log_probabilities
    plain = isinstance(sampling, Sampling) and arguments.draft is None
    goes_on = reads_tokens(trainer.config.train.model)
    streams = sys.stdout.isatty() and not in_lines and plain
    if streams and goes_on:
        show(arguments.prompt)
    if arguments.draft is not None:
        answers = generate_with_draft(arguments, trainer, prompts, sampling)
    else:
        answers = trainer.answers(
            prompts,
            max_new_tokens=arguments.max_new_tokens,
            sampling=sampling,
            seed=arguments.seed,
            stop=arguments.stop,
            batch_size=arguments.batch_size,
            show=show if streams else None,
        )
    if streams:
        print()  # noqa: T201
    elif not in_lines:
        text = f"{arguments.prompt if goes_on else ''}{answers[0].text}"
        # A file or a pipe gets the text itself.
        print(printable(text) if sys.stdout.isatty() else text)  # noqa: T201
    else:
        given = [record.fields for record in records] or [{"prompt": arguments.prompt}]
        for fields, answer in zip(given, answers, strict=True):
            line = {**fields, **_line(answer, log_probabilities=arguments.log_probabilities)}
            print(json.dumps(line, ensure_ascii=False))  # noqa: T201
    return DONE


def _sampling(arguments: argparse.Namespace, defaults: Defaults) -> Sampling | BeamSearch:
    """How the next token is chosen: by options, and by a model's own defaults without them."""
    penalty, beams = arguments.repetition_penalty, arguments.beams
    if penalty is None:
        penalty = defaults.options.get("repetition_penalty")
    drawing = {name: getattr(arguments, name) for name in _DRAWING}
    given = {name: value for name, value in drawing.items() if value is not None}
    plain = not given and not arguments.chat and arguments.draft is None and not arguments.stop
    if beams is None and defaults.beams is not None and plain:
        return _beam_search(arguments, defaults.beams, penalty, defaults.options)
    for name in ("length_penalty", "early_stopping"):
        if beams is None and vars(arguments)[name] is not None:
            raise UserError(f"{_option(name)} is of a beam search; add --beams, or leave it out")
    if beams is None:
        own = {name: value for name, value in defaults.options.items() if name in _DRAWING}
        chosen: dict[str, Any] = {"temperature": 0.8, **own, **given}
        return Sampling(**chosen, repetition_penalty=penalty)
    for name, value in given.items():
        raise UserError(
            f"{_option(name)} {value} with --beams {beams}: a beam search draws nothing; leave one "
            "of them out"
        )
    return _beam_search(arguments, beams, penalty, {})


def _beam_search(
    arguments: argparse.Namespace, beams: int, penalty: float | None, options: Mapping[str, Any]
) -> BeamSearch:
    length_penalty, early_stopping = arguments.length_penalty, arguments.early_stopping
    if length_penalty is None:
        length_penalty = options.get("length_penalty")
    return BeamSearch(
        beams=beams,
        length_penalty=1.0 if length_penalty is None else length_penalty,
        early_stopping=_EARLY_STOPPING[early_stopping or options.get("early_stopping")],
        repetition_penalty=penalty,
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _line(answer: Answer, *, log_probabilities: bool) -> dict[str, object]:
    """What a line has besides the fields of its prompt's record."""
    line: dict[str, object] = {"answer": answer.text, "ended": answer.ended}
    if answer.score is not None:
        line["score"] = answer.score
    if log_probabilities:
        line |= {"tokens": answer.tokens, "log_probabilities": answer.log_probabilities}
    return line
