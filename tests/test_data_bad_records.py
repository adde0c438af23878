"""Examples that cannot be read have zero weight, everywhere the same ones, and are not many."""

import dataclasses
import threading
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step

from jaxtrain.config.errors import UserError
from jaxtrain.data.bad_records import UNREADABLE, BadRecordError, BadRecords, weightless
from jaxtrain.data.batch import Batch
from jaxtrain.data.loader import Prefetcher, batches, heldout_batches
from jaxtrain.models.convolutional.resnet import ResNet


@dataclasses.dataclass(frozen=True)
class Damaged:
    """Example i is the number i and some noise; those in `bad` cannot be read."""

    count: int
    bad: tuple[int, ...] = (7,)
    error: type[BaseException] = RuntimeError

    def __len__(self):
        return self.count

    def example(self, index, rng):
        if index in self.bad:
            raise self.error(f"hash of chunk {index} differs")
        noise = 0.0 if rng is None else rng.random()
        return Batch(
            np.full(2, noise, np.float32), np.asarray(index, np.int32), np.ones(1, np.float32)
        )


def take(examples, count, *, bad=None, **settings):
    settings = {"global_batch_size": 4, "seed": 1} | settings
    stream = batches(examples, bad_records=bad, **settings)
    found = list(islice(stream, count))
    stream.close()
    return found


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("threads", [0, 3])
def test_the_next_example_stands_in_without_weight_and_the_others_stay(threads):
    reported = []
    bad = BadRecords(2, reported.append)
    found = take(Damaged(10, (7, 8)), 10, bad=bad, threads=threads)
    whole = take(Damaged(10, ()), 10)
    replaced = 0
    for ours, theirs in zip(found, whole, strict=True):
        for row, number in enumerate(theirs.targets):
            if number in (7, 8):
                replaced += 1
                assert ours.targets[row] == 9
                assert not ours.loss_mask[row].any()
                assert not ours.inputs[row].any()  # not augmented
            else:
                jax.tree.map(
                    lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[row]),
                    ours,
                    theirs,
                )
    assert replaced == 8  # two in each of four epochs, counted once each
    assert sorted(record.index for record in reported) == [7, 8]
    assert {record.split for record in bad.found} == {"training"}
    assert len(bad.found) == 2
    assert str(reported[0]).endswith(f"cannot be read (hash of chunk {reported[0].index} differs)")


def test_after_the_last_example_comes_the_first():
    found = take(Damaged(4, (3,)), 3, bad=BadRecords(1))
    rows = [(b.targets[r], b.loss_mask[r, 0]) for b in found for r in range(4)]
    assert sorted(rows) == sorted([(0, 0.0), (0, 1.0), (1, 1.0), (2, 1.0)] * 3)


def test_hosts_and_resumes_put_the_same_in_its_place():
    examples = Damaged(13)
    whole = take(examples, 8, bad=BadRecords(1), global_batch_size=8)
    assert any(not batch.loss_mask.all() for batch in whole)
    for host in range(2):
        rows = np.arange(8)[host::2]
        part = take(examples, 8, bad=BadRecords(1), global_batch_size=8, rows=rows)
        assert_equal(part, [jax.tree.map(lambda x, rows=rows: x[rows], b) for b in whole])
    later = take(examples, 5, bad=BadRecords(1), global_batch_size=8, start=3)
    assert_equal(later, whole[3:])


def test_held_out_examples_are_replaced_too():
    bad = BadRecords(1)
    found = list(heldout_batches(Damaged(11), global_batch_size=4, bad_records=bad))
    counted = [
        int(batch.targets[row]) for batch in found for row in range(4) if batch.loss_mask[row, 0]
    ]
    assert sorted(counted) == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert str(bad.found[0]) == ("held-out example 7 cannot be read (hash of chunk 7 differs)")
    # The filling of the last batch may be the bad one.
    only = Damaged(2, (0,))
    for batch in heldout_batches(only, global_batch_size=4, bad_records=BadRecords(1)):
        assert batch.loss_mask.sum() == 1
    with pytest.raises(BadRecordError, match="held-out example 7"):
        list(heldout_batches(Damaged(11), global_batch_size=4))


def test_the_first_bad_example_stops_a_run_that_allows_none():
    stream = batches(Damaged(10), global_batch_size=1, seed=0)
    good = []
    ahead = Prefetcher(stream, lambda batch: good.append(batch) or batch, depth=2)
    with pytest.raises(BadRecordError) as stop:
        list(ahead)
    assert str(stop.value) == (
        "training example 7 cannot be read (hash of chunk 7 differs): it is one of 1 such "
        "examples, and Train.bad_records = 0 allows 0; repair the data, or set "
        "Train.bad_records = 1 or more to train without them"
    )
    assert isinstance(stop.value, UserError)
    # Everything before it came out, in order, and nothing is left running.
    whole = take(Damaged(10, ()), 10, global_batch_size=1, seed=0)
    place = [int(batch.targets[0]) for batch in whole].index(7)
    assert_equal(good, whole[:place])
    with pytest.raises(StopIteration):
        next(ahead)
    for thread in threading.enumerate():
        if thread.name.startswith(("prefetch", "grain")):
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_the_limit_holds_over_training_and_evaluation_together():
    bad = BadRecords(2)
    take(Damaged(6, (0, 1)), 6, bad=bad)
    with pytest.raises(BadRecordError, match="one of 3 such examples.*= 2 allows 2"):
        list(heldout_batches(Damaged(6, (0,)), global_batch_size=4, bad_records=bad))
    # Too many stay too many.
    with pytest.raises(BadRecordError, match="one of 3"):
        take(Damaged(6, (0, 1)), 6, bad=bad)


def test_data_without_any_good_example_is_refused():
    with pytest.raises(BadRecordError, match="none of the 3 training examples can be read"):
        take(Damaged(3, (0, 1, 2)), 1, bad=BadRecords(9))


@pytest.mark.parametrize("error", [*UNREADABLE, UnicodeError, KeyError, FileNotFoundError])
def test_what_damaged_records_raise_is_counted(error):
    bad = BadRecords(1)
    take(Damaged(10, error=error), 5, bad=bad, threads=0)
    assert [record.index for record in bad.found] == [7]


@pytest.mark.parametrize("error", [TypeError, AssertionError, MemoryError])
def test_a_programs_mistake_goes_through(error):
    with pytest.raises(error):
        take(Damaged(10, error=error), 5, bad=BadRecords(9), threads=0)


# Four programs; which records are left out is in the fast part.
@pytest.mark.slow
def test_a_stand_in_has_no_part_in_losses_but_in_a_batchs_statistics():
    """What `read_example` says of batch norms: the image counts there, its label nowhere."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(4, 8, 8, 1)).astype(np.float32)
    program = make_step(ResNet(depth=20, num_classes=4, channels=1, width=4), make_layout())
    state = program.create(seed=0)

    @jax.jit
    def gradients(batch):
        return program.setup.gradients(state, batch)

    def with_last(label, image):
        rows = [
            Batch(images[row], np.asarray(row, np.int32), np.ones((), np.float32))
            for row in range(3)
        ]
        rows.append(weightless(Batch(image, np.asarray(label, np.int32), np.ones((), np.float32))))
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    with program.setup.layout.active():
        one, label, image = (
            gradients(with_last(*last))
            for last in ((0, images[3]), (3, images[3]), (0, 2 * images[3]))
        )
    # Another label changes no bit of gradients, metrics and statistics.
    jax.tree.map(np.testing.assert_array_equal, one, label)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), one[2], image[2])
    assert any(jax.tree.leaves(changed))
