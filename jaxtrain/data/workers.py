"""Data loader worker processes that write rows into shared memory.

Decoding images holds Python's interpreter for much of its time, so that threads do not add up. Each
process makes some rows of a batch at a time; what stands in them depends on the seed, the batch and
the row alone, so that batches are the same with any number of processes.
"""

import contextlib
import dataclasses
import mmap
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

import jax
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.bad_records import BadRecord, BadRecords
from jaxtrain.data.batch import Batch
from jaxtrain.data.loader import HeldoutRows, TrainingRows

_ROWS = 16  # of a job; even, so that rows that are mixed in pairs are made together
_ALIGNED = 64  # bytes

Rows = TrainingRows | HeldoutRows


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory for some batches, mapped by every process: an anonymous file in memory.

    Attributes:
      process, file: the process that opened it, and its number there.
      slots: batches that it has room for.
      rows: of a batch.
      leaves: what one row of a batch is made of.
    """

    process: int
    file: int
    slots: int
    rows: int
    leaves: Batch

    def map_memory(self) -> mmap.mmap:
        """Map the memory; in another process through the creator's /proc entry."""
        own = os.getpid() == self.process
        file = self.file if own else os.open(f"/proc/{self.process}/fd/{self.file}", os.O_RDWR)
        try:
            return mmap.mmap(file, self.slots * self.slot_bytes)
        finally:
            if not own:
                os.close(file)

    @property
    def slot_bytes(self) -> int:
        """Size of a batch's slot in bytes."""
        return sum(self._sizes())

    def slot(self, mapped: mmap.mmap, number: int) -> Batch:
        """Return the batch in a slot."""
        leaves, structure = jax.tree.flatten(self.leaves)
        found, begin = [], number * self.slot_bytes
        for leaf, size in zip(leaves, self._sizes(), strict=True):
            shape = self.rows, *leaf.shape
            found.append(np.ndarray(shape, leaf.dtype, mapped, begin))
            begin += size
        return jax.tree.unflatten(structure, found)

    def _sizes(self) -> list[int]:
        whole = (leaf.nbytes * self.rows for leaf in jax.tree.leaves(self.leaves))
        return [-(-size // _ALIGNED) * _ALIGNED for size in whole]


def batches_of_processes(
    of: Rows, numbers: range, rows: np.ndarray, bad: BadRecords, *, workers: int, ahead: int
) -> Iterator[Batch]:
    """Yield the batches of these numbers in order, made by worker processes with `of.read`.

    Args:
      of: makes rows; is sent to each process once.
      numbers: the batches.
      rows: which rows of each.
      bad: counts the examples that cannot be read.
      workers: processes.
      ahead: batches that are made or ready while one is in use.

    Raises:
      UserError: this system has no such memory, or a process ended.
      BadRecordError: as `of.read`.
    """
    if sys.platform != "linux":
        raise UserError(
            f"ImageData.workers = {workers}: processes share memory as Linux does, and this is "
            f"{sys.platform}; use 0"
        )
    leaves = jax.tree.map(lambda leaf: leaf[0], of.read(0, rows=rows[:1], bad=_no_limit()))
    file = os.memfd_create("jaxtrain-batches")
    memory = _Memory(os.getpid(), file, ahead + 1, len(rows), leaves)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, file)
        os.ftruncate(file, memory.slots * memory.slot_bytes)
        mapped = memory.map_memory()
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (of, rows, memory))
        stack.callback(pool.shutdown, cancel_futures=True)
        parts = [range(at, min(at + _ROWS, len(rows))) for at in range(0, len(rows), _ROWS)]
        free, waiting = deque(range(memory.slots)), deque[tuple[int, list[Future]]]()
        remaining = iter(numbers)
        try:
            while True:
                while free and (number := next(remaining, None)) is not None:
                    slot = free.popleft()
                    jobs = [pool.submit(_make, number, part, slot) for part in parts]
                    waiting.append((slot, jobs))
                if not waiting:
                    return
                slot, jobs = waiting.popleft()
                for job in jobs:
                    for record in job.result():
                        bad.add(record, UserError(record.cause))
                # A copy: on a CPU a device's array may be the memory that it was given.
                batch = jax.tree.map(np.copy, memory.slot(mapped, slot))
                free.append(slot)
                yield batch
        except BrokenProcessPool as error:
            raise UserError(
                f"ImageData.workers = {workers}: one of these processes ended, perhaps for lack of "
                "memory: use fewer; a script of your own begins its work under "
                'if __name__ == "__main__"'
            ) from error


def _no_limit() -> BadRecords:
    return BadRecords(sys.maxsize)


# -- a worker's side -------------------------------------------------------------------------------

_of: Rows
_rows: np.ndarray
_memory: _Memory
_mapped: mmap.mmap


def _begin(of: Rows, rows: np.ndarray, memory: _Memory) -> None:
    global _of, _rows, _memory, _mapped
    # What asks a run to stop reaches its whole group of processes: batches are wanted until it has.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _of, _rows, _memory, _mapped = of, rows, memory, memory.map_memory()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker"
    parent.join()
    os._exit(1)  # killed, it closed nothing that this process waits for


def _make(number: int, part: range, slot: int) -> list[BadRecord]:
    """Make some rows of a batch in their slot; return the bad records."""
    bad = _no_limit()
    made = _of.read(number, rows=_rows[part.start : part.stop], bad=bad)
    room = _memory.slot(_mapped, slot)
    for into, leaf in zip(jax.tree.leaves(room), jax.tree.leaves(made), strict=True):
        into[part.start : part.stop] = leaf
    return bad.found
