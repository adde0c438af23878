"""Data loader: order, rows of this host, prefetching, placement on devices."""

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.data.bad_records import BadRecords
from jaxtrain.data.batch import Batch
from jaxtrain.data.ordering.rows import HeldoutRows, Order, TrainingRows
from jaxtrain.data.source import Examples, WholeBatches

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
