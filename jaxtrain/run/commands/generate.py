"""The command `generate`: one prompt or a file of them, with or without a draft."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import reads_tokens, token_model
from jaxtrain.run.attempts import DONE
from jaxtrain.run.commands.read_run import open_run
from jaxtrain.run.generation.answer import (
    Answer,
    Stopping,
    encode_prompt,
    printable,
    show,
)
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.chat import Chat
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.published_defaults import Defaults, published_defaults
from jaxtrain.run.generation.speculative import (
    DraftModel,
    DraftSource,
    PromptLookup,
    rolls_back,
    speculate,
)
from jaxtrain.run.inference.inputs import read_records
from jaxtrain.run.trainer import Trainer

LOOKUP = "lookup"  # instead of a draft's folder
GUESSES = 4


def validate_draft_options(arguments: argparse.Namespace) -> None:
    """Raise UserError where an option is incompatible with speculative decoding."""
    if arguments.draft is None:
        if arguments.guesses is not None:
            raise UserError(
                f"--guesses {arguments.guesses}: there is no draft model; add --draft, or leave "
                "it out"
            )
        return
    if arguments.guesses is not None and arguments.guesses < 1:
        raise UserError(f"--guesses {arguments.guesses}: use at least 1")
    if arguments.beams is not None or arguments.stop:
        other = "--stop" if arguments.stop else f"--beams {arguments.beams}"
        raise UserError(
            f"--draft {arguments.draft} with {other}: speculative decoding generates one text to "
            "its end; leave one of them out"
        )


def generate_with_draft(
    arguments: argparse.Namespace,
    trainer: Trainer,
    prompts: Sequence[str],
    sampling: Sampling | BeamSearch,
) -> list[Answer]:
    """Yield the completion of each prompt by a trained language model; acceptance counts of drafts
    are written to standard error.

    Args:
      arguments: the parsed command line, after `validate_draft_options`.
      trainer: the model's.
      prompts: nonempty texts.
      sampling: the sampling settings.

    Raises:
      UserError: as of `speculate`; or the draft has another tokenizer or vocabulary.
    """
    assert isinstance(sampling, Sampling), "beams were rejected"
    train = trainer.config.train
    tokenizer, state = trainer.writer.tokenizer, trainer.program.eval_state(trainer.state)
    rolls_back(train.model)
    draft = _draft_source(arguments, trainer)
    tokens = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    as_text = Stopping(tokenizer, tokens, ())
    answers, drawn, passes, guessed, accepted = [], 0, 0, 0, 0
    for number, prompt in enumerate(tokens):
        found = speculate(
            trainer.program.setup, train.model, state, prompt, draft,
            max_new_tokens=arguments.max_new_tokens, sampling=sampling, seed=arguments.seed,
            ends=trainer.writer.ends,
        )  # fmt: skip
        answers.append(as_text.answer(number, found.answer))
        drawn += found.passes + found.accepted
        passes += found.passes
        guessed += found.guessed
        accepted += found.accepted
    share = f" ({accepted / guessed:.0%})" if guessed else ""
    pace = f", {drawn / passes:.2f} tokens per forward pass" if passes else ""
    sys.stderr.write(f"jaxtrain: {accepted} of {guessed} draft tokens were accepted{share}{pace}\n")
    return answers


def _draft_source(arguments: argparse.Namespace, trainer: Trainer) -> DraftSource:
    count = GUESSES if arguments.guesses is None else arguments.guesses
    sizes = token_model(trainer.config.train.model)
    if arguments.draft == LOOKUP:
        return PromptLookup(sizes.vocab_size, count)
    of_draft = {**vars(arguments), "workdir": arguments.draft, "step": None, "gin_bindings": []}
    other = open_run(argparse.Namespace(**of_draft))
    tokenizer, theirs = trainer.writer.tokenizer, other.writer.tokenizer
    model = other.config.train.model
    draft = DraftModel(other.program.setup, model, other.program.eval_state(other.state), count)
    if theirs.digest != tokenizer.digest or draft.vocab_size != sizes.vocab_size:
        raise UserError(
            f"--draft {arguments.draft}: its vocabulary is different ({draft.vocab_size} tokens; "
            f"this run has {sizes.vocab_size}); use a run with the same tokenizer and vocab_size"
        )
    return draft


_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_EARLY_STOPPING: dict[str | None, bool | Literal["never"]] = {
    None: False,
    "false": False,
    "true": True,
    "never": "never",
}


def generate(arguments: argparse.Namespace) -> int:
    """Print completions of a trained language model, streamed to a terminal."""
    _sampling(arguments, Defaults())  # wrong options are reported before a run is opened
    validate_draft_options(arguments)
    if arguments.chat:
        return converse(arguments)
    if arguments.system is not None:
        raise UserError("--system applies to a conversation; add --chat, or leave it out")
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
    """Return the sampling settings of options, with a model's own defaults."""
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
            raise UserError(f"{_option(name)} applies to beam search; add --beams, or leave it out")
    if beams is None:
        own = {name: value for name, value in defaults.options.items() if name in _DRAWING}
        chosen: dict[str, Any] = {"temperature": 0.8, **own, **given}
        return Sampling(**chosen, repetition_penalty=penalty)
    for name, value in given.items():
        raise UserError(
            f"{_option(name)} {value} with --beams {beams}: beam search does not sample; leave one "
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
    """Return the fields of a line other than those of its prompt's record."""
    line: dict[str, object] = {"answer": answer.text, "ended": answer.ended}
    if answer.score is not None:
        line["score"] = answer.score
    if log_probabilities:
        line |= {"tokens": answer.tokens, "log_probabilities": answer.log_probabilities}
    return line


def converse(arguments: argparse.Namespace) -> int:
    """Answer the lines of standard input, each a user message.

    Args:
      arguments: the parsed command line.
    """
    for name in ("beams", "draft"):
        if vars(arguments)[name] is not None:
            raise UserError(
                f"--{name} {vars(arguments)[name]} with --chat: an answer is shown while it is "
                "generated; leave one of them out"
            )
    if arguments.log_probabilities:
        raise UserError("--log-probabilities with --chat: answers are text; leave one of them out")
    trainer = open_run(arguments)
    sampling = _sampling(arguments, published_defaults(trainer.config, trainer.workdir))
    assert isinstance(sampling, Sampling), "beams were rejected"
    chat = Chat(
        trainer,
        system=arguments.system,
        sampling=sampling,
        max_new_tokens=arguments.max_new_tokens,
        stop=tuple(arguments.stop),
        seed=arguments.seed,
    )
    on_terminal, asks = sys.stdout.isatty(), sys.stdin.isatty()
    for question in _questions(asks):
        try:
            answer = chat.answer(question, show=show if on_terminal else None)
        except UserError as error:
            if not asks:
                raise
            print(f"jaxtrain: {error}", file=sys.stderr)  # noqa: T201
            continue
        # A file or a pipe gets the text itself.
        print("" if on_terminal else answer.text, flush=True)  # noqa: T201
    return DONE


def _questions(asks: bool) -> Iterator[str]:
    """Yield the lines that are not blank, up to the end of the input."""
    while True:
        if asks:
            try:
                line = input("> ")
            except EOFError:
                print()  # noqa: T201
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
        if line.strip():
            yield line.rstrip("\n")
