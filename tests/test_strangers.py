"""Who reaches the port of a run without its token: real sockets on loopback, and a run unharmed."""

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import TOKEN, free_ports

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster import rendezvous as rendezvous_module
from jaxtrain.run.cluster import wire
from jaxtrain.run.cluster.authentication import (
    PROTOCOL,
    MessageKey,
    OtherTokenError,
    RunToken,
    UnauthenticatedError,
    client_handshake,
    server_handshake,
)
from jaxtrain.run.cluster.channel import rendezvous
from jaxtrain.run.cluster.cluster import Cluster, ClusterError, Listeners, Peers
from jaxtrain.run.cluster.wire import Link, RejectedClients, bind_host

NOWHERE = Path("/nowhere/token")
OTHER_TOKEN = "another-run-" + "6f" * 16


def run_token(value=TOKEN):
    return RunToken({"JAXTRAIN_TOKEN": value}, NOWHERE)


class Pair:
    """Two processes of a run in this one, which meet when they are told to.

    Attributes:
      port: process 0's.
      peers: both, once they have met.
      said: what was reported.
    """

    def __init__(self) -> None:
        self.port = free_ports()
        self.peers: list[Peers] = []
        self.said: list[str] = []
        self._meeting: threading.Thread | None = None

    def member(self, process, *, port=None, token=None, seconds=20):
        cluster = Cluster(
            kind="flags",
            coordinator=f"127.0.0.1:{port or self.port}",
            num_processes=2,
            process_id=process,
        )
        return rendezvous(
            cluster,
            {"configuration": "of the run"},
            token=token or run_token(),
            timeout_seconds=seconds,
            report=self.said.append,
        )

    def begin(self):
        """Starts process 0, which waits for the other."""
        self._meeting = threading.Thread(target=lambda: self.peers.append(self.member(0)))
        self._meeting.start()
        self.connect().close()

    def join(self, *, through=None):
        """Process 1 joins, by another port where one is named."""
        self.peers.append(self.member(1, port=through))
        self._meeting.join()
        self.peers.sort(key=lambda peers: peers.process_id)

    def connect(self) -> socket.socket:
        """An unauthenticated client's connection to process 0."""
        for _ in range(500):
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.port), timeout=20)
            time.sleep(0.02)
        raise AssertionError("nobody listens")

    def strangers(self) -> list[str]:
        """The lines about unauthenticated clients."""
        return [line for line in self.said if "unauthenticated client" in line]

    def end(self):
        """Both go some ticks, stop at one of them and part, as a run does that nobody troubles."""
        assert [peers.cause for peers in self.peers] == [None, None]
        first, second = self.peers
        assert [one.tick(number) for number in (1, 2) for one in self.peers] == [None] * 4
        second.request_stop("SIGTERM")
        stopped = []
        for one in (first, second):
            reasons = ((one.tick(number), number) for number in itertools.count(3))
            stopped.append(next(found for found in reasons if found[0]))
        assert stopped[0] == stopped[1]
        assert stopped[0][0] == "SIGTERM"
        parting = threading.Thread(target=first.goodbye)
        parting.start()
        second.goodbye()
        parting.join()
        assert [peers.cause for peers in self.peers] == [None, None]


@pytest.fixture
def pair():
    one = Pair()
    yield one
    for peers in one.peers:
        peers.close()


# -- what unauthenticated clients try


def drained(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            came += data
    return came


def idle(pair, stack):
    for _ in range(100):
        stack.enter_context(pair.connect())


def slow(pair, stack):
    """A byte from time to time, of what begins like a greeting."""
    connection = stack.enter_context(pair.connect())
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for byte in PROTOCOL + bytes(100):
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
    assert drained(connection) == b""


def noise(pair, stack):
    connection = stack.enter_context(pair.connect())
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(b"\xff\x00noise\n" * (1 << 17))
    assert drained(connection) == b""


def endless_greeting(pair, stack):
    """Begins well, and goes on with 1 MB in place of a proof."""
    connection = stack.enter_context(pair.connect())
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(PROTOCOL + bytes(1 << 20))
    drained(connection)


def stop_in_plain_words(pair, stack):
    connection = stack.enter_context(pair.connect())
    for kind in ("stop", "failed", "goodbye"):
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(
                json.dumps({"kind": kind, "reason": "x", "tick": 1}).encode() + b"\n"
            )
    assert drained(connection) == b""


def stop_under_a_guessed_seal(pair, stack):
    connection = stack.enter_context(pair.connect())
    body = b'{"kind":"stop","reason":"an unauthenticated client"}'
    sealed = struct.pack("!I", len(body)) + MessageKey(b"a guess").mark(body) + body
    connection.sendall(PROTOCOL + bytes(32) + bytes(32) + sealed)
    drained(connection)


def join_with_another_token(pair, stack):
    with pytest.raises(
        UserError, match="has a different token from the one that process 1 has from JAXTRAIN_TOKEN"
    ):
        pair.member(1, token=run_token(OTHER_TOKEN))


def host_again_with_another_token(pair, stack):
    with pytest.raises(UserError, match=r"port \d+ is already in use"):
        pair.member(0, token=run_token(OTHER_TOKEN))


ATTACKS = [
    idle,
    slow,
    noise,
    endless_greeting,
    stop_in_plain_words,
    stop_under_a_guessed_seal,
    join_with_another_token,
    host_again_with_another_token,
]


@pytest.mark.parametrize("before_the_meeting", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_stranger_costs_the_run_nothing(pair, attack, before_the_meeting, monkeypatch):
    monkeypatch.setattr(wire, "_HELLO_SECONDS", 0.8)
    pair.begin()
    with contextlib.ExitStack() as stack:
        if before_the_meeting:
            attack(pair, stack)
            attack(pair, stack)
            pair.join()
        else:
            pair.join()
            attack(pair, stack)
            attack(pair, stack)
        pair.end()
    assert len(pair.strangers()) <= 1, pair.strangers()
    assert TOKEN not in "".join(pair.said)
    assert OTHER_TOKEN not in "".join(pair.said)


def test_idle_connections_are_dropped_in_time_and_counted_in_one_line(pair, monkeypatch):
    monkeypatch.setattr(wire, "_HELLO_SECONDS", 0.5)
    pair.begin()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(pair.connect()) for _ in range(20)]
        assert [drained(connection) for connection in connections] == [b""] * 20
    pair.join()
    pair.end()
    (line,) = pair.strangers()
    assert line == (
        "rejected an unauthenticated client at this run's port (127.0.0.1 did not authenticate "
        "within 0.5 s); the run continues, and others are reported once an hour"
    )


def test_more_connections_than_there_is_room_for_push_out_the_oldest(pair, monkeypatch):
    monkeypatch.setattr(wire, "_ROOM_FOR_STRANGERS", 10)
    pair.begin()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(pair.connect()) for _ in range(40)]
        # 10, and as many as there are processes, are kept.
        assert [drained(connection) for connection in connections[:28]] == [b""] * 28
        connections[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            connections[-1].recv(1)
        pair.join()
        pair.end()


def test_a_missing_process_is_told_with_the_strangers_that_came(pair):
    pair.said.clear()
    found = []

    def wait():
        with pytest.raises(ClusterError) as raised:
            pair.member(0, seconds=2)
        found.append(str(raised.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    with pair.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        drained(connection)
    waiting.join()
    assert "process 1 did not arrive" in found[0]
    assert found[0].count("1 connections without this run's token were rejected, the last") == 1


def test_strangers_are_told_of_once_in_an_hour(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(wire.time, "monotonic", lambda: now[0])
    said = []
    strangers = RejectedClients(said.append)
    for _ in range(1000):
        strangers.note("10.0.0.7", "closed its connection")
        now[0] += 1.0
    assert len(said) == 1
    now[0] = 3600.0
    strangers.note("10.0.0.8", "has a different token")
    assert len(said) == 2
    assert said[1].startswith(
        "rejected 1000 unauthenticated clients at this run's port (10.0.0.8 has"
    )


# -- recordings and changes on the way ------------------------------------------------------------


class Wiretap:
    """Stands between a process and process 0; keeps what the process says and may change it.

    Attributes:
      port: where it listens.
      heard: what the process said: a greeting in two parts, the hello, and what follows.
      change: what goes on in place of a message after the hello.
    """

    def __init__(self, far_port: int) -> None:
        self.heard: list[bytes] = []
        self.change: Callable[[bytes], list[bytes]] = lambda frame: [frame]
        self._far_port = far_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        near, _ = self._server.accept()
        self._server.close()
        far = socket.create_connection(("127.0.0.1", self._far_port))
        threading.Thread(target=self._back, args=(far, near), daemon=True).start()
        with contextlib.suppress(OSError), near.makefile("rb") as stream:
            for part in self._parts(stream):
                self.heard.append(part)
                for changed in self.change(part) if len(self.heard) > 3 else [part]:
                    far.sendall(changed)

    @staticmethod
    def _parts(stream):
        yield stream.read(48)
        yield stream.read(32)
        while length := stream.read(4):
            yield length + stream.read(32 + struct.unpack("!I", length)[0])

    @staticmethod
    def _back(far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                near.sendall(data)
            near.shutdown(socket.SHUT_RDWR)


def test_a_recording_played_to_the_next_start_of_the_run_does_nothing(pair):
    before = Pair()
    tap = Wiretap(before.port)
    before.begin()
    before.join(through=tap.port)
    before.peers[1].request_stop("SIGINT")
    while not any(b"SIGINT" in part for part in tap.heard):
        time.sleep(0.02)
    for peers in before.peers:
        peers.close()
    pair.begin()
    pair.join()
    with pair.connect() as connection:
        # The greeting, the hello and the request to stop, as they were taken the last time.
        connection.sendall(b"".join(tap.heard))
        drained(connection)
    (line,) = pair.strangers()
    assert "could not prove this run's token" in line
    pair.end()


def repeat():
    return lambda frame: [frame, frame]


def alter():
    return lambda frame: [frame.replace(b"SIGTERM", b"SIGKILL")]


def swap():
    held = []

    def change(frame):
        held.append(frame)
        return [] if len(held) == 1 else list(reversed(held))

    return change


def leave_out():
    return lambda frame: [] if b"stop" in frame else [frame]


def invent():
    return lambda frame: [struct.pack("!I", 15) + bytes(32) + b'{"kind":"stop"}', frame]


def endless():
    return lambda frame: [b"\xff" * len(frame)]


@pytest.mark.parametrize("make", [repeat, alter, swap, leave_out, invent, endless])
def test_what_is_changed_on_the_way_is_noticed_and_not_believed(pair, make):
    tap = Wiretap(pair.port)
    pair.begin()
    pair.join(through=tap.port)
    lost = threading.Event()
    why = []
    pair.peers[0].listen(
        Listeners(on_lost=lambda process, host, reason, table: (why.append(reason), lost.set()))
    )
    tap.change = make()
    for reason in ("SIGTERM", "SIGTERM again", "and again"):
        pair.peers[1].request_stop(reason)
    assert lost.wait(20)
    wanted = (
        "announced a message that is too long"
        if make is endless
        else ("sent a message that was changed, repeated or out of order")
    )
    assert set(why) == {wanted}
    with pytest.raises(ClusterError, match="process 1"):
        pair.peers[0].tick(1)


# -- what a process does at the port of an unauthenticated client


@contextlib.contextmanager
def impostor(answer: Callable[[bytes], bytes]):
    """Listens, answers what comes; yields its port and all that it heard."""
    heard = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with contextlib.suppress(OSError), connection:
                    while data := connection.recv(1 << 16):
                        heard.append(data)
                        connection.sendall(answer(data))

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], heard
        server.shutdown(socket.SHUT_RDWR)


def test_a_false_process_0_is_left_before_anything_is_told_to_it(pair):
    host = server_handshake(OTHER_TOKEN.encode())
    next(host)

    def answer(data):
        if len(data) == 48:
            host.send(data[:16])
            return host.send(data[16:])[0]
        # Whatever was proved, it says that all is well.
        return bytes(32)

    with impostor(answer) as (port, heard), pytest.raises(UserError, match="has a different token"):
        pair.member(1, port=port)
    assert [len(part) for part in heard] == [48, 32]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda data: b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, "sent an invalid handshake"),
        (lambda data: b"", "says nothing"),
        (lambda data: PROTOCOL, "says nothing"),
    ],
    ids=["another program", "silence", "half a greeting"],
)
def test_another_program_at_the_port_is_named_in_time(pair, answer, why, monkeypatch):
    monkeypatch.setattr(rendezvous_module, "_ANSWER_SECONDS", 0.3)
    began = time.monotonic()
    with (
        impostor(answer) as (port, heard),
        pytest.raises(ClusterError, match=f"cannot be reached .* within 1 s: .*{why}"),
    ):
        pair.member(1, port=port, seconds=1)
    assert time.monotonic() - began < 60  # of 1, on a busy machine
    assert all(len(part) == 48 for part in heard)


def test_a_process_without_a_token_is_refused_with_the_way_out(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous_module, "_TOKEN_SECONDS", 0.4)
    pair.begin()
    file = tmp_path / "token"
    with pytest.raises(UserError) as raised:
        pair.member(1, token=RunToken({}, file))
    assert str(raised.value) == (
        f"the coordinator 127.0.0.1:{pair.port} answers, but process 1 has no token to show it: "
        f"JAXTRAIN_TOKEN is not set, and there is no {file}; set the same JAXTRAIN_TOKEN for "
        "all processes of the run, or unset it for all and use a shared --workdir"
    )
    # It connected, said nothing and went: no unauthenticated client.
    assert pair.strangers() == []
    pair.join()
    pair.end()


def test_a_token_that_comes_late_is_waited_for(pair, tmp_path):
    pair.begin()
    file = tmp_path / "token"
    late = threading.Timer(0.5, lambda: file.write_text(f"{TOKEN}\n"))
    late.start()
    pair.peers.append(pair.member(1, token=RunToken({}, file)))
    pair._meeting.join()
    pair.peers.sort(key=lambda peers: peers.process_id)
    assert [peers.process_id for peers in pair.peers] == [0, 1]
    pair.end()


# -- the greeting itself --------------------------------------------------------------------------


def greet(joiner_token: bytes, host_token: bytes):
    """Both ends of a greeting, which wait for the last part, and the four parts."""
    joiner, host = client_handshake(joiner_token), server_handshake(host_token)
    sent = [next(joiner)[0]]
    assert next(host) == (b"", 16)
    assert host.send(sent[0][:16]) == (b"", 32)
    sent.append(host.send(sent[0][16:])[0])
    sent.append(joiner.send(sent[1])[0])
    part, wanted = host.send(sent[2])
    assert wanted == 0
    return joiner, host, [*sent, part]


def keys_of(end, last: bytes):
    """The keys that an end returns on the last part."""
    with pytest.raises(StopIteration) as over:
        end.send(last)
    return over.value.value


def test_two_greetings_have_nothing_in_common_and_tell_nothing_of_the_token():
    seen, marks = set(), set()
    for _ in range(20):
        joiner, host, sent = greet(b"token", b"token")
        ends = keys_of(joiner, sent[3]), keys_of(host, b"")
        assert not any(b"token" in part for part in sent)
        seen.update([sent[0][16:], sent[1][16:], sent[2], sent[3]])
        for own, other in (ends, ends[::-1]):
            mark = own[0].mark(b"x")
            assert mark == other[1].mark(b"x")
            marks.add(mark)
    assert len(seen) == 80
    assert len(marks) == 40


def test_a_proof_of_one_end_is_none_for_the_other():
    joiner, host, sent = greet(b"token", b"token")
    with pytest.raises(OtherTokenError):
        joiner.send(sent[2])
    _, host, sent = greet(b"token", b"other")
    assert sent[3] == b"another token".ljust(32, b"\0")
    with pytest.raises(OtherTokenError, match="could not prove this run's token"):
        host.send(b"")


def test_who_does_not_say_the_protocol_s_name_hears_nothing():
    host = server_handshake(b"token")
    assert next(host) == (b"", 16)
    with pytest.raises(UnauthenticatedError, match="an invalid handshake"):
        host.send(b"jaxtrain-peers-1")


def test_a_link_reads_no_more_than_it_may_before_the_proof():
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    with near, far:
        far.sendall(PROTOCOL + bytes(5000))
        link = Link(near)
        assert not asyncio.run(link.authenticate(server_handshake(b"token")))
        assert link.closed == "could not prove this run's token"
        # 16, 32 and 32 bytes were taken, the rest was not.
        assert len(near.recv(10000)) == 16 + 5000 - 80


# -- where process 0 listens -----------------------------------------------------------------------


def test_an_address_of_this_machine_is_the_only_one_that_is_listened_at(monkeypatch):
    everywhere = bind_host("no-such-host.invalid")
    assert everywhere in ("::", "0.0.0.0")
    assert bind_host("192.0.2.1") == everywhere  # for examples, RFC 5737: on no machine
    monkeypatch.setattr("jaxtrain.run.cluster.wire.is_local", lambda host: True)
    assert bind_host("192.0.2.1") == "192.0.2.1"
    assert bind_host("2001:db8::1") == "2001:db8::1"
    assert bind_host("fe80::1") == everywhere
    assert bind_host("node1") == everywhere
    assert bind_host("localhost") == "127.0.0.1"
