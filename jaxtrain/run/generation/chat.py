"""Chat with a model through its chat template (`jaxtrain generate --chat`)."""

import datetime
from collections.abc import Callable

from jaxtrain.config.errors import UserError
from jaxtrain.data.source import existing_path
from jaxtrain.data.text.chat.chat_template import ChatTemplate, TemplateError, template_next_to
from jaxtrain.data.text.chat.conversations import Templated
from jaxtrain.data.text.source import text_of
from jaxtrain.models.model import token_model
from jaxtrain.run.generation.answer import Answer
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.prefix_cache import PrefixCache
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import Train

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
