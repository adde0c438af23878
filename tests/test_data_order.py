"""The order of training is grain's, place by place."""

import grain
import numpy as np
import pytest
from grain.experimental import index_shuffle

from jaxtrain.data.order import shuffled

# Around the widths of the cipher's block: 16 bits, odd numbers of bits, more than 32, more than
# float64 holds; powers of two and one more than they, where grain's block is too narrow by one bit.
COUNTS = [
    300, 4095, 4096, 39_062, 2**16 - 1, 2**16, 2**16 + 1, 2**16 + 2, 2**17 + 1, 2**18 + 1, 999_983,
    2**31, 2**32, 2**32 + 1, 2**32 + 2, 2**40 + 5, 2**53 + 3,
]  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
def test_places_far_apart_are_those_of_index_shuffle(count):
    rng = np.random.default_rng(count % 1000)
    ends = [0, 1, count - 2, count - 1, count, 2 * count - 1]
    places = np.array([*ends, *rng.integers(0, min(5 * count, 2**62), 60)])
    for seed in (0, 7, 2**32 - 2):
        expected = [
            index_shuffle(
                p % count, max_index=count - 1, seed=(seed + p // count) % 2**32, rounds=4
            )
            for p in places.tolist()
        ]
        assert shuffled(places, count, seed).tolist() == expected


@pytest.mark.parametrize("count", [1, 300, 5000])
def test_neighbouring_places_are_those_of_a_shuffled_and_repeated_range(count):
    theirs = grain.MapDataset.range(count).shuffle(seed=11).repeat()
    found = shuffled(np.arange(1000), count, 11)
    assert found.dtype == np.int64
    assert found.tolist() == [theirs[place] for place in range(1000)]
