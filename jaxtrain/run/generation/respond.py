"""Dispatch of prompts (text or token ids) to the model's kind of generation."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.models.model import reads_pairs
from jaxtrain.run.generation.answer import Answer
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.generate import generate
from jaxtrain.run.generation.published_defaults import ends_of_run, published_folder
from jaxtrain.run.generation.sampling import Sampling
from jaxtrain.run.generation.targets import tell
from jaxtrain.run.generation.write import write
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


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
    """What a trained model writes; other arguments, and what is raised, as in `Trainer.answers`.

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
        return tell(
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
