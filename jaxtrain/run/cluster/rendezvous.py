"""Rendezvous of all processes before a run; reports missing, duplicate or differing processes."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.authentication import RunToken, client_handshake
from jaxtrain.run.cluster.cluster import (
    Announcement,
    Cluster,
    ClusterError,
    Reporter,
    join_address,
    name_processes,
    split_address,
)
from jaxtrain.run.cluster.wire import (
    Link,
    Listener,
    Message,
    free_port,
    is_free,
    is_local,
    is_taken,
)

T = TypeVar("T")

_RETRY_SECONDS = 0.3
_POLL_SECONDS = 0.05
_REPORT_SECONDS = 5.0
# After a failed rendezvous, process 0 sends the error to late processes for this time.
_LINGER_SECONDS = 2.0
# Timeout for messages of process 0, which sends one every _REPORT_SECONDS while it waits.
_QUIET_SECONDS = 30.0
# Timeout of a handshake with process 0.
_ANSWER_SECONDS = 10.0
# Process 0 creates the token file before it listens, but a network file system may show it later.
_TOKEN_SECONDS = 60.0


async def join_run(
    cluster: Cluster,
    hello: Announcement,
    opening: Message,
    *,
    token: RunToken,
    timeout_seconds: float,
    report: Reporter,
) -> tuple[Message, dict[int, Link], Listener | None]:
    """Wait until all processes of the cluster are connected, authenticated and consistent.

    Returns:
      The opening message of process 0, with all hosts and `jax_port`; the connections by process
      id (process 0 to every other process, each other process to process 0); and the server socket
      of process 0.

    Raises:
      UserError: the port is in use; two processes have the same id; the number of processes or the
        hello differ; or this process has no token, or a different one than process 0.
      ClusterError: a process is missing, or the coordinator cannot be reached.
    """
    assert cluster.coordinator is not None
    host, port = split_address(cluster.coordinator)
    own = _announcement(cluster, hello)
    if cluster.process_id:
        return await _join(cluster, own, token, timeout_seconds, report)
    secret = token.make()
    await _validate_second_coordinator(host, port, own, secret)
    try:
        listener = Listener(host, port, secret, room=cluster.num_processes, report=report)
    except OSError as error:
        why = "is already in use" if is_taken(error) else f"cannot be opened ({error.strerror})"
        free = free_port(host, port)
        raise UserError(
            f"coordinator {cluster.coordinator}: port {port} {why} on this machine; try a "
            f"free one, such as {free} (--coordinator {join_address(host, free)}, or "
            f"JAX_COORDINATOR_PORT={free}; the same for all processes)"
        ) from error
    try:
        links, hosts = await _HostSide(cluster, own, listener, report).gather(timeout_seconds)
    except BaseException:
        await listener.close()
        raise
    names = {str(process): name for process, name in hosts.items()}
    opening = {"kind": "welcome", "jax_port": free_port(host, port), "hosts": names, **opening}
    for link in links.values():
        link.send(opening)
    return opening, links, listener


def _announcement(cluster: Cluster, hello: Announcement) -> Message:
    return {
        "kind": "hello",
        "process_id": cluster.process_id,
        "num_processes": cluster.num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "hello": dict(hello),
    }


# -- process 0 -------------------------------------------------------------------------------------


class _HostSide:
    """Rendezvous on process 0, which waits for the others."""

    def __init__(
        self, cluster: Cluster, own: Message, listener: Listener, report: Reporter
    ) -> None:
        self._cluster, self._listener, self._report = cluster, listener, report
        self._hellos: dict[int, Message] = {0: own}
        self._links: dict[int, Link] = {}
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._error: Exception | None = None
        self._informed = 0
        self._decided = asyncio.Event()

    async def gather(self, timeout_seconds: float) -> tuple[dict[int, Link], dict[int, str]]:
        """Wait for all processes; on failure, send the error to the connected ones and raise it."""
        self._listener.admit = self._admit
        self._listener.start()
        try:
            await self._wait_for_all(timeout_seconds)
        except (UserError, ClusterError) as error:
            self._error = error
            await self._send_all_away(error)
            raise
        finally:
            for task in self._watching.values():
                task.cancel()
            await asyncio.gather(*self._watching.values(), return_exceptions=True)
        return self._links, {process: hello["host"] for process, hello in self._hellos.items()}

    async def _wait_for_all(self, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        reported = ""
        while self._missing() and self._error is None:
            left = until - time.monotonic()
            if left <= 0:
                raise ClusterError(self._missing_sentence(timeout_seconds))
            waiting = f"waiting for {name_processes(self._missing(), self._cluster.hosts)}"
            if waiting != reported:
                self._report(waiting)
            reported = waiting
            for link in self._links.values():
                link.send({"kind": "waiting"})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _REPORT_SECONDS)):
                    await self._decided.wait()
        if self._error is not None:
            raise self._error

    def _admit(self, link: Link, hello: Message) -> str | None:
        """Admit a process; return an error, which ends the rendezvous for all, or None."""
        process = hello["process_id"]
        if self._error is None:
            other = self._hellos.get(process)
            error = (
                duplicate_message(other, hello) if other else _difference(self._hellos[0], hello)
            )
            self._error = None if error is None else UserError(error)
        if self._error is not None:
            self._informed += 1
            self._decided.set()
            return str(self._error)
        self._hellos[process], self._links[process] = hello, link
        # From now on the process waits as long as this one does.
        link.send({"kind": "waiting"})
        self._watching[process] = asyncio.create_task(self._watch(process, link))
        if not self._missing():
            self._decided.set()
        return None

    async def _watch(self, process: int, link: Link) -> None:
        """Mark a process as missing again if it disconnects during the rendezvous."""
        while await link.receive():
            pass
        del self._links[process]
        host = self._hellos.pop(process)["host"]
        self._decided.clear()
        self._report(f"process {process} (host {host}) {link.closed}")
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
            sentence += f"; {host} is not an address of this machine: should process 0 run there?"
        rejected = self._listener.rejected
        if rejected.count:
            sentence += (
                f"; {rejected.count} connections without this run's token were rejected, the "
                f"last from {rejected.last}"
            )
        return sentence

    async def _send_all_away(self, error: Exception) -> None:
        """Send the error to the connected processes and, for _LINGER_SECONDS, to late ones."""
        kind = "refused" if isinstance(error, UserError) else "missing"
        for link in self._links.values():
            link.send({"kind": kind, "sentence": str(error)})
        others = self._cluster.num_processes - len(self._hellos)
        until = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < until and (
            self._listener.waiting or max(self._informed, 1) < others
        ):
            await asyncio.sleep(_POLL_SECONDS)
        for link in self._links.values():
            link.close()


def _difference(first: Message, other: Message) -> str | None:
    """Return a message on how another process differs from process 0; None if it does not."""
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
    """Return the message for two processes with the same id."""
    return (
        f"two processes have id {first['process_id']}: one on host {first['host']} (pid "
        f"{first.get('pid', '?')}), one on host {second['host']} (pid {second.get('pid', '?')}); "
        f"ids go from 0 to {first['num_processes'] - 1}, each once"
    )


async def _validate_second_coordinator(host: str, port: int, own: Message, secret: bytes) -> None:
    """Raise an error if another process 0 already listens at the coordinator's address.

    Raises:
      UserError: there is another process 0, which receives the error too.
    """
    if is_local(host) and is_free(host, port):
        return
    try:
        connection = socket.create_connection((host, port), timeout=2)
    except OSError:
        return
    with contextlib.closing(Link(connection)) as link:
        if not await _within(2, link.authenticate(client_handshake(secret))):
            return
        link.send(own)
        answer = await _within(2, link.receive())
        if answer is not None and answer["kind"] == "refused":
            raise UserError(answer["sentence"])


async def _within(seconds: float, result: Coroutine[Any, Any, T]) -> T | None:
    """Await a coroutine with a timeout; return its result, or None after the timeout."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(result, seconds)
    return None


# -- the others -----------------------------------------------------------------------------------


async def _join(
    cluster: Cluster, own: Message, token: RunToken, timeout_seconds: float, report: Reporter
) -> tuple[Message, dict[int, Link], None]:
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
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        secret = token.find()
        if secret is None:
            connection.close()
            if time.monotonic() > without_token_until:
                raise token.absent(cluster.coordinator, cluster.process_id)
            if without_token_until == float("inf"):
                without_token_until = now + min(_TOKEN_SECONDS, timeout_seconds / 2)
            why = "this process has no token yet"
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        link = Link(connection)
        seconds = min(until - time.monotonic(), _ANSWER_SECONDS)
        if await _within(seconds, link.authenticate(client_handshake(secret))):
            link.send(own)
            opening = await _receive_opening(link, until)
            if opening is not None:
                return opening, {0: link}, None
        link.close()
        if link.is_rejected:
            raise token.differs(cluster.coordinator, cluster.process_id)
        why = f"what listens there {link.closed or 'says nothing'}"
        await asyncio.sleep(_RETRY_SECONDS)


async def _receive_opening(link: Link, until: float) -> Message | None:
    """Wait for the opening message while process 0 reports that it waits; None if it stops."""
    message = await _within(until - time.monotonic(), link.receive())
    while message is not None and message["kind"] != "welcome":
        if message["kind"] in ("refused", "missing"):
            link.close()
            kind = UserError if message["kind"] == "refused" else ClusterError
            raise kind(message["sentence"])
        message = await _within(_QUIET_SECONDS, link.receive())
    return message
