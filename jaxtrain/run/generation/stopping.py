"""Stop strings and streaming of text during generation."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.run.generation.answer import Answer

EVERY = 16  # tokens between two looks for a stop string, where nobody watches
SHOWN_EVERY = 2  # where somebody does

# What stands for bytes that are no character, or not yet.
UNKNOWN = "\ufffd"


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """What tokens add to the text of a prompt: some tokenizers write a first token otherwise."""
    before = tokenizer.decode(prompt)
    return tokenizer.decode([*prompt, *tokens])[len(before) :]


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    places = [place for place in (text.find(one) for one in stop) if place != -1]
    return text[: min(places)] if places else text


def certain(text: str, stop: Sequence[str]) -> str:
    """What of a text that goes on will stay: no half character, no beginning of a stop string."""
    text = cut(text, stop).rstrip(UNKNOWN)
    halves = (one[:size] for one in stop for size in range(len(one), 0, -1))
    longest = max((len(half) for half in halves if text.endswith(half)), default=0)
    return text[: len(text) - longest]


class Stopping:
    """Ends answers at stop strings, and shows one while it is written; a `generate.Watch`.

    Args:
      tokenizer: of the model.
      prompts: the prompts' tokens.
      stop: strings that end an answer.
      show: is given every piece of the first prompt's answer as soon as it is certain.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        stop: Sequence[str],
        show: Callable[[str], None] | None = None,
    ) -> None:
        if "" in stop:
            raise UserError("--stop is empty: give at least one character to stop at")
        self.every = EVERY if show is None else SHOWN_EVERY
        self._tokenizer, self._prompts, self._stop = tokenizer, prompts, stop
        self._show, self._shown = show, 0

    def text(self, prompt: int, tokens: Sequence[int]) -> str:
        """An answer's tokens as text, up to a stop string."""
        return cut(continuation(self._tokenizer, self._prompts[prompt], tokens), self._stop)

    def answer(self, prompt: int, answer: Answer) -> Answer:
        """An answer with its text."""
        return dataclasses.replace(answer, text=self.text(prompt, answer.tokens))

    def find_stop(self, prompt: int, tokens: list[int]) -> int | None:
        """After how many tokens there is a stop string, or None."""
        if self._show is not None and prompt == 0:
            whole = continuation(self._tokenizer, self._prompts[prompt], tokens)
            self._add(certain(whole, self._stop))
        if not self._has_stop(prompt, tokens):
            return None
        # The fewest tokens that have it: it stays in every longer text.
        low, high = 0, len(tokens)
        while high - low > 1:
            middle = (low + high) // 2
            if self._has_stop(prompt, tokens[:middle]):
                high = middle
            else:
                low = middle
        return high

    def show_rest(self, text: str) -> None:
        """Shows what is left of the first prompt's answer."""
        self._add(text)

    def _add(self, text: str) -> None:
        if self._show is not None and len(text) > self._shown:
            self._show(text[self._shown :])
            self._shown = len(text)

    def _has_stop(self, prompt: int, tokens: Sequence[int]) -> bool:
        if not self._stop:
            return False
        text = continuation(self._tokenizer, self._prompts[prompt], tokens)
        return any(one in text for one in self._stop)
