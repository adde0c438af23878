"""Batches: functions of seed and number alone, each epoch whole, each process its rows."""

import dataclasses
import socket
import subprocess
import sys
import threading
import time
from itertools import islice

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.data.bad_records import BadRecords
from jaxtrain.data.batch import Batch
from jaxtrain.data.loader import Prefetcher, batches, heldout_batches, process_rows, to_device


@dataclasses.dataclass(frozen=True)
class Numbered:
    """Example i is the number i, and the noise that augmentation would draw."""

    count: int

    def __len__(self):
        return self.count

    def example(self, index, rng):
        noise = 0.0 if rng is None else rng.random()
        return Batch(
            np.full(3, noise, np.float32), np.asarray(index, np.int32), np.ones((), np.float32)
        )


def take(stream, count):
    found = list(islice(stream, count))
    stream.close()
    return found


def numbers(found):
    return np.concatenate([batch.targets for batch in found]).tolist()


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_each_epoch_holds_every_example_once_in_a_new_order():
    # 10 examples in batches of 4: epochs end in the middle of batches.
    order = numbers(take(batches(Numbered(10), global_batch_size=4, seed=1), 10))
    epochs = [order[10 * e : 10 * (e + 1)] for e in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(10)) not in epochs


@dataclasses.dataclass(frozen=True)
class Together:
    """Example i is the number i, made many at a time; those in `bad` cannot be read."""

    count: int
    bad: tuple[int, ...] = ()

    def __len__(self):
        return self.count

    def example(self, index, rng):
        if index in self.bad:
            raise OSError("damaged")
        return Batch(np.full(3, index), np.asarray(index), np.ones((), np.float32))

    def examples(self, indices):
        found = [self.example(index, None) for index in indices.tolist()]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *found)


@pytest.mark.parametrize("bad", [(), (3, 4)])
def test_examples_made_together_are_those_made_one_by_one(bad):
    together, single = Together(10, bad), Numbered(10)
    reported = []
    bad_records = BadRecords(2, reported.append)
    found = take(batches(together, global_batch_size=4, seed=2, bad_records=bad_records), 8)
    expected = numbers(take(batches(single, global_batch_size=4, seed=2), 8))
    stand_in = {3: 5, 4: 5} if bad else {}
    assert numbers(found) == [stand_in.get(index, index) for index in expected]
    weights = np.concatenate([batch.loss_mask for batch in found])
    assert weights.tolist() == [0.0 if index in bad else 1.0 for index in expected]
    assert sorted(record.index for record in reported) == list(bad)

    found = take(heldout_batches(together, global_batch_size=4, bad_records=BadRecords(2)), 8)
    expected = take(heldout_batches(single, global_batch_size=4), 8)
    assert numbers(found) == [stand_in.get(index, index) for index in numbers(expected)]
    assert sum(batch.loss_mask.sum() for batch in found) == 10 - len(bad)


def test_the_seed_decides_order_and_augmentation():
    one, same, other = (
        take(batches(Numbered(50), global_batch_size=8, seed=seed), 7) for seed in (3, 3, 4)
    )
    assert_equal(one, same)
    assert numbers(one) != numbers(other)
    assert not np.isin([b.inputs[:, 0] for b in one], [b.inputs[:, 0] for b in other]).any()


def test_neighbouring_seeds_share_no_epoch():
    epochs = set()
    for seed in range(4):
        order = numbers(take(batches(Numbered(20), global_batch_size=20, seed=seed), 4))
        epochs |= {tuple(order[20 * e : 20 * (e + 1)]) for e in range(4)}
    assert len(epochs) == 16


def test_augmentation_differs_between_examples_and_epochs():
    found = take(batches(Numbered(6), global_batch_size=6, seed=0), 5)
    noise = np.concatenate([batch.inputs[:, 0] for batch in found])
    assert len(set(noise.tolist())) == 30
    plain = take(batches(Numbered(6), global_batch_size=6, seed=0, train=False), 5)
    assert numbers(plain) == numbers(found)
    assert not any(batch.inputs.any() for batch in plain)


@pytest.mark.parametrize("start", [1, 2, 3, 7, 12])
def test_starting_later_gives_the_same_batches(start):
    # 10 examples in batches of 4: batch 2 crosses the first epoch's end.
    whole = take(batches(Numbered(10), global_batch_size=4, seed=5), 16)
    later = take(batches(Numbered(10), global_batch_size=4, seed=5, start=start), 16 - start)
    assert_equal(later, whole[start:])


@pytest.mark.parametrize(("threads", "prefetch"), [(0, 0), (1, 1), (4, 2), (3, 16)])
def test_threads_and_prefetch_change_nothing(threads, prefetch):
    plain = take(batches(Numbered(10), global_batch_size=4, seed=5), 12)
    found = batches(Numbered(10), global_batch_size=4, seed=5, threads=threads, prefetch=prefetch)
    assert_equal(take(found, 12), plain)
    held = list(heldout_batches(Numbered(10), global_batch_size=4))
    same = heldout_batches(Numbered(10), global_batch_size=4, threads=threads, prefetch=prefetch)
    assert_equal(list(same), held)


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_hosts_together_make_the_same_batches(hosts):
    whole = take(batches(Numbered(13), global_batch_size=8, seed=2), 6)
    # Interleaved rows, so that no host's part is a plain half.
    of_host = [np.arange(8)[host::hosts] for host in range(hosts)]
    parts = [
        take(batches(Numbered(13), global_batch_size=8, seed=2, rows=rows), 6) for rows in of_host
    ]
    for k, batch in enumerate(whole):
        for rows, part in zip(of_host, parts, strict=True):
            jax.tree.map(
                lambda a, b, rows=rows: np.testing.assert_array_equal(a, b[rows]), part[k], batch
            )


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16])
def test_held_out_examples_count_once_each(count):
    found = list(heldout_batches(Numbered(count), global_batch_size=8))
    assert len(found) == -(-count // 8)
    assert all(batch.inputs.shape == (8, 3) for batch in found)
    mask = np.concatenate([batch.loss_mask for batch in found])
    counted = np.asarray(numbers(found))[mask == 1].tolist()
    assert sorted(counted) == list(range(count))
    assert count < 7 or counted != sorted(counted)  # shuffled: the first batches are a sample
    assert mask.sum() == count
    assert not any(batch.inputs.any() for batch in found)  # no augmentation


def test_held_out_rows_of_hosts_join_to_the_whole():
    whole = list(heldout_batches(Numbered(11), global_batch_size=8))
    rows = np.asarray([1, 2, 6])
    part = list(heldout_batches(Numbered(11), global_batch_size=8, rows=rows))
    assert_equal(part, [jax.tree.map(lambda leaf: leaf[rows], batch) for batch in whole])


def test_a_batch_of_the_smallest_data_repeats_it():
    assert numbers(take(batches(Numbered(1), global_batch_size=4, seed=0), 2)) == [0] * 8


# -- devices ---------------------------------------------------------------------------------------


def text_batch(rows, length=8):
    tokens = np.arange(rows * length, dtype=np.int32).reshape(rows, length)
    return Batch(tokens, tokens + 1, np.ones((rows, length), np.float32), tokens * 2, tokens * 3)


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P("data", "context"), P(("data", "context")), P(None, "context")]
)
def test_placed_batches_hold_the_same_values_under_any_sharding(spec):
    mesh = jax.make_mesh((4, 2), ("data", "context"))
    batch = text_batch(16)
    sharding = NamedSharding(mesh, spec)
    rows = process_rows(sharding, 16)
    with jax.transfer_guard("disallow"):
        placed = to_device(batch, sharding, 16, rows)
    for leaf, local in zip(*map(jax.tree.leaves, (placed, batch)), strict=True):
        assert leaf.sharding == sharding
        np.testing.assert_array_equal(np.asarray(leaf), local)


def test_image_batches_are_placed_with_their_missing_leaves():
    mesh = jax.make_mesh((8,), ("data",))
    batch = Batch(np.ones((8, 2, 2, 1), np.float32), np.arange(8), np.ones(8, np.float32))
    placed = to_device(batch, NamedSharding(mesh, P("data")), 8, np.arange(8))
    assert placed.segment_ids is None
    np.testing.assert_array_equal(np.asarray(placed.targets), np.arange(8))


def test_one_process_holds_every_row_once():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    for spec in (P(), P("data"), P("data", "tensor"), P(None, "data"), P(("tensor", "data"))):
        assert process_rows(NamedSharding(mesh, spec), 16).tolist() == list(range(16))


TWO_PROCESSES = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtrain.data.loader import batches, process_rows, to_device
from jaxtrain.data.text.source import TextData

port, process, spec = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
data = TextData(source="synthetic", sequence_length=8)
sharding = NamedSharding(mesh, spec)
rows = process_rows(sharding, 8)
train = data.open(seed=0).train
local = next(batches(train, global_batch_size=8, seed=0, rows=rows))
whole = next(batches(train, global_batch_size=8, seed=0))
placed = to_device(local, sharding, 8, rows)
for leaf, expected in zip(*map(jax.tree.leaves, (placed, whole))):
    assert leaf.shape == (8, 8) and leaf.sharding == sharding
    assert len(leaf.addressable_shards) == 2
    for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
print("ROWS", rows.tolist())
"""


@pytest.mark.slow_cases('P("fsdp", "data")-rows2', 'P(("data", "fsdp"))-rows0')
@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ('P(("data", "fsdp"))', ([0, 1, 2, 3], [4, 5, 6, 7])),
        ('P(("fsdp", "data"))', ([0, 1, 4, 5], [2, 3, 6, 7])),
        ('P("fsdp", "data")', (list(range(8)), list(range(8)))),
    ],
)
def test_two_processes_make_and_place_their_own_rows(spec, rows):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, port, str(number), spec],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for process, expected in zip(processes, rows, strict=True):
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            assert f"ROWS {expected}" in output
    finally:
        for process in processes:
            process.kill()


# -- the worker thread -----------------------------------------------------------------------------


def test_prefetching_keeps_order_and_ends():
    with Prefetcher(iter(range(50)), lambda n: 2 * n, depth=3) as ahead:
        assert list(ahead) == list(range(0, 100, 2))
        assert list(ahead) == []


def test_prefetching_is_bounded_and_on_another_thread():
    made, threads = [], set()

    def source():
        for number in range(100):
            made.append(number)
            threads.add(threading.current_thread())
            yield number

    with Prefetcher(source(), lambda n: n, depth=3) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 60
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # time in which an unbounded worker would run on
        assert len(made) == 4
    assert threads.isdisjoint({threading.current_thread()})
    assert len(threads) == 1


@pytest.mark.parametrize("where", ["source", "transform"])
def test_what_the_worker_raises_reaches_the_consumer(where):
    def source():
        yield 0
        yield 1
        if where == "source":
            raise ValueError("no third")
        yield 2

    def transform(number):
        if number == 2:
            raise ValueError("no third")
        return number

    ahead = Prefetcher(source(), transform, depth=4)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(ValueError, match="no third"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_stops_the_worker_and_closes_the_source():
    closed = []

    def source():
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    before = threading.active_count()
    ahead = Prefetcher(source(), lambda n: n, depth=2)
    assert next(ahead) == 1
    ahead.close()
    ahead.close()
    assert closed == [True]
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_training_stream_closes_with_its_threads():
    before = threading.active_count()
    stream = batches(Numbered(10), global_batch_size=4, seed=0, threads=3, prefetch=3)
    with Prefetcher(stream, lambda batch: batch, depth=2) as ahead:
        next(ahead)
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
