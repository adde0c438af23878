"""Chat through a model's chat template (`jaxtrain generate --chat`), and its prefix cache."""

import dataclasses
import datetime
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.source import existing_path
from jaxtrain.data.text.chat.chat_template import ChatTemplate, TemplateError, template_next_to
from jaxtrain.data.text.chat.conversations import Templated
from jaxtrain.data.text.source import text_of
from jaxtrain.models.model import TokenModel, token_model
from jaxtrain.nn.kv_cache import Cache
from jaxtrain.run.generation.answer import Answer
from jaxtrain.run.generation.decoding import (
    LEAST_LENGTH,
    Prefix,
    Sampling,
    counts_slots,
    next_logits,
    pad_prompts,
    prefill,
    round_up,
)
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import Train
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

# -- prefix cache: KV cache and recurrent states, kept so that only new tokens are read ------------
# Letters: B rows, of which the first is the text, T length, S slots, V vocab.


class PrefixCache:
    """The tokens of a text and the layers' cache of them.

    A cache of positions is cut back to the common prefix; a recurrent state, which cannot be, is
    reused only if the new text begins with the whole old one. Experts with a capacity count the
    tokens of a pass: with them everything is read again.

    Attributes:
      read: tokens of the last text that were not cached.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._kept: Prefix | None = None
        self.read = 0

    def begin(
        self, setup: Setup, sizes: TokenModel, state: TrainState, text: list[int], *, new: int
    ) -> Prefix:
        """Return a text with its cache.

        Args:
          setup: from `for_texts`.
          sizes: the model's.
          state: the trained state.
          text: its tokens, at least one.
          new: maximum number of new tokens.
        """
        # Removed at once: the following calls donate its arrays, even if they fail.
        kept, self._kept = self._kept, None
        shared = 0 if kept is None else self._count_shared(sizes, text)
        self._tokens, self.read = list(text), len(text) - shared
        if kept is None or not shared:
            tokens_BT, padding_B = pad_prompts(setup, sizes, [text])
            room = round_up(tokens_BT.shape[1] + new)
            logits_BV, cache = prefill(setup, sizes, state, tokens_BT, padding_B, room=room)
            return Prefix(logits_BV, cache, padding_B, room)
        *most, last = text[shared:]
        length = len(most)
        if _is_recurrent(sizes) and most:  # slots after the last are masked until overwritten
            context = sizes.context_length - shared
            length = round_up(len(most), least=LEAST_LENGTH, most=context)
        cache, logits_BV, rows = kept.cache, kept.logits_BV, len(kept.padding_B)
        start = int(kept.padding_B[0]) + shared
        room = round_up(max(kept.room, start + length + 1 + new))
        if room > kept.room:
            cache = _grow(sizes, cache, room=room)
        for some, width in (most, length), ([last], 1):
            if some:
                tokens_BT = np.zeros((rows, width), np.int32)
                tokens_BT[0, : len(some)] = some
                logits_BV, cache = _extend(
                    setup, state, cache, tokens_BT, kept.padding_B, start, room=room
                )
                start += len(some)
        return Prefix(logits_BV, cache, kept.padding_B, room)

    def keep(self, prefix: Prefix, cache: Cache, drawn: list[int]) -> None:
        """Store a continued text.

        Args:
          prefix: from `begin`.
          cache: of all tokens read and generated.
          drawn: the generated tokens, including those after an answer's end.
        """
        self._tokens = self._tokens + drawn
        self._kept = dataclasses.replace(prefix, cache=cache)

    def _count_shared(self, sizes: TokenModel, text: list[int]) -> int:
        """Return the number of cached tokens: never the last, whose logits are needed."""
        if counts_slots(sizes):
            return 0
        pairs = zip(self._tokens, text[:-1], strict=False)
        shared = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if shared is None:
            shared = min(len(self._tokens), len(text) - 1)
        return shared if _is_recurrent(sizes) or shared == len(self._tokens) else 0


def _is_recurrent(sizes: TokenModel) -> bool:
    """Whether the model has state that cannot be truncated to fewer tokens."""
    return all(one.every_token for one in sizes.cached)


@functools.partial(jax.jit, static_argnames=("setup", "room"), donate_argnames="cache")
def _extend(
    setup: Setup,
    state: TrainState,
    cache: Cache,
    tokens_BT: jax.Array,
    padding_B: jax.Array,
    start: jax.Array | int,
    *,
    room: int,
) -> tuple[jax.Array, Cache]:
    """Logits [B, V] after the last of these tokens, and the cache with them from `start` on."""
    cache = dataclasses.replace(cache, length=jnp.asarray(start, jnp.int32))
    logits_BTV, cache = next_logits(
        setup.model(state), tokens_BT, cache, padding_B, setup.execution, room=room, last=1
    )
    return logits_BTV[:, 0], cache


@functools.partial(jax.jit, static_argnames=("sizes", "room"))
def _grow(sizes: TokenModel, cache: Cache, *, room: int) -> Cache:
    """Return the cache with more slots [L, B, S, ...]."""

    def longer(x: jax.Array) -> jax.Array:
        more = [(0, 0)] * x.ndim
        more[2] = (0, room - x.shape[2])
        return jnp.pad(x, more)

    layers = tuple(
        longer(x) if one.every_token else x
        for one, x in zip(sizes.cached, cache.layers, strict=True)
    )
    return dataclasses.replace(cache, layers=layers)


# -- the chat --------------------------------------------------------------------------------------

MOST_TOKENS = 512  # of an answer, by default
_KEPT = 4  # 1 / the fraction of the context that is reserved for an answer


class Chat:
    """A growing conversation; its oldest turns are dropped if the context is full.

    The cache of earlier turns is kept between answers: a new one only reads new
    tokens.

    Attributes:
      messages: those so far, as the template reads them.
      prefix_cache: their cache.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        """Find the template of a trained model.

        Args:
          trainer: the model's.
          system: the system message; None: the template's default.
          sampling: the sampling settings; None: from the model's own distribution.
          max_new_tokens: of an answer; None: 512, or what fits.
          stop: strings that end an answer, in addition to the template's end of a turn.
          seed: of sampling; each answer uses its own.

        Raises:
          UserError: the model does not generate text, or has no chat template.
        """
        train = trainer.config.train
        self._tokenizer = trainer.writer.tokenizer
        self._context = token_model(train.model).context_length
        self._template, self._trainer = template_of(train), trainer
        self._sampling, self._most, self._seed = sampling or Sampling(), max_new_tokens, seed
        self._stop = [*stop, self._template.end_of_turn]
        self.prefix_cache = PrefixCache()
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._first = len(self.messages)

    def answer(self, question: str, *, show: Callable[[str], None] | None = None) -> Answer:
        """Return the model's answer to the user's next message; both join the conversation.

        Args:
          question: of the user.
          show: called with the answer piece by piece while it is generated.

        Raises:
          UserError: the template rejects it, or it does not fit into the context.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        text, count = self._prompt(messages)
        room = self._context // _KEPT if self._most is None else self._most
        while count + room > self._context and len(messages) >= self._first + 3:
            del messages[self._first : self._first + 2]
            text, count = self._prompt(messages)
        most = self._most or max(1, min(MOST_TOKENS, self._context - count))
        (answer,) = self._trainer.writer.write(
            self._trainer.program.eval_state(self._trainer.state), [text],
            max_new_tokens=most, sampling=self._sampling, stop=self._stop, show=show,
            seed=self._seed + len(messages), prefix_cache=self.prefix_cache, special_tokens=False,
        )  # fmt: skip
        self.messages = [*messages, {"role": "assistant", "content": answer.text or ""}]
        return answer

    def _prompt(self, messages: list[dict[str, str]]) -> tuple[str, int]:
        """Return the conversation up to the model's turn, and its tokens."""
        try:
            text = self._template.text(messages, reply=True)
        except TemplateError as error:
            raise UserError(f"--chat: the chat template rejects it ({error})") from error
        return text, len(self._tokenizer.encode(text))


def template_of(train: Train) -> ChatTemplate:
    """Return the chat template of a run's data or of its tokenizer's folder, for today.

    Raises:
      UserError: there is none.
    """
    today, data = datetime.date.today(), train.data
    if isinstance(data, Templated):
        return data.open_template(today=today)
    text = text_of(data)
    found = None
    if text is not None and text.tokenizer != "byte":
        path = existing_path("TextData.tokenizer", text.tokenizer, words=("byte",))
        found = template_next_to(path, today)
    if found is None:
        raise UserError(
            "--chat: the run's tokenizer has no chat template next to it (chat_template.jinja, or "
            "chat_template in tokenizer_config.json); put the model's there, or train on "
            "conversations (@ChatData())"
        )
    return found
