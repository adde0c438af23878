"""Text generation of a run: prompts to answers, by the kind of generation of its model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.models.model import reads_pairs
from jaxtrain.run.generation import BATCH_SIZE
from jaxtrain.run.generation.answer import Answer, Stopping, encode_prompt, tokenizer_of
from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.generate import generate
from jaxtrain.run.generation.prefix_cache import PrefixCache
from jaxtrain.run.generation.published_defaults import ends_of_run, published_folder
from jaxtrain.run.generation.targets import write_targets
from jaxtrain.training.settings import Config
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


class Writer:
    """Answers of one run's model; files of the run are read at the first one.

    Args:
      setup: the states' program.
      config: of the run: its model, and the data with its tokenizer.
      workdir: the run's folder, with the files of the published model that it started from.
    """

    def __init__(self, setup: Setup, config: Config, workdir: AnyPath | None) -> None:
        self._setup, self._config, self._workdir = setup, config, workdir
        self._train = config.train
        self._writes_targets = reads_pairs(config.train.model)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          UserError: the model is not a language model, or has none.
        """
        return tokenizer_of(self._train)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer in text."""
        return ends_of_run(self._config, self._workdir)

    @functools.cached_property
    def _ends_of_ids(self) -> tuple[int, ...]:
        """The same for an answer in ids: a run without a published model continues to its maximum
        length."""
        return () if published_folder(self._config, self._workdir) is None else self.ends

    def answers(
        self,
        state: TrainState,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None,
        sampling: Sampling | BeamSearch | None,
        stop: Sequence[str],
        seed: int,
        batch_size: int,
        show: Callable[[str], None] | None,
    ) -> list[Answer]:
        """Return the completion or target of each prompt, in their order.

        Args:
          state: the trained state.
          prompts: texts, or lists of token ids.

        Other arguments and errors are those of `Trainer.answers`.
        """
        sampling = sampling or Sampling()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) != len(prompts) and (texts or stop or show):
            raise UserError(
                "Trainer.answers: prompts that are token ids go with no text: give all of them as "
                "texts, or leave texts, `stop` and `show` out"
            )
        if self._writes_targets:
            return write_targets(
                self._setup, self._train, state, prompts, max_new_tokens=max_new_tokens,
                sampling=sampling, stop=stop, seed=seed, batch_size=batch_size, show=show,
                ends=self.ends,
            )  # fmt: skip
        if len(texts) == len(prompts):
            return self.write(
                state, texts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed,
                stop=stop, batch_size=batch_size, show=show,
            )  # fmt: skip
        ids: Any = prompts
        return generate(
            self._setup, self._train.model, state, ids, max_new_tokens=max_new_tokens,
            sampling=sampling, seed=seed, batch_size=batch_size, ends=self._ends_of_ids,
        )  # fmt: skip

    def write(
        self,
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
        special_tokens: bool = True,
    ) -> list[Answer]:
        """Return the completion of each prompt as text, in their order.

        Args:
          state: the trained state.
          prompts: nonempty texts.
          max_new_tokens: maximum number of new tokens of each; None: up to 100 that fit.
          sampling: sampling or beam search settings.
          seed: of sampling.
          stop: strings before which an answer ends.
          batch_size: prompts that are answered at once.
          show: called with the first answer piece by piece while it is generated.
          prefix_cache: as in `generate`, for a single prompt.
          special_tokens: whether the tokenizer's are put around each prompt; False: they are
            included, as with a chat template.

        Raises:
          UserError: the model is not a language model, a prompt is not text or does not fit into
            its context, or a stop string is empty.
        """
        tokens = [
            encode_prompt(self.tokenizer, prompt, special_tokens=special_tokens)
            for prompt in prompts
        ]
        watch = Stopping(self.tokenizer, tokens, stop, show)
        answers = generate(
            self._setup, self._train.model, state, tokens, max_new_tokens=max_new_tokens,
            sampling=sampling, seed=seed, ends=self.ends, batch_size=batch_size,
            watch=watch if stop or show else None, prefix_cache=prefix_cache,
        )  # fmt: skip
        texts = [watch.answer(number, answer) for number, answer in enumerate(answers)]
        if texts and texts[0].text is not None:
            watch.show_rest(texts[0].text)
        return texts
