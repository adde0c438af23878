"""Text generation of a run: batches of prompts to completions with finish reasons.

Letters: B rows, E tokens that end a text.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, count_of
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.models.model import Model, TokenModel, reads_pairs
from jaxtrain.run.generation import BATCH_SIZE
from jaxtrain.run.generation.answer import (
    Answer,
    Ended,
    Stopping,
    encode_prompt,
    ends_of_run,
    length_before_end,
    published_folder,
    tokenizer_of,
)
from jaxtrain.run.generation.decoding import (
    LEAST_LENGTH,
    Drawing,
    Prefix,
    Sampling,
    Texts,
    advance,
    batches,
    for_texts,
    pad_prompts,
    prefill,
    require_text_model,
    round_up,
)  # fmt: skip
from jaxtrain.training.settings import MAX_SEED, Config
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

if TYPE_CHECKING:
    from jaxtrain.run.generation.beams import BeamSearch
    from jaxtrain.run.generation.chat import PrefixCache


class Watch(Protocol):
    """Callback during generation.

    Attributes:
      every: number of tokens between two calls.
    """

    every: int

    def find_stop(self, prompt: int, tokens: list[int]) -> int | None:
        """Return the number of tokens after which the answer of prompt `prompt` ends, or None to
        continue."""
        ...


def generate(
    setup: Setup,
    model: Model,
    state: TrainState,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new_tokens: int | None,
    sampling: "Sampling | BeamSearch",
    seed: int,
    ends: Sequence[int] = (),
    batch_size: int = BATCH_SIZE,
    watch: Watch | None = None,
    prefix_cache: "PrefixCache | None" = None,
) -> list[Answer]:
    """Return the completion of each prompt, in their order.

    An answer depends on its prompt, its index and the seed, not on the other prompts
    or the mesh.

    Args:
      setup: the state's program.
      model: its model's settings.
      state: the trained state.
      prompts: nonempty token lists.
      max_new_tokens: maximum number of new tokens of each; None: up to 100 that fit.
      sampling: sampling or beam search settings.
      seed: of sampling.
      ends: tokens that end an answer.
      batch_size: prompts that are answered at once.
      watch: may end an answer early.
      prefix_cache: cache of a prefix of the only prompt; extended by the answer.

    Raises:
      UserError: the model is not a language model, a prompt is empty, has tokens outside of its
        vocabulary or does not fit into its context, or a number is out of range.
    """
    validate_watch(sampling, watch)
    sizes, setup = require_text_model(model), for_texts(setup)
    given = [validate_prompt(prompt, sizes) for prompt in prompts]
    limits = [limit_of(len(prompt), max_new_tokens, sizes) for prompt in given]
    validate_seed(seed)
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size}: use at least 1")
    answers: dict[int, Answer] = {}
    key = jax.random.key(seed)
    with setup.layout.active(), setup.precision.products():
        for numbers in batches([len(prompt) for prompt in given], sizes, batch_size):
            batch = {number: given[number] for number in numbers}
            most = [limits[number] for number in numbers]
            if not isinstance(sampling, Sampling):
                # Imported here: most answers are sampled.
                from jaxtrain.run.generation.beams import search

                found = search(
                    setup, sizes, state, list(batch.values()), most, settings=sampling, ends=ends
                )
                answers.update(zip(numbers, found, strict=True))
                continue
            found = _complete_batch(
                setup,
                sizes,
                state,
                batch,
                most,
                sampling=sampling,
                key=key,
                ends=ends,
                watch=watch,
                prefix_cache=prefix_cache,
            )
            answers.update(zip(numbers, found, strict=True))
    return [answers[number] for number in range(len(given))]


def validate_prompt(prompt: Sequence[int] | np.ndarray, sizes: TokenModel) -> list[int]:
    """Return the prompt's tokens; UserError where it is empty or they are not the model's."""
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise UserError(
            f"generate: the prompt is {tokens.dtype.name}{list(tokens.shape)}; use text, or the "
            "token ids of one text: integers [T]"
        )
    outside = tokens[(tokens < 0) | (tokens >= sizes.vocab_size)]
    if outside.size:
        raise UserError(
            f"generate: the prompt has the token {outside[0]}; use 0 to {sizes.vocab_size - 1} "
            f"({type(sizes).__name__}.vocab_size={sizes.vocab_size})"
        )
    if not tokens.size:
        raise UserError("--prompt is empty; give at least one character to continue")
    return tokens.tolist()


def limit_of(length: int, max_new_tokens: int | None, sizes: TokenModel) -> int:
    """Return the maximum number of tokens after a prompt of this length."""
    room = sizes.context_length - length
    if max_new_tokens is None:
        max_new_tokens = max(min(100, room), 1)
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: use at least 1")
    context = f"{type(sizes).__name__}.context_length={sizes.context_length}"
    if room < 1:
        raise UserError(
            f"a prompt of {count_of(length, 'token')} leaves no room in {context}; use at most "
            f"{sizes.context_length - 1}"
        )
    if max_new_tokens > room:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} after a prompt of "
            f"{count_of(length, 'token')} is more than {context}; use at most {room}"
        )
    return max_new_tokens


def validate_watch(sampling: "Sampling | BeamSearch", watch: Watch | None) -> None:
    """Raise UserError if a beam search has a watch."""
    if not isinstance(sampling, Sampling) and watch is not None:
        raise UserError(
            f"--beams {sampling.beams}: a beam ends at the end-of-text token or at its maximum "
            "length, and is not shown before; leave stop strings out, or beams"
        )


def validate_seed(seed: int) -> None:
    """Raise UserError if a seed has more than 32 bits."""
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed {seed}: use 0 to {MAX_SEED}")


def _complete_batch(
    setup: Setup,
    sizes: TokenModel,
    state: TrainState,
    prompts: dict[int, list[int]],
    limits: list[int],
    *,
    sampling: Sampling,
    key: jax.Array,
    ends: Sequence[int],
    watch: Watch | None,
    prefix_cache: "PrefixCache | None",
) -> list[Answer]:
    """Return the answers of one batch, prompts by their numbers."""
    new = round_up(max(limits), least=LEAST_LENGTH, most=sizes.context_length)
    drawing, count = sampling.drawing(), len(prompts)
    if prefix_cache is None:
        tokens_BT, padding_B = pad_prompts(setup, sizes, list(prompts.values()))
        room = tokens_BT.shape[1] + new
        logits_BV, cache = prefill(setup, sizes, state, tokens_BT, padding_B, room=room)
        prefix = Prefix(logits_BV, cache, padding_B, room)
    else:
        (prompt,) = prompts.values()
        prefix = prefix_cache.begin(setup, sizes, state, prompt, new=new)
    padding_B, room, rows = prefix.padding_B, prefix.room, len(prefix.padding_B)
    seen_BV = None
    if "repetition_penalty" in drawing:
        seen_BV = np.zeros((rows, sizes.vocab_size), bool)
        for row, prompt in enumerate(prompts.values()):
            seen_BV[row, prompt] = True
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, _pad(list(prompts), rows, 0))
    texts = Texts(
        cache=prefix.cache,
        logits_BV=prefix.logits_BV,
        padding_B=jnp.asarray(padding_B),
        seen_BV=None if seen_BV is None else jnp.asarray(seen_BV),
        finished_B=jnp.arange(rows) >= count,
        limit_B=jnp.asarray(_pad(limits, rows, 0)),
        drawn_BN=jnp.zeros((rows, new), jnp.int32),
        log_p_BN=jnp.zeros((rows, new), jnp.float32),
        count=jnp.zeros((), jnp.int32),
    )
    answers, texts = write_answers(
        setup, state, texts, list(prompts), limits,
        drawing=drawing, keys_B=keys_B, ends=ends, room=room, watch=watch,
    )  # fmt: skip
    if prefix_cache is not None:
        drawn_N = np.asarray(texts.drawn_BN)[0, : int(texts.count)]
        prefix_cache.keep(prefix, texts.cache, drawn_N.tolist())
    return answers


def write_answers(
    setup: Setup,
    state: TrainState,
    texts: Texts,
    numbers: Sequence[int],
    limits: Sequence[int],
    *,
    drawing: Drawing,
    keys_B: jax.Array,
    ends: Sequence[int],
    room: int,
    watch: Watch | None,
    following: Callable[..., Any] | None = None,
) -> tuple[list[Answer], Texts]:
    """Return the answers of texts whose prompts are read, and the texts with them.

    Args:
      program, state, texts, drawing, keys_B, room, following: as of `advance`.
      numbers: indices of the texts in the first rows, for the watch.
      limits: maximum number of new tokens of each of these.
      ends: tokens that end an answer.
      watch: may end one early.
    """
    ends_E, until = np.asarray(ends, np.int32), 0
    most = max(limits)
    stops: dict[int, int] = {}  # rows ended by the watch -> number of tokens
    while True:
        until = most if watch is None else min(most, until + watch.every)
        texts = advance(
            setup, state, texts, drawing, keys_B, ends_E, until, room=room, following=following
        )
        # Replicated: each process reads them.
        drawn_BN, finished_B = np.asarray(texts.drawn_BN), np.array(texts.finished_B)
        lengths = [length_before_end(drawn_BN[row, : min(until, limit)], ends)
                   for row, limit in enumerate(limits)]  # fmt: skip
        if watch is not None:
            for row, number in enumerate(numbers):
                if row not in stops:
                    at = watch.find_stop(number, drawn_BN[row, : lengths[row]].tolist())
                    if at is not None:
                        stops[row], finished_B[row] = at, True
            texts = dataclasses.replace(texts, finished_B=jnp.asarray(finished_B))
        if finished_B.all() or until == most:
            break
    log_p_BN, answers = np.asarray(texts.log_p_BN), []
    for row, limit in enumerate(limits):
        ended: Ended = "length" if lengths[row] == limit else "end"
        if row in stops:
            lengths[row], ended = stops[row], "stop"
        tokens, log_probabilities = drawn_BN[row, : lengths[row]], log_p_BN[row, : lengths[row]]
        answers.append(
            Answer(
                tokens=tokens.tolist(), log_probabilities=log_probabilities.tolist(), ended=ended
            )
        )
    return answers, texts


def _pad(values: list[int], rows: int, value: int) -> np.ndarray:
    return np.array(values + [value] * (rows - len(values)), np.int32)


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
        sampling: "Sampling | BeamSearch | None",
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
            # Imported here: it knows the data of pairs.
            from jaxtrain.run.generation.targets import write_targets

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
        sampling: "Sampling | BeamSearch",
        seed: int,
        stop: Sequence[str] = (),
        batch_size: int = BATCH_SIZE,
        show: Callable[[str], None] | None = None,
        prefix_cache: "PrefixCache | None" = None,
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
