"""Answers: completions with finish reasons, stop strings, text streamed during generation."""

import dataclasses
import sys
import unicodedata
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from jaxtrain.config.buckets import AnyPath, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.shipped import MODEL_CONFIG
from jaxtrain.data.text.source import text_of
from jaxtrain.data.tokenization.tokenizer import Tokenizer, with_special_tokens
from jaxtrain.run.attempts.folder import CARRIED_FOLDER
from jaxtrain.run.generation.decoding import require_text_model
from jaxtrain.training.settings import Config, TextSource, Train

Ended = Literal["end", "stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The completion of one prompt.

    Attributes:
      tokens: the generated tokens, without an end token.
      log_probabilities: the model's of each token, natural, before temperature or anything else.
      ended: by an end token, by a stop string, or by its maximum length.
      text: the tokens as text, up to a stop string; None if token ids were requested.
      score: its beam search score; None without beam search.
    """

    tokens: list[int]
    log_probabilities: list[float]
    ended: Ended
    text: str | None = None
    score: float | None = None


def length_before_end(tokens: Sequence[int] | np.ndarray, ends: Sequence[int]) -> int:
    """Return the number of tokens before an end token."""
    indices = np.flatnonzero(np.isin(tokens, ends))
    return int(indices[0]) if indices.size else len(tokens)


EVERY = 16  # tokens between two checks for stop strings, without streaming
SHOWN_EVERY = 2  # with streaming

# Replacement for bytes that are not a character, or not yet.
UNKNOWN = "\ufffd"


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that tokens add to a prompt; a first token may decode otherwise."""
    before = tokenizer.decode(prompt)
    return tokenizer.decode([*prompt, *tokens])[len(before) :]


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string in it."""
    positions = [position for position in (text.find(one) for one in stop) if position != -1]
    return text[: min(positions)] if positions else text


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the part of a growing text that stays: no half character or start of a stop string."""
    text = cut_at_stop(text, stop).rstrip(UNKNOWN)
    halves = (one[:size] for one in stop for size in range(len(one), 0, -1))
    longest = max((len(half) for half in halves if text.endswith(half)), default=0)
    return text[: len(text) - longest]


class Stopping:
    """Ends answers at stop strings, and streams one of them; a `generate.Watch`.

    Args:
      tokenizer: of the model.
      prompts: the prompts' tokens.
      stop: strings that end an answer.
      show: called with every piece of the first prompt's answer as soon as it is certain.
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
        """Return an answer's tokens as text, up to a stop string."""
        return cut_at_stop(continuation(self._tokenizer, self._prompts[prompt], tokens), self._stop)

    def answer(self, prompt: int, answer: Answer) -> Answer:
        """Return an answer with its text."""
        return dataclasses.replace(answer, text=self.text(prompt, answer.tokens))

    def find_stop(self, prompt: int, tokens: list[int]) -> int | None:
        """Return the number of tokens up to a stop string, or None."""
        if self._show is not None and prompt == 0:
            whole = continuation(self._tokenizer, self._prompts[prompt], tokens)
            self._add(text_before_stop(whole, self._stop))
        if not self._has_stop(prompt, tokens):
            return None
        # The fewest tokens that contain it: longer texts contain it too.
        low, high = 0, len(tokens)
        while high - low > 1:
            middle = (low + high) // 2
            if self._has_stop(prompt, tokens[:middle]):
                high = middle
            else:
                low = middle
        return high

    def show_rest(self, text: str) -> None:
        """Show the rest of the first prompt's answer."""
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


def tokenizer_of(train: Train, *, command: str = "generate") -> Tokenizer:
    """Return the tokenizer of a model that writes; UserError, in the name of a command, where it
    does not, or knows none."""
    if not isinstance(train.data, TextSource):
        raise UserError(
            f"{command}: Train.data=@{type(train.data).__name__}() has no tokenizer; only models "
            "trained on text generate"
        )
    require_text_model(train.model, command=command)
    return train.data.open_tokenizer()


def published_folder(config: Config, workdir: AnyPath | None) -> AnyPath | None:
    """Return the folder with the config.json of the published model that a run started from, if it
    did."""
    start = config.train.start_from
    for one in (workdir, None if start is None else to_path(start)):
        if one is not None:
            for folder in (one / CARRIED_FOLDER, one):
                if (folder / MODEL_CONFIG).is_file():
                    return folder
    return None


def ends_of_run(config: Config, workdir: AnyPath | None) -> tuple[int, ...]:
    """Return the tokens that end an answer of a run's model.

    For a run that started from a published model they are those at which transformers stops, and
    the data's `end_of_text`; for another run, or if the model has none, the tokenizer's
    end-of-text token.
    """
    folder = published_folder(config, workdir)
    found: tuple[int, ...] = ()
    if folder is not None:
        # Imported here: most runs start from no published model.
        from jaxtrain.run.generation.published_defaults import end_tokens

        found = end_tokens(folder)
    data = config.train.data
    if not isinstance(data, TextSource) or getattr(data, "source", "") == "synthetic":
        return found
    if not found or getattr(text_of(data) or data, "end_of_text", None) is not None:
        end = data.open_tokenizer().end_of_text
        found += () if end is None or end in found else (end,)
    return found


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, special_tokens: bool = True) -> list[int]:
    """Return the tokens of a prompt, with the tokenizer's special tokens around it or without;
    UserError if it is not text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt {prompt!r} is not UTF-8 text (character {error.start}); give it in UTF-8"
        ) from error
    ids = tokenizer.encode(prompt)
    # Report an empty prompt, which special tokens would hide.
    return with_special_tokens(tokenizer, ids) if special_tokens and ids else ids


def printable(text: str) -> str:
    """Return the text with its control characters escaped, except newlines and tabs.

    A byte-level model may generate any: a terminal would interpret them.
    """
    return "".join(
        repr(one)[1:-1] if unicodedata.category(one) == "Cc" and one not in "\n\t" else one
        for one in text
    )


def show(piece: str) -> None:
    """Print a piece of an answer on the terminal at once."""
    sys.stdout.write(printable(piece))
    sys.stdout.flush()
