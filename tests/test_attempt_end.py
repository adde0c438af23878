"""An attempt that ends for two reasons at once ends, whichever thread comes first."""

import threading

import pytest

from jaxtrain.run.attempts.attempt import Attempt
from jaxtrain.run.attempts.begin import _End
from jaxtrain.run.attempts.folder import RunFolder
from jaxtrain.run.attempts.lock import RunLock
from jaxtrain.run.cluster.cluster import OneProcess
from jaxtrain.run.phases import Activity


@pytest.fixture
def end(tmp_path):
    lock = RunLock.acquire(tmp_path)
    peers, folder = OneProcess(), RunFolder(tmp_path)
    yield _End(folder, lock, peers, Attempt(peers, number=lock.attempt, folder=folder))
    folder.close()
    lock.release()


ACTIVITY = Activity("step", 1, 10.0, 1)


@pytest.mark.parametrize(
    "reason",
    [
        lambda end: end.report_failed(1, "node2", "the same error"),
        lambda end: end.report_lost(1, "node2", "closed its connection", {}),
        lambda end: end.report_stalled(ACTIVITY, 5.0),
        lambda end: end.report_interrupted(),
    ],
    ids=["failed", "lost", "stalled", "interrupted"],
)
def test_a_thread_that_comes_second_is_not_waited_for_indefinitely(end, reason):
    """The main thread joins the others at its end: two processes that fail alike did not end."""
    end.record(ValueError("the same error"))
    other = threading.Thread(target=reason, args=(end,), daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive()
