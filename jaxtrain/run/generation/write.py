"""Text in, text out: what a trained language model writes after prompts."""

import sys
import unicodedata
from collections.abc import Callable, Sequence

from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.run.generation.answer import Answer
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.generate import BATCH_SIZE, generate, writes
from jaxtrain.run.generation.memory import Memory
from jaxtrain.run.generation.sampling import Sampling
from jaxtrain.run.generation.stopping import Stopping
from jaxtrain.training.settings import TextSource, Train
from jaxtrain.training.step import Program, TrainState


def write(
    program: Program,
    train: Train,
    state: TrainState,
    prompts: Sequence[str],
    *,
    max_new_tokens: int | None,
    sampling: Sampling | BeamSearch,
    seed: int,
    stop: Sequence[str] = (),
    batch_size: int = BATCH_SIZE,
    show: Callable[[str], None] | None = None,
    memory: Memory | None = None,
) -> list[Answer]:
    """What a trained language model writes after each prompt, in their order.

    Args:
      program: the program whose state it is.
      train: its model and the data whose tokenizer it knows.
      state: the trained state.
      prompts: each at least one character.
      max_new_tokens: how many tokens to draw for each; None: as far as 100 fit.
      sampling: how to draw them, or to search for the likeliest.
      seed: of the draws.
      stop: strings before which an answer ends.
      batch_size: prompts that are answered at one time.
      show: is given the first answer piece by piece while it is written.
      memory: as of `generate`, of a single prompt.

    Raises:
      UserError: the model is no language model, a prompt is no text or does not fit into its
        context, or a stop string is empty.
    """
    tokenizer = tokenizer_of(train)
    tokens = [encoded(tokenizer, prompt) for prompt in prompts]
    watch = Stopping(tokenizer, tokens, stop, show)
    answers = generate(
        program,
        train.model,
        state,
        tokens,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        ends=() if tokenizer.end_of_text is None else (tokenizer.end_of_text,),
        batch_size=batch_size,
        watch=watch if stop or show else None,
        memory=memory,
    )
    told = [watch.answer(number, answer) for number, answer in enumerate(answers)]
    if told and told[0].text is not None:
        watch.show_rest(told[0].text)
    return told


def tokenizer_of(train: Train, *, command: str = "generate") -> Tokenizer:
    """The tokenizer of a model that writes; UserError, in the name of a command, where it does not,
    or knows none."""
    if not isinstance(train.data, TextSource):
        raise UserError(
            f"{command}: Train.data=@{type(train.data).__name__}() has no tokenizer; only models "
            "trained on text generate"
        )
    writes(train.model, command=command)
    return train.data.open_tokenizer()


def encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt; UserError where it is no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt {prompt!r} is not UTF-8 text (character {error.start}); give it in UTF-8"
        ) from error
    return tokenizer.encode(prompt)


def printable(text: str) -> str:
    """The text with its control characters escaped, but for newlines and tabs.

    A byte-level model may write any: a terminal would obey them.
    """
    return "".join(
        repr(one)[1:-1] if unicodedata.category(one) == "Cc" and one not in "\n\t" else one
        for one in text
    )


def show(piece: str) -> None:
    """Puts a piece of an answer on the terminal at once."""
    sys.stdout.write(printable(piece))
    sys.stdout.flush()
