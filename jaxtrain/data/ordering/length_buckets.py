"""Length bucketing: order of training in which each batch has rows of one length."""

import dataclasses
import functools

import numpy as np

from jaxtrain.data.ordering.mixture_sampler import STREAM, Mixing, Source
from jaxtrain.data.ordering.shuffle import shuffle_nearby


@dataclasses.dataclass(frozen=True)
class ByLength:
    """The order of batches of one length each: implements `rows.Order`.

    Which length batch k has is drawn as sources of a mixture are, in shares of their rows: so each
    row comes round as often as any other, to within a batch of each length.

    Attributes:
      rows: of each length.
    """

    rows: tuple[int, ...]

    def indices(
        self, batch: int, rows: np.ndarray, *, global_batch_size: int, seed: int
    ) -> np.ndarray:
        """The examples at some rows of a batch, int64 [n]; each length has epochs of its own."""
        number, before = self._mixing.whose(batch, seed=seed)
        own_seed = int(np.random.SeedSequence((seed, STREAM, number)).generate_state(1)[0])
        ranks = before * global_batch_size + rows
        return sum(self.rows[:number]) + shuffle_nearby(ranks, self.rows[number], own_seed)

    @functools.cached_property
    def _mixing(self) -> Mixing:
        sources = tuple(Source(str(place), rows, 0, 0) for place, rows in enumerate(self.rows))
        shares = tuple(rows / sum(self.rows) for rows in self.rows)
        return Mixing(sources, ((0, shares),), (False,) * len(sources))
