"""Command-line options of speculative decoding: draft model or prompt lookup."""

import argparse
import sys
from collections.abc import Sequence

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import token_model
from jaxtrain.run.commands.train import open_run
from jaxtrain.run.generation.answer import Answer
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.published_defaults import ends_of_run
from jaxtrain.run.generation.sampling import Sampling
from jaxtrain.run.generation.speculative import Draft, Guesser, Lookup, rolls_back, speculate
from jaxtrain.run.generation.stopping import Stopping
from jaxtrain.run.generation.write import encode_prompt, tokenizer_of
from jaxtrain.run.trainer import Trainer

LOOKUP = "lookup"  # in the place of a draft's folder
GUESSES = 4


def validate_guesses(arguments: argparse.Namespace) -> None:
    """Raises UserError where what is requested beside guesses does not go with them."""
    if arguments.draft is None:
        if arguments.guesses is not None:
            raise UserError(
                f"--guesses {arguments.guesses}: nothing guesses; add --draft, or leave it out"
            )
        return
    if arguments.guesses is not None and arguments.guesses < 1:
        raise UserError(f"--guesses {arguments.guesses}: use at least 1")
    if arguments.beams is not None or arguments.stop:
        other = "--stop" if arguments.stop else f"--beams {arguments.beams}"
        raise UserError(
            f"--draft {arguments.draft} with {other}: guesses are of one text up to its end; leave "
            "one of them out"
        )


def generate_with_draft(
    arguments: argparse.Namespace,
    trainer: Trainer,
    prompts: Sequence[str],
    sampling: Sampling | BeamSearch,
) -> list[Answer]:
    """What a trained language model writes after each prompt, one after the other; how many guesses
    were kept goes to standard error.

    Args:
      arguments: the parsed command line, after `validate_guesses`.
      trainer: the model's.
      prompts: each at least one character.
      sampling: how tokens are drawn.

    Raises:
      UserError: as of `speculate`; or the draft has another tokenizer or vocabulary.
    """
    assert isinstance(sampling, Sampling), "beams were rejected"
    train = trainer.config.train
    tokenizer, state = tokenizer_of(train), trainer.program.eval_state(trainer.state)
    rolls_back(train.model)
    guesser = _guesser(arguments, trainer)
    tokens = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    as_text = Stopping(tokenizer, tokens, ())
    ends = ends_of_run(trainer.config, trainer.workdir)
    answers, drawn, passes, guessed, accepted = [], 0, 0, 0, 0
    for number, prompt in enumerate(tokens):
        found = speculate(
            trainer.program.setup, train.model, state, prompt, guesser,
            max_new_tokens=arguments.max_new_tokens, sampling=sampling, seed=arguments.seed,
            ends=ends,
        )  # fmt: skip
        answers.append(as_text.answer(number, found.answer))
        drawn += found.passes + found.accepted
        passes += found.passes
        guessed += found.guessed
        accepted += found.accepted
    share = f" ({accepted / guessed:.0%})" if guessed else ""
    pace = f", {drawn / passes:.2f} tokens a pass of the model" if passes else ""
    sys.stderr.write(f"jaxtrain: {accepted} of {guessed} guesses were kept{share}{pace}\n")
    return answers


def _guesser(arguments: argparse.Namespace, trainer: Trainer) -> Guesser:
    count = GUESSES if arguments.guesses is None else arguments.guesses
    train, sizes = trainer.config.train, token_model(trainer.config.train.model)
    if arguments.draft == LOOKUP:
        return Lookup(sizes.vocab_size, count)
    of_draft = {**vars(arguments), "workdir": arguments.draft, "step": None, "gin_bindings": []}
    other = open_run(argparse.Namespace(**of_draft))
    tokenizer, theirs = tokenizer_of(train), tokenizer_of(other.config.train)
    model = other.config.train.model
    draft = Draft(other.program.setup, model, other.program.eval_state(other.state), count)
    if theirs.digest != tokenizer.digest or draft.vocab_size != sizes.vocab_size:
        raise UserError(
            f"--draft {arguments.draft}: its tokens are others ({draft.vocab_size} of them, here "
            f"{sizes.vocab_size}); name a run with the same tokenizer and vocab_size"
        )
    return draft
