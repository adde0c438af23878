"""Text generation: prompts to text."""

import sys
import unicodedata
from collections.abc import Callable, Sequence

from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenization.tokenizer import Tokenizer, with_special_tokens
from jaxtrain.run.generation import BATCH_SIZE
from jaxtrain.run.generation.answer import Answer
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.generate import generate, writes
from jaxtrain.run.generation.prefix_cache import Memory
from jaxtrain.run.generation.sampling import Sampling
from jaxtrain.run.generation.stopping import Stopping
from jaxtrain.training.settings import TextSource, Train
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


def write(
    setup: Setup,
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
    ends: Sequence[int] | None = None,
    special_tokens: bool = True,
) -> list[Answer]:
    """What a trained language model writes after each prompt, in their order.

    Args:
      setup: the program whose state it is.
      train: its model and the data whose tokenizer it knows.
      state: the trained state.
      prompts: each at least one character.
      max_new_tokens: how many tokens to draw for each; None: as far as 100 fit.
      sampling: how to draw them, or to search for the likeliest.
      seed: of the draws.
      stop: strings before which an answer ends.
      batch_size: prompts that are answered at once.
      show: is given the first answer piece by piece while it is written.
      memory: as of `generate`, of a single prompt.
      ends: tokens that end an answer; None: the tokenizer's end of a text.
      special_tokens: whether the tokenizer's are put around each prompt; False: they are in it, as
        a chat template writes them.

    Raises:
      UserError: the model is no language model, a prompt is no text or does not fit into its
        context, or a stop string is empty.
    """
    tokenizer = tokenizer_of(train)
    tokens = [encode_prompt(tokenizer, prompt, special_tokens=special_tokens) for prompt in prompts]
    if ends is None:
        ends = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    watch = Stopping(tokenizer, tokens, stop, show)
    answers = generate(
        setup,
        train.model,
        state,
        tokens,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        ends=ends,
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


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, special_tokens: bool = True) -> list[int]:
    """The tokens of a prompt, with the tokenizer's special tokens around it or without; UserError
    where it is no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt {prompt!r} is not UTF-8 text (character {error.start}); give it in UTF-8"
        ) from error
    ids = tokenizer.encode(prompt)
    # An empty prompt is reported, and special tokens would hide it.
    return with_special_tokens(tokenizer, ids) if special_tokens and ids else ids


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
