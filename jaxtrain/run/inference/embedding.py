"""Sentence embeddings: one vector per text."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch, stack
from jaxtrain.data.source import existing_path
from jaxtrain.data.text.source import text_of
from jaxtrain.data.tokenization.tokenizer import Tokenizer, open_tokenizer
from jaxtrain.models.model import TokenModel
from jaxtrain.run.inference.texts import AT_ONCE, row_of, texts_of


@dataclasses.dataclass(frozen=True, eq=False)
class Embedding:
    """The vector of one text.

    Attributes:
      name: the text itself, or the file that holds it.
      vector: float32 [D].
    """

    name: str
    vector: np.ndarray

    def __str__(self) -> str:
        # As few digits as tell the float32 numbers apart.
        numbers = [float(str(number)) for number in self.vector]
        return json.dumps({"input": self.name, "embedding": numbers}, ensure_ascii=False)


def embed(
    given: Sequence[Any],
    model: TokenModel,
    data: object,
    vectors: Callable[[Batch], np.ndarray],
    *,
    say: Callable[[str], object],
) -> Iterator[Embedding]:
    """The embedding of each text, which neither padding nor the other texts change.

    Args:
      given: texts, or .txt files with one in each.
      model: the model's settings.
      data: of the run: its tokenizer, and the tokens of the longest text.
      vectors: those of a batch of texts, [B, D].
      say: called with the number of texts that were cut.

    Raises:
      UserError: a text is empty, or the run's data have no tokenizer.
    """
    text = text_of(data)
    if text is None:
        raise UserError(
            f"predict: {type(model).__name__} makes embeddings of texts, for which Train.data=@"
            f"{type(data).__name__}() names no tokenizer; use @TextData()"
        )
    path = None
    if text.tokenizer != "byte":
        path = existing_path("TextData.tokenizer", text.tokenizer, words=("byte",))
    tokenizer = open_tokenizer(text.tokenizer, end_of_text=text.end_of_text, path=path)
    _validate_tokenizer(tokenizer, model)
    at_most = min(text.sequence_length, model.context_length)
    encoded = [tokenizer.encode_whole(one, at_most) for one in texts_of(given, model)]
    cut = sum(was_cut for _, was_cut in encoded)
    if cut:
        say(
            f"{cut} of {len(encoded)} texts are longer than {at_most} tokens "
            "(TextData.sequence_length): the rest of them is left out"
        )
    length = max((len(ids) for ids, _ in encoded), default=0)
    rows = [row_of(ids, length) for ids, _ in encoded]
    for begin in range(0, len(rows), AT_ONCE):
        part = rows[begin : begin + AT_ONCE]
        # The last ones are filled up: one program serves all.
        missing = 0 if begin == 0 else AT_ONCE - len(part)
        found = vectors(stack([*part, *[part[-1]] * missing]))
        for name, vector in zip(given[begin:], found[: len(part)], strict=False):
            yield Embedding(str(name), vector)


def _validate_tokenizer(tokenizer: Tokenizer, model: TokenModel) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        name = type(model).__name__
        raise UserError(
            f"predict: TextData.tokenizer has {tokenizer.vocab_size} tokens, more than "
            f"{name}.vocab_size={model.vocab_size}; use the one that the model was trained with"
        )
