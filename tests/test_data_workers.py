"""Worker processes: the batches of threads, bad records counted, and none left behind."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from itertools import islice

import jax
import numpy as np
import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.data.bad_records import BadRecordError, BadRecords
from jaxtrain.data.batch import Batch
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.images.transform import Augment
from jaxtrain.data.loader import batches, heldout_batches


@dataclasses.dataclass(frozen=True)
class Made:
    """Example i is the number i and the process that made it; 3 and 4 cannot be read."""

    count: int = 40

    def __len__(self):
        return self.count

    def example(self, index, rng):
        if index in (3, 4):
            raise OSError("damaged")
        return Batch(
            np.float32([index, os.getpid()]), np.asarray(index, np.int32), np.ones((), np.float32)
        )


def take(stream, count):
    found = list(islice(stream, count))
    stream.close()
    return found


def test_batches_are_those_of_threads_whatever_the_number_of_processes():
    opened = ImageData(
        source="synthetic", image_size=8, channels=3, flip=True,
        augment=Augment(mixup=0.4, brightness=0.3),
    ).open(seed=2)  # fmt: skip
    # 37 rows, of which odd ones have no neighbour here: three jobs of a batch.
    rows = np.array([*range(3, 39), 41])
    settings = {"global_batch_size": 43, "rows": rows}
    expected = take(batches(opened.train, seed=1, start=5, **settings), 6)
    held = take(heldout_batches(opened.heldout, **settings), 6)
    found = take(batches(opened.train, seed=1, start=5, workers=3, **settings), 6)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    found = list(heldout_batches(opened.heldout, workers=1, **settings))
    jax.tree.map(np.testing.assert_array_equal, found, held)


# Starts Python; batches of processes are those of threads in the fast part.
@pytest.mark.slow
def test_processes_make_all_rows_and_count_those_that_cannot_be_read():
    bad = BadRecords(2)
    found = take(batches(Made(), global_batch_size=40, seed=0, bad_records=bad, workers=2), 2)
    made_by = {int(one) for batch in found for one in batch.inputs[:, 1]}
    assert os.getpid() not in made_by
    assert [int((batch.loss_mask == 0).sum()) for batch in found] == [2, 2]
    assert sorted(record.index for record in bad.found) == [3, 4]
    assert bad.found[0].cause == "damaged"
    assert not [one for one in made_by if alive(one)]  # the stream is closed
    stream = batches(Made(), global_batch_size=40, seed=0, bad_records=BadRecords(1), workers=1)
    with pytest.raises(BadRecordError, match="Train.bad_records = 1 allows 1"):
        list(islice(stream, 2))


def alive(process):
    """Whether a process runs; one that ended and that nobody asked for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_asks_a_run_to_stop_leaves_workers_and_a_killed_one_is_told_of():
    stream = batches(
        Made(), global_batch_size=40, seed=0, bad_records=BadRecords(2), workers=1, prefetch=1
    )
    worker = int(next(stream).inputs[0, 1])
    for one in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker, one)
    assert {int(one) for one in next(stream).inputs[:, 1]} == {worker}
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(UserError, match=r"ImageData.workers = 1: one of these processes ended"):
        list(islice(stream, 5))


ORPHANS = """
from jaxtrain.data.bad_records import BadRecords
from jaxtrain.data.loader import batches
from test_data_workers import Made
import os, signal
if __name__ == "__main__":
    stream = batches(Made(), global_batch_size=40, seed=0, bad_records=BadRecords(2), workers=1)
    print(int(next(stream).inputs[0, 1]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    for _ in range(300):
        if not alive(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its parent by 30 s")


def test_other_systems_are_told_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="as Linux does, and this is darwin; use 0"):
        next(batches(Made(), global_batch_size=4, seed=0, workers=1))


def test_the_number_of_workers_is_not_part_of_the_data():
    none, some = (ImageData(source="synthetic", workers=n).open(seed=0) for n in (0, 4))
    assert none.digest == some.digest
    assert some.workers == 4
    with pytest.raises(UserError, match="ImageData.workers = -1: use at least 0"):
        ImageData(workers=-1)
