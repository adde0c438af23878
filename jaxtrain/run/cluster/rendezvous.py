"""Rendezvous of all processes before a run: missing, duplicate or different ones are named."""

import contextlib
import dataclasses
import os
import selectors
import socket
import time
from collections.abc import Callable

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.authentication import ClientHandshake, RunToken
from jaxtrain.run.cluster.cluster import (
    Announcement,
    Cluster,
    ClusterError,
    Reporter,
    name_processes,
)
from jaxtrain.run.cluster.wire import (
    Link,
    Listener,
    Message,
    free_port,
    is_free,
    is_local,
    is_taken,
    join_address,
    split_address,
)

_RETRY_SECONDS = 0.3
_REPORT_SECONDS = 5.0
# How long process 0 stays to tell latecomers why there is no run.
_LINGER_SECONDS = 2.0
# Process 0 says that it still waits once in _REPORT_SECONDS.
_QUIET_SECONDS = 30.0
# Until process 0 has answered a handshake.
_ANSWER_SECONDS = 10.0
# Process 0 leaves the token before it listens; a network file system shows it some time later.
_TOKEN_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Result of the rendezvous: the connections and addresses of all processes.

    Attributes:
      links: connections by process id: process 0 has one to each other, they have one to it.
      listener: process 0's listening socket; None elsewhere.
      hosts: every process's host name, as it calls itself.
      welcome: what process 0 sent to all.
      jax_coordinator: HOST:PORT for JAX's own coordinator.
      heartbeat_seconds, silence_seconds: process 0's, for all.
    """

    links: dict[int, Link]
    listener: Listener | None
    hosts: dict[int, str]
    welcome: dict[str, str | int]
    jax_coordinator: str
    heartbeat_seconds: float
    silence_seconds: float


def join_run(
    cluster: Cluster,
    hello: Announcement,
    *,
    token: RunToken,
    timeout_seconds: float,
    report: Reporter,
    welcome: Announcement,
    heartbeat_seconds: float,
    silence_seconds: float,
) -> Rendezvous:
    """Wait until all processes of the cluster are there, have the run's token, and agree.

    Raises:
      UserError: the port is taken; two processes have one id; number of processes or hello differ;
        this process has no token, or another than process 0.
      ClusterError: a process is missing, or the coordinator cannot be reached.
    """
    assert cluster.coordinator is not None
    host, port = split_address(cluster.coordinator)
    own = _announcement(cluster, hello)
    if cluster.process_id:
        return _join(cluster, own, token, timeout_seconds, report)
    secret = token.make()
    _validate_second_coordinator(host, port, own, secret)
    try:
        listener = Listener(host, port, secret, room=cluster.num_processes, report=report)
    except OSError as error:
        why = "is taken" if is_taken(error) else f"cannot be opened ({error.strerror})"
        free = free_port(host, port)
        raise UserError(
            f"coordinator {cluster.coordinator}: port {port} {why} on this machine; free is for "
            f"example {free} (--coordinator {join_address(host, free)}, or "
            f"JAX_COORDINATOR_PORT={free}; the same for all processes)"
        ) from error
    try:
        links, hosts = _HostSide(cluster, own, listener, report).gather(timeout_seconds)
    except BaseException:
        listener.close()
        raise
    jax_port = free_port(host, port)
    opening = {
        "kind": "welcome",
        "jax_port": jax_port,
        "hosts": {str(process): name for process, name in hosts.items()},
        "welcome": dict(welcome),
        "heartbeat_seconds": heartbeat_seconds,
        "silence_seconds": silence_seconds,
    }
    for link in links.values():
        link.send(opening)
    return _rendezvous_of(opening, host, links, listener)


def _announcement(cluster: Cluster, hello: Announcement) -> Message:
    return {
        "kind": "hello",
        "process_id": cluster.process_id,
        "num_processes": cluster.num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "hello": dict(hello),
    }


def _rendezvous_of(
    opening: Message, host: str, links: dict[int, Link], listener: Listener | None
) -> Rendezvous:
    return Rendezvous(
        links=links,
        listener=listener,
        hosts={int(process): name for process, name in opening["hosts"].items()},
        welcome=opening["welcome"],
        jax_coordinator=join_address(host, opening["jax_port"]),
        heartbeat_seconds=opening["heartbeat_seconds"],
        silence_seconds=opening["silence_seconds"],
    )


# -- process 0 -------------------------------------------------------------------------------------


class _HostSide:
    """Process 0 while the others arrive."""

    def __init__(
        self, cluster: Cluster, own: Message, listener: Listener, report: Reporter
    ) -> None:
        self._cluster, self._listener, self._report = cluster, listener, report
        self._hellos: dict[int, Message] = {0: own}
        self._links: dict[int, Link] = {}

    def gather(self, timeout_seconds: float) -> tuple[dict[int, Link], dict[int, str]]:
        """Wait for all; on any failure send it to all that are there, and raise."""
        until = time.monotonic() + timeout_seconds
        reported = ""
        next_report = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener.socket, selectors.EVENT_READ, None)
            try:
                while self._missing():
                    now = time.monotonic()
                    if now > until:
                        raise ClusterError(self._missing_sentence(timeout_seconds))
                    if now >= next_report:
                        next_report = now + _REPORT_SECONDS
                        missing = name_processes(self._missing(), self._cluster.hosts)
                        waiting = f"waiting for {missing}"
                        if waiting != reported:
                            self._report(waiting)
                        reported = waiting
                        for link in self._links.values():
                            link.send({"kind": "waiting"})
                    seconds = min(until, next_report) - now
                    self._turn(selector, seconds, self._let_in, self._receive_from_member)
            except (UserError, ClusterError) as error:
                self._send_all_away(selector, error)
                raise
        return self._links, {process: hello["host"] for process, hello in self._hellos.items()}

    def _turn(
        self,
        selector: selectors.BaseSelector,
        seconds: float,
        newcomer: Callable[[Link, Message], None],
        member: Callable[[selectors.BaseSelector, Link], None],
    ) -> None:
        """Listen once: whoever says hello goes to `newcomer`, a member with news to `member`."""
        for key, _ in selector.select(min(max(seconds, 0), 1)):
            if key.data is None:
                for link in self._listener.accept():
                    selector.register(link, selectors.EVENT_READ, link)
            elif key.data in self._listener.waiting:
                hello = self._listener.receive(key.data)
                if hello is not None:
                    newcomer(key.data, hello)
            elif key.data in self._links.values():
                member(selector, key.data)
        for link in self._listener.leavers():
            selector.unregister(link)
            link.close()

    def _let_in(self, link: Link, hello: Message) -> None:
        """Take a process in; an error is every process's end."""
        process = hello["process_id"]
        other = self._hellos.get(process)
        mistake = None
        if other is not None:
            mistake = duplicate_message(other, hello)
        else:
            mistake = _difference(self._hellos[0], hello)
        if mistake is not None:
            self._listener.reject(link, mistake)
            raise UserError(mistake)
        self._hellos[process] = hello
        self._links[process] = link
        # From now on it waits as long as this process does.
        link.send({"kind": "waiting"})

    def _receive_from_member(self, selector: selectors.BaseSelector, link: Link) -> None:
        # A process that ends while the others are awaited is missing again.
        link.receive()
        if link.closed:
            process = next(p for p, known in self._links.items() if known is link)
            del self._links[process]
            host = self._hellos.pop(process)["host"]
            self._report(f"process {process} (host {host}) {link.closed}")
            selector.unregister(link)
            link.close()

    def _missing(self) -> list[int]:
        return [p for p in range(self._cluster.num_processes) if p not in self._hellos]

    def _missing_sentence(self, timeout_seconds: float) -> str:
        missing = name_processes(self._missing(), self._cluster.hosts)
        there = {process: hello["host"] for process, hello in self._hellos.items()}
        sentence = (
            f"{missing} did not arrive at {self._cluster.coordinator} within {timeout_seconds:g} s;"
            f" there are {name_processes(sorted(there), there)}"
        )
        host, _ = split_address(self._cluster.coordinator or "")
        if not is_local(host):
            sentence += f"; {host} is no address of this machine: does process 0 belong there?"
        rejected = self._listener.rejected
        if rejected.count:
            sentence += (
                f"; {rejected.count} connections without this run's token were turned away, the "
                f"last from {rejected.last}"
            )
        return sentence

    def _send_all_away(self, selector: selectors.BaseSelector, error: Exception) -> None:
        """Send the error to those that are there and, for a moment, to those that still come."""
        kind = "refused" if isinstance(error, UserError) else "missing"
        message = {"kind": kind, "sentence": str(error)}
        expected = self._cluster.num_processes
        for link in self._links.values():
            link.send(message)
        heard = len(self._hellos) + 1

        def reject(link: Link, _: Message) -> None:
            nonlocal heard
            heard += 1
            self._listener.reject(link, str(error))

        until = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < until and (self._listener.waiting or heard < expected):
            self._turn(selector, 0.2, reject, _release)
        for link in self._links.values():
            link.close()


def _release(selector: selectors.BaseSelector, link: Link) -> None:
    """A member that was sent away may leave."""
    link.receive()
    if link.closed:
        selector.unregister(link)


def _difference(first: Message, other: Message) -> str | None:
    """Return how another process differs from process 0, as a sentence."""
    who = f"process {other['process_id']} (host {other['host']})"
    zero = f"process 0 (host {first['host']})"
    if other["num_processes"] != first["num_processes"]:
        return (
            f"{who} was started as one of {other['num_processes']} processes, {zero} as one of "
            f"{first['num_processes']}; give all of them the same number"
        )
    if not 0 <= other["process_id"] < first["num_processes"]:
        return (
            f"{who}: there are {first['num_processes']} processes, with ids from 0 to "
            f"{first['num_processes'] - 1}"
        )
    ours, theirs = first["hello"], other["hello"]
    differing = [
        f"{name} is {theirs.get(name, 'absent')!s} on {who} and {ours.get(name, 'absent')!s} on "
        f"{zero}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if not differing:
        return None
    return f"{'; '.join(differing)}; all processes of a run need the same"


def duplicate_message(first: Message, second: Message) -> str:
    """That two processes came with one id."""
    return (
        f"two processes have id {first['process_id']}: one on host {first['host']} (pid "
        f"{first.get('pid', '?')}), one on host {second['host']} (pid {second.get('pid', '?')}); "
        f"ids go from 0 to {first['num_processes'] - 1}, each once"
    )


def _validate_second_coordinator(host: str, port: int, own: Message, secret: bytes) -> None:
    """Ask whether another process 0 listens at the coordinator's address already.

    Raises:
      UserError: one does; it receives the error too.
    """
    if is_local(host) and is_free(host, port):
        return
    try:
        connection = socket.create_connection((host, port), timeout=2)
    except OSError:
        return
    with contextlib.closing(Link(connection, ClientHandshake(secret))) as link:
        until = time.monotonic() + 2
        if not _handshake(link, until):
            return
        link.send(own)
        with contextlib.suppress(TimeoutError):
            answer = _await(link, until)
            if answer is not None and answer["kind"] == "refused":
                raise UserError(answer["sentence"])


# -- the others -----------------------------------------------------------------------------------


def _join(
    cluster: Cluster, own: Message, token: RunToken, timeout_seconds: float, report: Reporter
) -> Rendezvous:
    assert cluster.coordinator is not None
    host, port = split_address(cluster.coordinator)
    without_token_until = float("inf")
    until = time.monotonic() + timeout_seconds
    next_report = time.monotonic() + _REPORT_SECONDS
    why, reported = "it does not answer", ""
    while True:
        now = time.monotonic()
        if now > until:
            raise ClusterError(
                f"the coordinator {cluster.coordinator} (process 0) cannot be reached from process "
                f"{cluster.process_id} (host {own['host']}) within {timeout_seconds:g} s: {why}"
            )
        if now >= next_report:
            next_report = now + _REPORT_SECONDS
            waiting = f"waiting for the coordinator at {cluster.coordinator}: {why}"
            if waiting != reported:
                report(waiting)
            reported = waiting
        try:
            connection = socket.create_connection((host, port), timeout=max(until - now, 0.1))
        except OSError as error:
            why = str(error.strerror or error)
            time.sleep(_RETRY_SECONDS)
            continue
        secret = token.find()
        if secret is None:
            connection.close()
            if time.monotonic() > without_token_until:
                raise token.absent(cluster.coordinator, cluster.process_id)
            if without_token_until == float("inf"):
                without_token_until = now + min(_TOKEN_SECONDS, timeout_seconds / 2)
            why = "this process has no token yet"
            time.sleep(_RETRY_SECONDS)
            continue
        link = Link(connection, ClientHandshake(secret))
        opening = None
        if _handshake(link, min(until, time.monotonic() + _ANSWER_SECONDS)):
            link.send(own)
            opening = _receive_opening(link, until)
        if opening is not None:
            return _rendezvous_of(opening, host, {0: link}, None)
        link.close()
        if link.is_rejected:
            raise token.differs(cluster.coordinator, cluster.process_id)
        why = f"what listens there {link.closed or 'says nothing'}"
        time.sleep(_RETRY_SECONDS)


def _handshake(link: Link, until: float) -> bool:
    """Whether both ends have proved the token to each other in time."""
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while (remaining := until - time.monotonic()) > 0:
            if selector.select(remaining):
                link.put_back(link.receive())
            if link.is_proven or link.closed:
                return link.is_proven
    return False


def _receive_opening(link: Link, until: float) -> Message | None:
    """Wait for process 0's decision, as long as it says that it waits too; None: it has gone."""
    while True:
        try:
            message = _await(link, until)
        except TimeoutError:
            return None
        if message is None:
            return None
        until = time.monotonic() + _QUIET_SECONDS
        if message["kind"] == "refused":
            link.close()
            raise UserError(message["sentence"])
        if message["kind"] == "missing":
            link.close()
            raise ClusterError(message["sentence"])
        if message["kind"] == "welcome":
            return message


def _await(link: Link, until: float) -> Message | None:
    """Return the next message; None when the connection has ended."""
    if messages := link.take_back():
        link.put_back(messages[1:])
        return messages[0]
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while (remaining := until - time.monotonic()) > 0:
            for _, events in selector.select(remaining):
                if events & selectors.EVENT_WRITE:
                    link.flush()
                    if not link.pending:
                        selector.modify(link, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    messages = link.receive()
                    if messages:
                        link.put_back(messages[1:])
                        return messages[0]
                    if link.closed:
                        return None
    raise TimeoutError
