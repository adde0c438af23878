"""Data loader: shuffled order, rows of this host, prefetching, placement on devices.

Rows can be made in any process and any thread, some or all of them at once: a row's content
depends on the seed, the batch and the row alone.

The order is a permutation of the examples, computed one index at a time. A position is encrypted to
an example's index: eight rounds of a Feistel network over the least power of two not below their
number, repeated while the result is out of range (Black and Rogaway 2002, Ciphers with arbitrary
finite domains). Only the requested positions are computed, however many examples there are. The
round function is splitmix64's finalizer (Steele, Lea and Flood 2014).

grain's `index_shuffle` is such a cipher too; with the four rounds of grain's own shuffle, neighbors
map to neighbors (of the 100 pairs of tenths of 10**10 examples some occur 4 times too often), it
takes 6 us per position, 2 ms in small sets, and is no permutation of 2**k + 1 examples.
"""

import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.data.bad_records import UNREADABLE, BadRecords, read_example
from jaxtrain.data.batch import Batch, stack
from jaxtrain.data.source import Examples, MixedRows, WholeBatches

# Streams derived from one seed; 2 is that of `mixing`.
SHUFFLE_STREAM, AUGMENT_STREAM, PAIR_STREAM = 0, 1, 3
HELDOUT_ORDER = 0  # fixed: a run's seed must not change its evaluation data


class Order(Protocol):
    """Assignment of examples to the rows of batches."""

    def indices(
        self, batch: int, rows: np.ndarray, *, global_batch_size: int, seed: int
    ) -> np.ndarray:
        """Return the examples at some rows of a batch, int64 [n]."""
        ...


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """Rows of an endless stream of batches, reshuffled each epoch.

    Attributes:
      examples: what to draw from.
      global_batch_size: rows of a batch over all processes.
      seed: of the order and of augmentation.
      augment: whether training examples are augmented.
      order: in which examples are drawn; None: each once per epoch, reshuffled.
    """

    examples: Examples
    global_batch_size: int
    seed: int
    augment: bool
    order: Order | None

    def read(self, number: int, *, rows: np.ndarray, bad: BadRecords) -> Batch:
        """Read these rows of batch `number` in order; rows past the last have zero weight."""
        size = self.global_batch_size
        made = self._within(number, np.minimum(rows, size - 1), bad)
        return made if rows.max() < size else without_weight(made, rows >= size)

    def _within(self, number: int, rows: np.ndarray, bad: BadRecords) -> Batch:
        examples = self.examples
        if not (self.augment and isinstance(examples, MixedRows)):
            return self._rows_without_mixing(number, rows, bad)
        # Rows are mixed in pairs of neighbors, which are on one machine except for odd shares: a
        # row that is needed only for its neighbor is read and dropped.
        others = np.minimum(rows ^ 1, self.global_batch_size - 1)
        needed, inverse = np.unique(np.concatenate([rows, others]), return_inverse=True)
        plain = self._rows_without_mixing(number, needed, bad)
        mixed = [
            examples.mix(_row(plain, own), _row(plain, other), self._rng(PAIR_STREAM, number, r))
            for own, other, r in zip(
                inverse[: len(rows)], inverse[len(rows) :], rows.tolist(), strict=True
            )
        ]
        return stack(mixed)

    def _rows_without_mixing(self, number: int, rows: np.ndarray, bad: BadRecords) -> Batch:
        size = self.global_batch_size
        if self.order is None:
            positions = number * size + rows
            indices = shuffle_nearby(positions, len(self.examples), self._shuffle_seed)
        else:
            indices = self.order.indices(number, rows, global_batch_size=size, seed=self.seed)

        def rng(position: int) -> np.random.Generator | None:
            return self._rng(AUGMENT_STREAM, number, int(rows[position])) if self.augment else None

        return _read_rows(self.examples, indices, rng, "training", bad)

    def _rng(self, stream: int, number: int, row: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream, number * self.global_batch_size + row))

    @functools.cached_property
    def _shuffle_seed(self) -> int:
        return int(np.random.SeedSequence((self.seed, SHUFFLE_STREAM)).generate_state(1)[0])


@dataclasses.dataclass(frozen=True)
class HeldoutRows:
    """Rows of batches with every example once, always in the same order.

    Attributes:
      examples: the examples.
      global_batch_size: rows of a batch over all processes.
    """

    examples: Examples
    global_batch_size: int

    def read(self, number: int, *, rows: np.ndarray, bad: BadRecords) -> Batch:
        """Read these rows of batch `number`; rows past the last example have zero weight."""
        positions, count = number * self.global_batch_size + rows, len(self.examples)
        indices = self._order[np.minimum(positions, count - 1)]
        made = _read_rows(self.examples, indices, lambda row: None, "held-out", bad)
        return without_weight(made, positions >= count)

    @functools.cached_property
    def _order(self) -> np.ndarray:
        return np.random.default_rng(HELDOUT_ORDER).permutation(len(self.examples))


def without_weight(batch: Batch, which: np.ndarray) -> Batch:
    """Return the batch with zero weight in the rows `which`, bool [B]: no targets, no documents."""
    without = {
        name: leaf * (~which).reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)
        for name in ("loss_mask", "segment_ids", "source_segment_ids")
        if (leaf := getattr(batch, name)) is not None
    }
    return dataclasses.replace(batch, **without)


def _row(batch: Batch, index: int) -> Batch:
    return jax.tree.map(lambda leaf: leaf[index], batch)


def _read_rows(
    examples: Examples,
    indices: np.ndarray,
    rng: Callable[[int], np.random.Generator | None],
    split: str,
    bad: BadRecords,
) -> Batch:
    """Return the examples `indices`, stacked; `rng` gives each row's augmentation."""
    if isinstance(examples, WholeBatches):
        # If one cannot be read, all are read one by one to find it.
        with contextlib.suppress(*UNREADABLE):
            return examples.examples(indices)
    made = [
        read_example(examples, index, rng(row), split, bad)
        for row, index in enumerate(indices.tolist())
    ]
    return stack(made)


# -- batches, ahead of time and on devices ---------------------------------------------------------

T = TypeVar("T")


def batches(
    examples: Examples,
    *,
    global_batch_size: int,
    seed: int,
    start: int = 0,
    rows: np.ndarray | None = None,
    train: bool = True,
    threads: int | None = None,
    prefetch: int = 4,
    bad_records: BadRecords | None = None,
    order: Order | None = None,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield batches indefinitely, in a new order each epoch; batch k depends only on `seed` and k.

    Position p of the stream, p = k * global_batch_size + row, is element p of the concatenated
    epochs, so a batch may contain the end of one epoch and the beginning of the next.

    Args:
      examples: the examples, at least one.
      global_batch_size: rows of the batch over all processes.
      seed: nonnegative; seeds the order and the augmentation.
      start: the batch to begin with: batch `start` of the stream, not a new stream.
      rows: the rows of the global batch to make, in this order; None makes all of them.
      train: augment; False gives the same examples without augmentation.
      threads: batches made concurrently; 0 makes each when it is requested; None is 0 for
        WholeBatches, of which a `Prefetcher`'s one thread makes more than two that contend for the
        interpreter lock (benchmarks/loader.py), and 2 for others.
      prefetch: batches kept ready.
      bad_records: counts the examples that cannot be read, each replaced as in `read_example`;
        None allows none.
      order: another order of the examples.
      workers: processes that make them, instead of threads; 0: none.

    Returns:
      numpy batches with len(rows) rows. Close the iterator to stop its threads. Its `next` raises
      BadRecordError if more examples are unreadable than allowed.
    """
    assert len(examples) > 0, "no examples"
    wanted = np.arange(global_batch_size) if rows is None else np.asarray(rows)
    bad = BadRecords() if bad_records is None else bad_records
    of = TrainingRows(examples, global_batch_size, seed, augment=train, order=order)
    end = np.iinfo(np.int64).max // max(1, global_batch_size)
    numbers = range(start, end)
    if workers:
        # Imported here: most runs make batches in threads.
        from jaxtrain.data.workers import batches_of_processes

        return batches_of_processes(of, numbers, wanted, bad, workers=workers, ahead=prefetch)
    make = functools.partial(of.read, rows=wanted, bad=bad)
    return _read(numbers, make, _threads(examples, threads), prefetch)


def heldout_batches(
    examples: Examples,
    *,
    global_batch_size: int,
    rows: np.ndarray | None = None,
    threads: int | None = None,
    prefetch: int = 4,
    bad_records: BadRecords | None = None,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield each held-out example once, without augmentation, always in the same order.

    The order is shuffled, so that the first few batches, if only those are used, are a sample of
    all and not the first documents or classes. The last batch is filled up with repetitions of an
    example whose loss_mask is 0. Examples that cannot be read are replaced as in `batches`.
    """
    wanted = np.arange(global_batch_size) if rows is None else np.asarray(rows)
    bad = BadRecords() if bad_records is None else bad_records
    of = HeldoutRows(examples, global_batch_size)
    numbers = range(-(-len(examples) // global_batch_size))
    if workers:
        from jaxtrain.data.workers import batches_of_processes

        return batches_of_processes(of, numbers, wanted, bad, workers=workers, ahead=prefetch)
    make = functools.partial(of.read, rows=wanted, bad=bad)
    return _read(numbers, make, _threads(examples, threads), prefetch)


def _threads(examples: Examples, threads: int | None) -> int:
    if threads is not None:
        return threads
    return 0 if isinstance(examples, WholeBatches) else 2


def _read(
    numbers: range, make: Callable[[int], Batch], threads: int, prefetch: int
) -> Iterator[Batch]:
    """Yield the batches of these numbers, in order."""
    if not threads:
        yield from map(make, numbers)
        return
    # Imported here: it imports Orbax, and text needs neither.
    import grain

    dataset = grain.MapDataset.range(numbers.start, numbers.stop).map(lambda k: make(int(k)))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    iterator = iter(dataset.to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()


def process_rows(sharding: NamedSharding, global_batch_size: int) -> np.ndarray:
    """Return the sorted, distinct rows of the global batch on this process's devices; read-only.

    `sharding` is that of a batch's leaf; its first dimension is the batch.
    """
    first = sharding.spec[0] if len(sharding.spec) else None
    of_rows = NamedSharding(sharding.mesh, PartitionSpec(first))
    held = of_rows.addressable_devices_indices_map((global_batch_size,))
    ranges = {index[0].indices(global_batch_size) for index in held.values() if index is not None}
    rows = np.unique(np.concatenate([np.arange(*bounds) for bounds in ranges]))
    rows.setflags(write=False)
    return rows


def to_device(
    batch: Batch, sharding: NamedSharding, global_batch_size: int, rows: np.ndarray
) -> Batch:
    """Return global arrays from the rows of this process.

    Args:
      batch: numpy leaves [len(rows), ...].
      sharding: of every leaf.
      global_batch_size: rows of the global arrays.
      rows: those of the batch, from `process_rows`.
    """

    def to_global(local: np.ndarray) -> jax.Array:
        assert len(rows) == len(local), f"{len(local)} rows made, {len(rows)} held"

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "asked for a device of another process"
            begin, end, _ = index[0].indices(global_batch_size)
            # A device's rows are contiguous, and all of them are among this process's.
            first = int(np.searchsorted(rows, begin))
            return local[(slice(first, first + end - begin), *index[1:])]

        shape = (global_batch_size, *local.shape[1:])
        # Twice as fast as jax.device_put, which inspects every array in Python first.
        return jax.make_array_from_callback(shape, sharding, shard)

    # This transfer is intended: a loop that forbids transfers forbids all others.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(to_global, batch)


class Prefetcher(Generic[T]):
    """Prefetcher: runs an iterator on a worker thread, at most `depth` items ahead.

    Errors of the source or `transform` are raised by the consumer's `next`, after the items made
    before it. Use it as a context manager, or call `close`: it stops the worker and closes the
    source.

    Args:
      source: yields batches; only the worker thread touches it.
      transform: applied to each of them by the worker, such as `to_device`.
      depth: items made ahead, at least 1.
    """

    def __init__(
        self, source: Iterator[Batch], transform: Callable[[Batch], T], *, depth: int = 2
    ) -> None:
        assert depth >= 1, f"depth {depth}"
        self._source = source
        self._transform = transform
        # Requests, one per item, None to stop; results: an item, an exception,
        # or the end. Two queues in C: a future per item costs the training thread more.
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        self._closed = False
        for _ in range(depth):
            self._orders.put(True)
        self._worker = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._worker.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise StopIteration
        made = self._made.get()
        if isinstance(made, tuple):
            self._orders.put(True)
            return made[0]
        self.close()
        if made is None:
            raise StopIteration
        raise made

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker and wait for it; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._orders.put(False)
        self._worker.join()
        # After the worker has stopped: a running generator cannot be closed.
        close_source = getattr(self._source, "close", None)
        if close_source is not None:
            close_source()

    def _work(self) -> None:
        try:
            while self._orders.get() and not self._closed:
                for batch in self._source:
                    self._made.put((self._transform(batch),))
                    break
                else:
                    self._made.put(None)
                    return
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            self._made.put(error)


# -- the order -------------------------------------------------------------------------------------

VERSION = "feistel 8"  # saved with a checkpoint: a run cannot resume with another order
_ROUNDS = 8
_BLOCK = 4096  # positions encrypted together: NumPy's calls cost the same for 64 of them
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shuffle_nearby(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the same as `shuffle`, faster for nearby positions that advance from call to call.

    The latest few blocks of positions that contain them are cached.
    """
    if not len(positions):
        return np.empty(0, np.int64)
    first, last = int(np.min(positions)) // _BLOCK, int(np.max(positions)) // _BLOCK
    if last > first + 1:
        return shuffle(positions, count, seed)
    blocks = [_block(number, count, seed) for number in range(first, last + 1)]
    return np.concatenate(blocks)[positions - first * _BLOCK]


@functools.lru_cache(maxsize=64)
def _block(number: int, count: int, seed: int) -> np.ndarray:
    return shuffle(np.arange(number * _BLOCK, (number + 1) * _BLOCK), count, seed)


def shuffle(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the examples at these positions of concatenated epochs, each epoch in its own order.

    Args:
      positions: nonnegative, [n].
      count: examples in an epoch, at least 1.
      seed: of the run, under 2**64.

    Returns:
      int64 [n], each under `count`.
    """
    epochs, within = np.divmod(np.asarray(positions, np.int64), count)
    keys = _mix(_mix(np.full(len(within), seed, np.uint64)) + epochs.astype(np.uint64))
    bits = max(2, (count - 1).bit_length())
    found = _encipher(within.astype(np.uint64), keys, bits)
    while (past := np.flatnonzero(found >= count)).size:
        found[past] = _encipher(found[past], keys[past], bits)
    return found.astype(np.int64)


def _encipher(numbers: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Permute the integers below 2**bits by key; uint64 [n]."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64((1 << size) - 1) for size in (bits // 2, bits - bits // 2))
    high, low = numbers >> low_bits, numbers & low_mask
    for number in range(_ROUNDS):
        key = _mix(keys + np.uint64(number))
        if number % 2:
            low = low ^ (_mix(high ^ key) & low_mask)
        else:
            high = high ^ (_mix(low ^ key) & high_mask)
    return high << low_bits | low


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Mix 64-bit integers so that every bit depends on all others (splitmix64)."""
    numbers = numbers + _GOLDEN  # arrays of uint64 wrap around, as intended
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
