"""The order of training is a permutation that looks like chance, and batches are drawn by it."""

import itertools
import tracemalloc
from collections import Counter

import jax
import numpy as np
import pytest
import scipy.stats

from jaxtrain.data.loader import SHUFFLE_STREAM, _mix, batches, shuffle, shuffle_nearby
from jaxtrain.data.text.packing import pack
from jaxtrain.data.text.source import TextData


def is_uniform(counts):
    """Pearson's chi-square: chance alone would be as uneven, and as even, more than rarely."""
    return 1e-3 < scipy.stats.chisquare(np.ravel(counts)).pvalue < 1 - 1e-3


def test_the_round_function_is_splitmix64():
    """Its first outputs from seed 1234567, as published (rosettacode.org)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = np.uint64(1234567) + np.uint64(0x9E3779B97F4A7C15) * np.arange(3, dtype=np.uint64)
    assert _mix(states).tolist() == published


@pytest.mark.parametrize("counts", [range(1, 70), (255, 256, 257, 4097), (65_537, 100_000)])
def test_each_epoch_holds_every_example_once_in_an_order_of_its_own(counts):
    for count in counts:
        orders = [shuffle(e * count + np.arange(count), count, 3) for e in range(3)]
        assert all(np.array_equal(np.sort(order), np.arange(count)) for order in orders)
        if count > 20:
            assert not np.array_equal(orders[0], orders[1])
            assert not np.array_equal(orders[1], orders[2])
    assert shuffle(np.arange(5), 9, 0).dtype == np.int64
    mixed = np.array([7, 3, 30_000, 3])
    found = shuffle(mixed, 1000, 2**32 - 1)
    assert found.tolist() == [shuffle(mixed[[i]], 1000, 2**32 - 1)[0] for i in range(4)]


def test_each_order_of_a_few_examples_comes_as_often():
    orders = [tuple(shuffle(np.arange(4), 4, seed)) for seed in range(4000)]
    epochs = shuffle(np.arange(4 * 4000), 4, 1).reshape(-1, 4)
    for found in (orders, map(tuple, epochs.tolist())):
        counts = Counter(found)
        assert len(counts) == 24
        assert is_uniform(list(counts.values()))


@pytest.mark.parametrize("count", [2**31, 2**32 + 2, 2**53 + 3])
def test_epochs_of_any_length_hold_no_example_twice(count):
    places = np.concatenate([np.arange(500), count + np.arange(500)])
    found = shuffle(places, count, 2**32 - 2)
    assert len(set(found[:500])) == len(set(found[500:])) == 500
    assert 0 <= found.min() <= found.max() < count


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_ten_thousand_million_windows_are_uniform_in_the_memory_of_one_batch(seed):
    """Neighbouring places: where they lead, where one leads from the other, and each epoch anew."""
    count = 10**10
    tracemalloc.start()
    try:
        places = 4 * 10**9 + np.arange(20_000)
        found = shuffle(places, count, seed)
        again = shuffle(places + count, count, seed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
    where, other = found * 40 // count, again * 40 // count
    for counts in (
        np.bincount(where, minlength=40),
        np.histogram2d(where[:-1] // 4, where[1:] // 4, bins=10)[0],
        np.bincount((np.diff(found) % count) * 40 // count, minlength=40),
        np.bincount(found % 64, minlength=64),
        np.histogram2d(where // 4, other // 4, bins=10)[0],
    ):
        assert is_uniform(counts)
    assert len(np.intersect1d(found, again)) <= 3  # of 20,000: 0.04 are expected


def row_by_row(examples, seed, first, count):
    """The places `first` to `first + count - 1` of the stream, row by row, in one batch."""
    mixed = int(np.random.SeedSequence((seed, SHUFFLE_STREAM)).generate_state(1)[0])
    order = shuffle(np.arange(first, first + count), len(examples), mixed)
    rows = [examples.example(index, None) for index in order.tolist()]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


@pytest.mark.parametrize("of", ["text", "synthetic"])
def test_a_batch_is_its_rows_one_under_the_other_in_order(of):
    if of == "text":
        rng = np.random.default_rng(0)
        texts = [rng.integers(1, 300, n).astype(np.uint16) for n in rng.integers(1, 40, 1000)]
        examples = pack(texts, 4, np.dtype(np.uint16))
    else:
        examples = TextData(source="synthetic", sequence_length=16).open(seed=4).train
    for start, count in ((0, 3), (510, 4)):
        stream = batches(examples, global_batch_size=8, seed=9, start=start)
        found = list(itertools.islice(stream, count))
        stream.close()
        for number, batch in enumerate(found, start):
            expected = row_by_row(examples, 9, 8 * number, 8)
            jax.tree.map(np.testing.assert_array_equal, batch, expected)
            assert jax.tree.map(lambda x: x.dtype, batch) == jax.tree.map(
                lambda x: x.dtype, expected
            )


@pytest.mark.parametrize("count", [1, 2, 5, 1000, 4097, 10**10])
def test_places_by_blocks_are_those_one_by_one(count):
    rng = np.random.default_rng(count)
    for begin in (0, 4090, 4096, 10**12 + 7):
        for size in (0, 1, 64, 9000):
            places = begin + np.arange(size)
            np.testing.assert_array_equal(
                shuffle_nearby(places, count, 3), shuffle(places, count, 3)
            )
        some = begin + rng.integers(0, 4000, 40)  # of one process, in any order
        np.testing.assert_array_equal(shuffle_nearby(some, count, 4), shuffle(some, count, 4))
