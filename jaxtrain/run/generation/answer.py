"""`Answer`: a completion and its finish reason."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

Ended = Literal["end", "stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What follows one prompt.

    Attributes:
      tokens: those that were drawn, without the one that ends a text.
      log_probabilities: the model's of each token, natural, before temperature or anything else.
      ended: by a token that ends texts, by a stop string, or by its greatest length.
      text: the tokens as text, up to a stop string; None where tokens were asked for.
      score: what beam search has chosen it by; None where there was none.
    """

    tokens: list[int]
    log_probabilities: list[float]
    ended: Ended
    text: str | None = None
    score: float | None = None


def length_before_end(tokens: Sequence[int] | np.ndarray, ends: Sequence[int]) -> int:
    """How many tokens there are before one that ends a text."""
    places = np.flatnonzero(np.isin(tokens, ends))
    return int(places[0]) if places.size else len(tokens)
