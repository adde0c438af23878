"""The channel between real processes: meeting, losses, failures, and one tick to stop at."""

import asyncio
import contextlib
import functools
import itertools
import re
import signal
import socket
import struct
import threading
from pathlib import Path

import pytest
from cluster import TOKEN, free_ports, start_processes
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.authentication import RunToken, client_handshake, server_handshake
from jaxtrain.run.cluster.channel import rendezvous
from jaxtrain.run.cluster.cluster import Cluster, ClusterError, Listeners, OneProcess
from jaxtrain.run.cluster.wire import Link

GIVEN = RunToken({"JAXTRAIN_TOKEN": TOKEN}, Path("/nowhere/token"))

# Meets the others, says so, and does what its variables say until it is stopped.
PROGRAM = """
import os, sys, threading
from pathlib import Path
from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.cluster import Cluster, ClusterError
from jaxtrain.run.cluster.cluster import Listeners
from jaxtrain.run.cluster.channel import rendezvous
from jaxtrain.run.cluster.authentication import RunToken

def say(*words):
    sys.stdout.write(" ".join(str(word) for word in words) + "\\n")

cluster = Cluster(
    kind="flags",
    coordinator=os.environ["COORDINATOR"],
    num_processes=int(os.environ["COUNT"]),
    process_id=int(os.environ["PROCESS"]),
    hosts={0: "node0", 1: "node1", 2: "node2"},
)
try:
    peers = rendezvous(
        cluster,
        {"jax": os.environ.get("VERSION", "0.12"), "config": "abc"},
        token=RunToken(os.environ, Path(os.environ.get("TOKEN_FILE", "/nowhere/token"))),
        timeout_seconds=float(os.environ.get("TIMEOUT", "30")),
        report=lambda line: say("report", line),
        welcome={"attempt": 10 + cluster.process_id},
        heartbeat_seconds=0.2,
        silence_seconds=float(os.environ.get("SILENCE", "20")),
    )
except UserError as error:
    say("user error:", error)
    sys.exit(2)
except ClusterError as error:
    say("cluster error:", error)
    sys.exit(1)
over = threading.Event()

def lost(process, host, why, table):
    say("lost", process, host, why, "last seen", table[process].get("phase"))
    over.set()

def failed(process, host, reason):
    say("failed", process, reason)
    over.set()

peers.listen(
    Listeners(activity=lambda: {"phase": "step"}, on_lost=lost, on_failed=failed)
)
say("met", cluster.process_id, peers.welcome["attempt"], peers.jax_coordinator)
job = os.environ.get("JOB", "wait")
if job == "wait":
    seen = threading.Event()
    while not over.wait(0.05):
        rows = peers.table()
        if len(rows) == len(peers.hosts) and all("phase" in row for row in rows.values()):
            if not seen.is_set():
                say("table complete")
            seen.set()
    say("cause", peers.cause)
    os._exit(1)
if job == "fail":
    say("first cause", peers.report_failure("KeyError: 'x'"))
    os._exit(1)
if job == "goodbye":
    peers.goodbye(10)
    say("ended")
"""


def run(tmp_path, count=2, environment=None, **options):
    environment = {"JAXTRAIN_TOKEN": TOKEN, **(environment or {})}
    return start_processes(count, PROGRAM, folder=tmp_path, environment=environment, **options)


@pytest.mark.parametrize("count", [2, 3])
def test_all_meet_hear_the_welcome_of_process_0_and_end_together(tmp_path, count):
    with run(tmp_path, count, environment={"JOB": "goodbye"}) as processes:
        met = [process.wait_for("met").split() for process in processes]
        assert [words[1] for words in met] == [str(number) for number in range(count)]
        assert {words[2] for words in met} == {"10"}
        assert len({words[3] for words in met}) == 1
        assert [process.end() for process in processes] == [0] * count
        assert all("ended" in process.log() for process in processes)
        assert all("lost" not in process.log() for process in processes)


def test_a_missing_process_is_named_with_its_host_on_every_process_that_is_there(tmp_path):
    environment = {"COUNT": "3", "TIMEOUT": "2"}
    with run(tmp_path, 2, environment=environment) as processes:
        assert [process.end() for process in processes] == [1, 1]
        for process in processes:
            line = process.wait_for("cluster error:")
            assert "process 2 (host node2) did not arrive at 127.0.0.1" in line
            assert "there are processes 0, 1 " in line
        assert "report waiting for process" in processes[0].log()


def test_a_coordinator_that_is_not_there_is_named(tmp_path):
    environment = {"COUNT": "2", "TIMEOUT": "1"}
    with run(tmp_path, 2, environment=environment, only=[1]) as processes:
        assert processes[0].end() == 1
        line = processes[0].wait_for("cluster error: the coordinator 127.0.0.1")
        assert "(process 0) cannot be reached from process 1" in line
        assert "Connection refused" in line


@pytest.mark.parametrize("twice", ["0", "1"])
def test_two_processes_with_one_id_end_all(tmp_path, twice):
    environment = {"COUNT": "3"}
    per_process = {2: {"PROCESS": twice}}
    with run(tmp_path, 3, environment=environment, per_process=per_process) as processes:
        assert [process.end() for process in processes] == [2, 2, 2]
        lines = {process.wait_for("user error:") for process in processes}
        assert len(lines) == 1
        (line,) = lines
        assert f"two processes have id {twice}" in line
        pids = [
            str(process.handle.pid) for process in processes if process.number != 1 - int(twice)
        ]
        assert all(f"pid {pid}" in line for pid in pids)


def test_a_double_that_comes_late_is_refused_and_disturbs_nobody(tmp_path):
    with run(tmp_path, 2) as processes:
        for process in processes:
            process.wait_for("table complete")
        where = processes[0].coordinator
        with run(tmp_path / "late", 2, only=[1], coordinator=where) as late:
            assert late[0].end() == 2
            line = late[0].wait_for("user error: the run has started with all its processes")
            assert "two processes have id 1" in line
        assert [process.handle.poll() for process in processes] == [None, None]
        assert "lost" not in processes[0].log()


def test_processes_that_differ_are_named_with_their_values(tmp_path):
    per_process = {1: {"VERSION": "0.10"}}
    with run(tmp_path, 2, per_process=per_process) as processes:
        assert [process.end() for process in processes] == [2, 2]
        for process in processes:
            line = process.wait_for("user error:")
            assert "jax is 0.10 on process 1 (host" in line
            assert "and 0.12 on process 0 (host" in line
            assert "config" not in line


def test_processes_that_disagree_on_their_number_are_named(tmp_path):
    with run(tmp_path, 2, per_process={1: {"COUNT": "4"}}) as processes:
        assert [process.end() for process in processes] == [2, 2]
        for process in processes:
            line = process.wait_for("user error:")
            assert "was started as one of 4 processes, process 0 (host" in line


def test_a_taken_port_is_named_with_a_free_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = Cluster(
            kind="flags", coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=0
        )
        with pytest.raises(UserError, match=f"port {port} is already in use") as error:
            rendezvous(cluster, {}, token=GIVEN, timeout_seconds=5)
        free = int(re.search(r"try a free one, such as (\d+)", str(error.value))[1])
        socket.create_server(("127.0.0.1", free)).close()


def test_a_stray_connection_is_dropped_and_the_run_begins(tmp_path):
    with run(tmp_path, 2, only=[0]) as processes:
        processes[0].wait_for("report waiting for process 1 (host node1)")
        host, port = processes[0].coordinator.split(":")
        with socket.create_connection((host, int(port))) as stray:
            stray.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert stray.recv(100) == b""
        with run(tmp_path / "rest", 2, only=[1], coordinator=processes[0].coordinator) as others:
            processes[0].wait_for("table complete")
            others[0].wait_for("table complete")


@pytest.mark.parametrize(("victim", "living"), [(1, [0, 2]), (0, [1, 2])])
def test_a_killed_process_is_named_by_all_others(tmp_path, victim, living):
    with run(tmp_path, 3) as processes:
        for process in processes:
            process.wait_for("table complete")
        processes[victim].handle.kill()
        for number in living:
            line = processes[number].wait_for(f"lost {victim} ")
            assert "closed its connection" in line or "lost its connection" in line
            assert "last seen step" in line
            assert processes[number].end() == 1
            assert processes[number].log().count("lost ") == 1


@pytest.mark.parametrize(("victim", "living"), [(1, [0, 2]), (0, [1, 2])])
def test_a_frozen_process_is_silent_to_all_others_and_knows_when_it_wakes(tmp_path, victim, living):
    with run(tmp_path, 3, environment={"SILENCE": "2"}) as processes:
        for process in processes:
            process.wait_for("table complete")
        processes[victim].send(signal.SIGSTOP)
        for number in living:
            assert "silent for 2 s" in processes[number].wait_for(f"lost {victim} ")
            assert processes[number].end() == 1
        processes[victim].send(signal.SIGCONT)
        processes[victim].wait_for(f"cause process {victim} ")
        assert processes[victim].end() == 1


def test_the_reason_of_the_process_that_failed_first_reaches_all(tmp_path):
    with run(tmp_path, 3, per_process={2: {"JOB": "fail"}}) as processes:
        assert "failed: KeyError: 'x'" in processes[2].wait_for("first cause process 2")
        for process in processes[:2]:
            process.wait_for("failed 2 KeyError: 'x'")
            process.wait_for("cause process 2")
            assert process.end() == 1


# -- threads of this process, real sockets -------------------------------------------------------


def join(count, **options):
    """All processes of a run in this one, met."""
    coordinator = f"127.0.0.1:{free_ports()}"
    joined = [None] * count

    def meet(process):
        cluster = Cluster(
            kind="flags", coordinator=coordinator, num_processes=count, process_id=process
        )
        joined[process] = rendezvous(cluster, {}, token=GIVEN, timeout_seconds=20, **options)

    threads = [threading.Thread(target=meet, args=[process]) for process in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return joined


@settings(max_examples=15, deadline=None)
@given(
    delays=st.lists(st.integers(0, 4), min_size=2, max_size=4),
    asker=st.integers(0, 3),
    at=st.integers(1, 6),
    again=st.booleans(),
)
def test_loops_of_different_speeds_stop_at_the_same_tick(delays, asker, at, again):
    peers = join(len(delays))
    asker %= len(delays)
    stopped = {}
    done = [0] * len(delays)
    moved = threading.Condition()

    def near(number):
        return min(done) >= number - 2

    def loop(process):
        for number in itertools.count(1):
            if process == asker and number == at:
                peers[process].request_stop("SIGTERM")
            if again and process == (asker + 1) % len(delays) and number == at + 1:
                peers[process].request_stop("another")
            reason = peers[process].tick(number)
            with moved:
                if reason is not None:
                    stopped[process] = (number, reason)
                    done[process] = 10**9
                    moved.notify_all()
                    return
                # As on devices: a tick takes all processes, two may be queued.
                done[process] = number
                moved.notify_all()
                assert moved.wait_for(functools.partial(near, number), timeout=120)
            threading.Event().wait(0.001 * delays[process])

    threads = [threading.Thread(target=loop, args=[process]) for process in range(len(delays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(stopped.values())) == 1
    assert stopped[0][0] >= at
    assert stopped[0][1] == "SIGTERM" or again
    ends = [threading.Thread(target=one.goodbye) for one in peers]
    for thread in ends:
        thread.start()
    for thread in ends:
        thread.join()


def test_a_process_inside_a_device_wait_answers_and_goes_on_to_the_tick_of_the_others():
    first, second = join(2)
    assert [first.tick(number) for number in (1, 2, 3)] == [None] * 3
    # The second is two ticks behind and does not come back to its loop before the first stops.
    assert second.tick(1) is None
    second.request_stop("SIGTERM")
    last = 4
    while (reason := first.tick(last)) is None:
        last += 1
    assert reason == "SIGTERM"
    assert [second.tick(number) for number in range(2, last)] == [None] * (last - 2)
    assert second.tick(last) == "SIGTERM"
    first.close()
    second.close()


def test_a_stop_that_comes_as_the_last_tick_is_over_lets_all_end():
    first, second = join(2)
    for peers in (first, second):
        assert [peers.tick(number) for number in (1, 2)] == [None, None]
    end = threading.Thread(target=first.goodbye)
    end.start()
    second.request_stop("SIGTERM")
    second.goodbye()
    end.join()
    assert first.cause is None
    assert second.cause is None


def test_tick_raises_once_another_process_is_lost():
    first, second = join(2)
    lost = threading.Event()
    first.listen(Listeners(on_lost=lambda process, host, why, table: lost.set()))
    second.close()
    assert lost.wait(20)
    said = r"process 1 \(host .*\) lost: (closed|broke) its connection"
    with pytest.raises(ClusterError, match=said):
        first.tick(1)
    with pytest.raises(ClusterError, match="process 1"):
        first.goodbye()


def test_an_error_that_follows_from_a_loss_is_not_the_first_cause():
    first, second, third = join(3)
    # What the others feel of a death may be told before the death itself is seen.
    told = []
    telling = threading.Thread(
        target=lambda: told.append(second.report_failure("gloo: connection closed"))
    )
    telling.start()
    third.close()
    telling.join()
    assert (told[0].what, told[0].process_id) == ("lost", 2)
    first.close()
    second.close()


def test_a_loss_before_anybody_listens_is_told_when_somebody_does():
    first, second = join(2)
    second.close()
    with pytest.raises(ClusterError):
        first.goodbye(20)
    first, second = join(2)
    second.close()
    while first.cause is None:
        threading.Event().wait(0.01)
    heard = threading.Event()
    first.listen(Listeners(on_lost=lambda process, host, why, table: heard.set()))
    assert heard.wait(20)
    first.close()


def test_what_came_before_a_connection_was_reset_is_received():
    async def connect():
        with socket.create_server(("127.0.0.1", 0)) as server:
            ends = socket.create_connection(server.getsockname()), server.accept()[0]
        far, near = map(Link, ends)
        handshakes = client_handshake(b"token"), server_handshake(b"token")
        await asyncio.gather(*map(Link.authenticate, (far, near), handshakes))
        far.send({"kind": "failed", "reason": "x" * 50_000})
        while far.pending:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        far.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        await asyncio.sleep(0.1)
        received = [await near.receive(), await near.receive(), near.closed]
        near.close()
        return received

    first, second, closed = asyncio.run(connect())
    assert (first["reason"], second) == ("x" * 50_000, None)
    assert closed == "lost its connection (Connection reset by peer)"


def test_a_goodbye_that_the_others_do_not_share_names_them():
    first, second = join(2)
    with pytest.raises(ClusterError, match=r"process 1 \(host .*\) did not finish within"):
        first.goodbye(0.2)
    second.close()


def test_one_process_has_the_same_calls():
    peers = rendezvous(Cluster(), {}, token=GIVEN, welcome={"attempt": 3})
    assert isinstance(peers, OneProcess)
    assert peers.welcome == {"attempt": 3}
    peers.listen(Listeners(activity=lambda: {"phase": "step"}))
    assert peers.table()[0]["phase"] == "step"
    assert peers.tick(1) is None
    peers.request_stop("SIGTERM")
    peers.request_stop("SIGINT")
    assert peers.tick(2) == "SIGTERM"
    assert str(peers.report_failure("an error")).endswith("failed: an error")
    peers.goodbye()
