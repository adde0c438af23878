"""Local checkpoints of two hosts: each disk alone may be lost, and no unauthenticated client reads.

The hosts are processes on this machine with a directory each.
"""

import json
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from survival import Runs, metrics_of, state_of, train_to_the_end

from jaxtrain.run.checkpoint import local_shards
from jaxtrain.run.checkpoint.local_checkpoints import _copies, _newest_whole
from jaxtrain.run.checkpoint.local_peers import PeerCopies, PeerError
from jaxtrain.run.checkpoint.manifest import FILE, CheckpointError

TOKEN, RUN, KEY = b"5e" * 16, "0" * 16, "f" * 16
RESUMED = re.compile(r"Resumed from the (local )?checkpoint of step (\d+)")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("local"))


class Hosts:
    """A run of two hosts whose disks are lost between its starts.

    Attributes:
      bindings: of all its starts.
    """

    def __init__(self, runs: Runs, name: str, *bindings: str) -> None:
        self.runs, self.name = runs, name
        where = f"Checkpoint.local_directory = '{runs.folder}/{name}-disk$PROCESS'"
        self.bindings = ["Train.save_every = 8", *bindings]
        self.local = [where, "Checkpoint.local_interval = 2"]

    def disk(self, process: int) -> Path:
        return self.runs.folder / f"{self.name}-disk{process}"

    def crash(self, faults: str, expected: set[int]) -> str:
        """Starts it until a process is killed; process 0's output."""
        with self.runs.start(self.name, *self.bindings, *self.local, faults=faults) as processes:
            ends = {process.number: process.end() for process in processes}
            log = processes[0].log()
        assert ends[int(faults[0])] == -signal.SIGKILL, log
        return self.check(log, expected)

    def finish(self, expected: set[int]) -> str:
        """Starts it until its end; process 0's output."""
        with self.runs.start(self.name, *self.bindings, *self.local) as processes:
            assert [process.end() for process in processes] == [0, 0], processes[0].log()
            return self.check(processes[0].log(), expected)

    def check(self, log: str, expected: set[int]) -> str:
        found = {int(step) for _, step in RESUMED.findall(log)}
        assert found <= expected, log
        assert bool(found) == bool(expected), log
        return log

    def keys(self, process: int) -> set[str]:
        return {path.parent.parent.name for path in self.disk(process).glob(f"*/*/*/{FILE}")}


@pytest.mark.slow
@pytest.mark.rotated("processes")
def test_sharded_states_survive_the_loss_of_either_disk(runs):
    hosts = Hosts(runs, "sharded", "Mesh.data = 1", "Mesh.fsdp = 4")
    train_to_the_end(runs, "sharded-unharmed", *hosts.bindings)
    # The copies of the last local checkpoint may not be complete at the kill, those before are.
    hosts.crash("1:enter:step:13:SIGKILL", set())
    assert hosts.keys(0) == hosts.keys(1)
    assert len(hosts.keys(0)) == 2
    shutil.rmtree(hosts.disk(1))
    log = hosts.crash("0:enter:step:15:SIGKILL", {10, 12})
    assert "Resumed from the local" in log
    assert "process 1 from process 0's copy" in log
    # Process 0's own shards: those of which process 1's disk has the same file.
    newest = max(hosts.disk(0).glob("*/*/*/arrays-0.bin"), key=lambda path: path.stat().st_mtime)
    for file in hosts.disk(0).glob("*/*/*/arrays-0.bin"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert newest.exists()
    log = hosts.crash("1:enter:step:16:SIGKILL", {12, 14})
    assert "does not match its digest); it is deleted" in log
    assert "process 0 from process 1's copy" in log
    for process in (0, 1):
        shutil.rmtree(hosts.disk(process))
    log = hosts.finish({8})
    assert "Resumed from the checkpoint of step 8" in log
    assert state_of(runs.folder / "sharded") == state_of(runs.folder / "sharded-unharmed")
    assert metrics_of(runs.folder / "sharded") == metrics_of(runs.folder / "sharded-unharmed")
    assert hosts.keys(0) == hosts.keys(1) == set()


@pytest.mark.slow
@pytest.mark.rotated("processes")
def test_replicated_states_need_no_copies(runs):
    """Each host holds the whole state, so the other one's is as good."""
    hosts = Hosts(runs, "replicated")
    train_to_the_end(runs, "replicated-unharmed", *hosts.bindings)
    hosts.crash("0:enter:step:7:SIGKILL", set())
    assert hosts.keys(0) == hosts.keys(1)
    assert len(hosts.keys(0)) == 1
    shutil.rmtree(hosts.disk(0))
    with runs.start(
        hosts.name, *hosts.bindings, *hosts.local, faults="1:enter:step:10:SIGTERM"
    ) as processes:
        assert [process.end() for process in processes] == [75, 75], processes[0].log()
        log = hosts.check(processes[0].log(), {4, 6})
    assert "process 0 from process 1's copy" in log
    assert hosts.keys(0) == hosts.keys(1) == set()  # the stop is saved in the run's folder
    hosts.finish({10, 11})
    assert state_of(runs.folder / "replicated") == state_of(runs.folder / "replicated-unharmed")
    assert metrics_of(runs.folder / "replicated") == metrics_of(runs.folder / "replicated-unharmed")


def row(key: str, host: str, storage: str | None = None) -> dict:
    return {"key": key, "host": host, "storage": storage or host, "address": f"{host}:1"}


def test_shards_that_one_disk_alone_would_hold_are_copied_to_the_next_host():
    assert _copies([row("a", "x"), row("b", "y"), row("c", "z")]) == {1: [0], 2: [1], 0: [2]}
    # Two processes a host: the one at the same position takes them.
    four = [row("a", "x"), row("b", "x"), row("c", "y"), row("d", "y")]
    assert _copies(four) == {2: [0], 3: [1], 0: [2], 1: [3]}
    # Replicas over hosts: none. Replicas within one host: once.
    assert _copies([row("a", "x"), row("b", "x"), row("a", "y"), row("b", "y")]) == {}
    assert _copies([row("a", "x"), row("a", "x"), row("b", "y"), row("b", "y")]) == {2: [0], 0: [2]}
    # One machine: another directory, or nowhere.
    assert _copies([row("a", "x", "1"), row("b", "x", "2")]) == {1: [0], 0: [1]}
    assert _copies([row("a", "x"), row("b", "x")]) == {}
    assert _copies([row("a", "x")]) == {}


def holding(key: str, *held: tuple[str, int], failed: tuple[int, ...] = (), at: str | None = "h:1"):
    return {"key": key, "held": [list(one) for one in held], "failed": list(failed), "address": at}


def test_the_newest_step_that_all_processes_find_is_whole():
    both = [("a", 4), ("a", 6), ("b", 4)]
    assert _newest_whole([holding("a", *both), holding("b", ("b", 4), ("b", 6))]) == 6
    assert _newest_whole([holding("a", *both), holding("b")]) == 4
    assert _newest_whole([holding("a", *both), holding("b", failed=(4,))]) is None
    assert _newest_whole([holding("a", ("a", 4)), holding("b")]) is None
    # Without a way to the peer its copies are out of reach.
    assert _newest_whole([holding("a", *both, at=None), holding("b", at=None)]) is None


@pytest.fixture
def pair(tmp_path):
    """A server with one folder, and a client."""
    folder = tmp_path / "one" / RUN / KEY / "3"
    local_shards.write(folder, 3, {}, {}, {"metadata": "x" * 3_000_000})
    server = PeerCopies(tmp_path / "one", TOKEN, "127.0.0.1")
    client = PeerCopies(tmp_path / "two", TOKEN, "127.0.0.1")
    yield server, client, tmp_path
    server.close()
    client.close()


def test_a_folder_is_copied_whole(pair):
    server, client, root = pair
    server.finish(3)
    copy = root / "two" / RUN / KEY / "3"
    client.fetch(server.address, copy, wait=True)
    assert local_shards.read_extra(copy, 3) == {"metadata": "x" * 3_000_000}
    local_shards.check(copy, 3)
    with pytest.raises(PeerError, match="no such checkpoint"):
        client.fetch(server.address, copy.with_name("4"))


def test_a_damaged_folder_gets_no_name(pair):
    server, client, root = pair
    file = root / "one" / RUN / KEY / "3" / "extra.json"
    file.write_text(file.read_text().replace("x", "y", 1))
    with pytest.raises(CheckpointError, match="does not match its digest"):
        client.fetch(server.address, root / "two" / RUN / KEY / "3")
    assert list((root / "two" / RUN / KEY).iterdir()) == []


def test_a_client_without_the_token_gets_nothing(pair):
    server, _, root = pair
    stranger = PeerCopies(root / "three", b"a1" * 16, "127.0.0.1")
    with pytest.raises(PeerError, match="has another token|closed its connection"):
        stranger.fetch(server.address, root / "three" / RUN / KEY / "3")
    stranger.close()
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        connection.settimeout(5)
        received = b""
        try:
            while part := connection.recv(1000):
                received += part
        except ConnectionResetError:
            pass
    assert json.dumps("metadata").encode() not in received
    assert len(received) < 100


def test_no_name_leads_out_of_the_directory(pair):
    server, client, root = pair
    secret = root / "secret" / KEY / "3"
    shutil.copytree(root / "one" / RUN / KEY / "3", secret)
    for run in ("../secret", "..", "."):
        with pytest.raises(OSError, match=r"closed its connection|reset"):
            client.fetch(server.address, root / "two" / Path(run).name / KEY / "3")
