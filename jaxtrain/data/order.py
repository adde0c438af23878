"""The order of training: which example stands at which place of a run's endless shuffled stream."""

import numpy as np
from grain.experimental import index_shuffle

_ROUNDS = 4  # of the cipher, as in grain's own shuffle


def shuffled(places: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The examples at these places of epochs laid end to end, each epoch in an order of its own.

    What `grain.MapDataset.range(count).shuffle(seed=seed).repeat()` has there: grain's
    `index_shuffle` takes 6 us a place.

    Args:
      places: not negative, [n].
      count: examples in an epoch, at least 1.
      seed: of the first epoch; that of epoch e is seed + e modulo 2**32.

    Returns:
      int64 [n], each under `count`.
    """
    found = (
        index_shuffle(
            place % count,
            max_index=count - 1,
            seed=(seed + place // count) % 2**32,
            rounds=_ROUNDS,
        )
        for place in np.asarray(places, np.int64).tolist()
    )
    return np.fromiter(found, np.int64, len(places))
