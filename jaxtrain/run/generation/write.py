"""Text generation: prompts to text, by the kind of generation that the model supports."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.models.model import reads_pairs
from jaxtrain.run.generation import BATCH_SIZE
from jaxtrain.run.generation.answer import Answer, Stopping, encode_prompt, tokenizer_of
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.generate import generate
from jaxtrain.run.generation.prefix_cache import PrefixCache
from jaxtrain.run.generation.published_defaults import ends_of_run, published_folder
from jaxtrain.run.generation.targets import write_targets
from jaxtrain.training.settings import Config, Train
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
    prefix_cache: PrefixCache | None = None,
    ends: Sequence[int] | None = None,
    special_tokens: bool = True,
) -> list[Answer]:
    """Return the completion of each prompt as text, in their order.

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
      prefix_cache: as of `generate`, of a single prompt.
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
        prefix_cache=prefix_cache,
    )
    written = [watch.answer(number, answer) for number, answer in enumerate(answers)]
    if written and written[0].text is not None:
        watch.show_rest(written[0].text)
    return written


def respond(
    setup: Setup,
    config: Config,
    state: TrainState,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None,
    sampling: Sampling | BeamSearch | None,
    stop: Sequence[str],
    seed: int,
    batch_size: int,
    show: Callable[[str], None] | None,
    workdir: Place | None,
) -> list[Answer]:
    """Dispatch prompts to the model's kind of generation; arguments as in `Trainer.answers`.

    Args:
      setup: whose model it is.
      config: of the run.
      state: its parameters.
      prompts: texts, or lists of token ids.
      workdir: the run's folder, which holds the files of the published model that it started from.
    """
    train, sampling = config.train, sampling or Sampling()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) != len(prompts) and (texts or stop or show):
        raise UserError(
            "Trainer.answers: prompts that are token ids go with no text: give all of them as "
            "texts, or leave texts, `stop` and `show` out"
        )
    ends = ends_of_run(config, workdir)
    if reads_pairs(train.model):
        return write_targets(
            setup, train, state, prompts, max_new_tokens=max_new_tokens, sampling=sampling,
            stop=stop, seed=seed, batch_size=batch_size, show=show, ends=ends,
        )  # fmt: skip
    if len(texts) == len(prompts):
        return write(
            setup, train, state, texts, max_new_tokens=max_new_tokens, sampling=sampling,
            seed=seed, stop=stop, batch_size=batch_size, show=show, ends=ends,
        )  # fmt: skip
    ids: Any = prompts
    return generate(
        setup, train.model, state, ids, max_new_tokens=max_new_tokens, sampling=sampling,
        seed=seed, batch_size=batch_size,
        # A run without a published model answers token ids up to their greatest length.
        ends=() if published_folder(config, workdir) is None else ends,
    )  # fmt: skip
