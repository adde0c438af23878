"""The order of training is grain's, place by place, and so are the batches drawn by it."""

import itertools

import grain
import jax
import numpy as np
import pytest

from jaxtrain.data.order import shuffled
from jaxtrain.data.pipeline import SHUFFLE_STREAM, batches
from jaxtrain.data.text.packing import pack
from jaxtrain.data.text.source import TextData


@pytest.mark.parametrize("count", [1, 300, 5000])
def test_neighbouring_places_are_those_of_a_shuffled_and_repeated_range(count):
    theirs = grain.MapDataset.range(count).shuffle(seed=11).repeat()
    found = shuffled(np.arange(1000), count, 11)
    assert found.dtype == np.int64
    assert found.tolist() == [theirs[place] for place in range(1000)]


@pytest.mark.parametrize("count", [2**31, 2**32 + 2, 2**53 + 3])
def test_epochs_of_any_length_hold_no_example_twice(count):
    places = np.concatenate([np.arange(500), count + np.arange(500)])
    found = shuffled(places, count, 2**32 - 2)
    assert len(set(found[:500])) == len(set(found[500:])) == 500
    assert 0 <= found.min() <= found.max() < count


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
    else:
        examples = TextData(source="synthetic", sequence_length=16).open(seed=4).train
    for start, count in ((0, 3), (510, 4)):
        stream = batches(examples, global_batch_size=8, seed=9, start=start)
        found = list(itertools.islice(stream, count))
        stream.close()
        for number, batch in enumerate(found, start):
            expected = in_grain_s_order(examples, 9, 8 * number, 8)
            jax.tree.map(np.testing.assert_array_equal, batch, expected)
            assert jax.tree.map(lambda x: x.dtype, batch) == jax.tree.map(
                lambda x: x.dtype, expected
            )
