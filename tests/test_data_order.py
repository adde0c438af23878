"""The order of training is grain's, place by place, and so are the batches drawn by it."""

import itertools

import grain
import jax
import numpy as np
import pytest
from grain.experimental import index_shuffle

from jaxtrain.data.order import FEWEST_TOGETHER, shuffled
from jaxtrain.data.packing import pack
from jaxtrain.data.pipeline import ORDER_CHUNK, SHUFFLE_STREAM, batches
from jaxtrain.data.text import TextData

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


def in_grain_s_order(examples, seed, first, count):
    """The places `first` to `first + count - 1` of the stream, row by row, in one batch."""
    mixed = int(np.random.SeedSequence((seed, SHUFFLE_STREAM)).generate_state(1)[0])
    order = grain.MapDataset.range(len(examples)).shuffle(seed=mixed).repeat()
    rows = [examples.example(order[place], None) for place in range(first, first + count)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


@pytest.mark.parametrize("of", ["text", "synthetic"])
def test_a_batch_is_its_rows_one_under_the_other_in_grain_s_order(of):
    if of == "text":
        rng = np.random.default_rng(0)
        texts = [rng.integers(1, 300, n).astype(np.uint16) for n in rng.integers(1, 40, 1000)]
        examples = pack(texts, 4, np.dtype(np.uint16))
        assert len(examples) >= FEWEST_TOGETHER
    else:
        examples = TextData(source="synthetic", sequence_length=16).open(seed=4).train
    # Up to the end of what is ordered together, past it, and from within it.
    for start, count in ((0, 3), (ORDER_CHUNK // 8 - 2, 4)):
        stream = batches(examples, global_batch_size=8, seed=9, start=start)
        found = list(itertools.islice(stream, count))
        stream.close()
        for number, batch in enumerate(found, start):
            expected = in_grain_s_order(examples, 9, 8 * number, 8)
            jax.tree.map(np.testing.assert_array_equal, batch, expected)
            assert jax.tree.map(lambda x: x.dtype, batch) == jax.tree.map(
                lambda x: x.dtype, expected
            )
