"""Control channel between the processes of a run, with a coordinator on process 0.

The coordinator detects lost processes, records the first cause of a failure, and decides the common
step at which all processes stop.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from jaxtrain.run.cluster.authentication import RunToken
from jaxtrain.run.cluster.cluster import (
    Announcement,
    Cause,
    Cluster,
    ClusterError,
    Listeners,
    OneProcess,
    Peers,
    Reporter,
    Row,
    Table,
    join_address,
    name_processes,
    split_address,
)
from jaxtrain.run.cluster.rendezvous import duplicate_message, join_run
from jaxtrain.run.cluster.wire import (
    Link,
    Listener,
    Message,
    is_loopback,
)

# When a process dies, others may report secondary errors, often milliseconds before its death is
# detected here. So a reported error becomes the cause only after this delay without a lost process.
_DOUBT_SECONDS = 0.5


class Coordinator:
    """State machine of process 0, driven by messages and times, without I/O of its own.

    Attributes:
      cause: the first cause of a failure; None without a failure.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        silence_seconds: float,
        send: Callable[[int, Message], None],
        now: float,
    ) -> None:
        """Start with all processes connected.

        Args:
          hosts: the host of each process.
          silence_seconds: a process is lost after this time without a message.
          send: sends a message to a process; id 0 is this process itself.
          now: the monotonic time in seconds, like all times of this class.
        """
        self.cause: Cause | None = None
        self._hosts, self._silence, self._send = hosts, silence_seconds, send
        self._heard = dict.fromkeys(hosts, now)
        self._rows: dict[int, Row] = {process: {} for process in hosts}
        self._gone: dict[int, int] = {}
        self._suspected: tuple[float, Cause] | None = None
        self._stop_reason: str | None = None
        self._ticks: dict[int, int] = {}
        self._agreed = False

    def receive(self, process: int, message: Message, now: float) -> None:
        """Handle a message of a process."""
        self._heard[process] = now
        match message["kind"]:
            case "beat":
                self._rows[process] = message["activity"]
            case "stop":
                self._begin_stop(message["reason"])
            case "at":
                self._ticks[process] = message["tick"]
                self._agree()
            case "failed":
                cause = Cause("failed", process, self._hosts[process], message["reason"])
                if self._suspected is None:
                    self._suspected = (now + _DOUBT_SECONDS, cause)
            case "goodbye":
                self._gone[process] = message["tick"]
                self._agree()
                if len(self._gone) == len(self._hosts):
                    self._broadcast({"kind": "end"})

    def mark_closed(self, process: int, why: str, now: float) -> None:
        """Handle a closed connection: a loss, except after a goodbye or a reported failure."""
        suspected = self._suspected is not None and self._suspected[1].process_id == process
        if process not in self._gone and not suspected:
            self._settle(Cause("lost", process, self._hosts[process], why), now)

    def check(self, now: float) -> None:
        """Detect silent processes; confirm a reported failure after its delay."""
        for process, heard in self._heard.items():
            if process and process not in self._gone and now - heard > self._silence:
                why = f"silent for {self._silence:g} s"
                self._settle(Cause("lost", process, self._hosts[process], why), now)
        if self._suspected is not None and now >= self._suspected[0]:
            self._settle(self._suspected[1], now)

    def mark_frozen(self, seconds: float, now: float) -> None:
        """Record this process itself as lost, because it did not run for too long."""
        self._settle(Cause("lost", 0, self._hosts[0], f"stood still for {seconds:.0f} s"), now)

    def table(self, now: float) -> Table:
        """Return the last reported activity of each process and the time since its last message."""
        return {
            process: {
                "host": self._hosts[process],
                "seconds_ago": round(now - self._heard[process], 1),
                "ended": process in self._gone,
                **row,
            }
            for process, row in self._rows.items()
        }

    def share_table(self, now: float) -> None:
        """Send the table to all processes, so that they have it if this process is lost."""
        self._broadcast({"kind": "table", "table": _with_text_keys(self.table(now))})

    def missing(self) -> list[int]:
        """Return the processes that have not sent a goodbye."""
        return [process for process in self._hosts if process not in self._gone]

    def _begin_stop(self, reason: str) -> None:
        if self._stop_reason is None:
            self._stop_reason = reason
            self._broadcast({"kind": "ask"})
            self._agree()

    def _agree(self) -> None:
        """Broadcast the common stop tick, the latest of all, when each process has sent its own."""
        ticks = {**self._ticks, **self._gone}
        if self._stop_reason is None or self._agreed or len(ticks) < len(self._hosts):
            return
        self._agreed = True
        message = {"kind": "until", "tick": max(ticks.values()), "reason": self._stop_reason}
        self._broadcast(message)

    def _settle(self, cause: Cause, now: float) -> None:
        if self.cause is None:
            self.cause = cause
            table = _with_text_keys(self.table(now))
            self._broadcast({"kind": "verdict", **dataclasses.asdict(cause), "table": table})

    def _broadcast(self, message: Message) -> None:
        # This process is last, because it may exit when it handles a verdict.
        for process in sorted(self._hosts, reverse=True):
            self._send(process, message)


def _with_text_keys(table: Table) -> dict[str, Row]:
    return {str(process): row for process, row in table.items()}


def read_table(message: Message) -> Table:
    """Return the table of a message, with its keys converted back to integers."""
    return {int(process): row for process, row in message["table"].items()}


# The table is sent to all processes, less often if there are many, so that the traffic grows
# linearly with their number and not quadratically.
_TABLE_ROWS_PER_BEAT = 32
_FLUSH_SECONDS = 2.0
_POLL_SECONDS = 0.01
_VERDICT_SECONDS = 5.0
_BEFORE_FIRST_TICK = -1


def rendezvous(
    cluster: Cluster,
    hello: Announcement,
    *,
    token: RunToken,
    timeout_seconds: float = 300.0,
    report: Reporter = lambda line: None,
    welcome: Announcement | None = None,
    heartbeat_seconds: float = 2.0,
    silence_seconds: float = 30.0,
) -> Peers:
    """Run the rendezvous of all processes and open the control channel between them.

    Process 0 listens at the coordinator's address. Each process and process 0 prove to each other
    that they have the run's token. Every message is HMAC-authenticated with keys of its connection:
    a client without the token can read messages, but it cannot join, stop or disturb the run, nor
    modify messages unnoticed. Messages are JSON, and nothing in them is executed.

    Args:
      cluster: the id of this process and the address of process 0.
      hello: values that must be equal on all processes: versions, a digest of the configuration.
      token: the run's token.
      timeout_seconds: the time limit for all processes to arrive.
      report: called with a line on missing processes, and later from the channel's own thread on
        unauthenticated clients at the port.
      welcome: values that process 0 sends to all, such as an attempt number; ignored on others.
      heartbeat_seconds: the interval between heartbeats; the value of process 0 applies to all.
      silence_seconds: a process is lost after this time without a heartbeat; the value of process 0
        applies to all.

    Raises:
      UserError: the port is in use; two processes have the same id; the number of processes or the
        hello differ (every connected process receives the same message); or this process has no
        token, or a different one than process 0.
      ClusterError: a process is missing, or the coordinator cannot be reached.
    """
    assert heartbeat_seconds * 2 <= silence_seconds
    if cluster.num_processes == 1:
        return OneProcess(welcome)
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    opening: Message = {
        "welcome": dict(welcome or {}),
        "heartbeat_seconds": heartbeat_seconds,
        "silence_seconds": silence_seconds,
    }
    joining = join_run(
        cluster, hello, opening, token=token, timeout_seconds=timeout_seconds, report=report
    )
    try:
        # Not `Runner.run`: its Ctrl-C handler does not interrupt a connection attempt.
        opening, links, listener = runner.get_loop().run_until_complete(joining)
        return ManyProcesses(cluster, opening, links, listener, runner)
    except BaseException:
        runner.close()
        raise


class ManyProcesses(Peers):
    """Peers of a run with several processes; a thread runs the event loop of the connections.

    Only that thread uses the sockets. Other threads pass messages with `call_soon_threadsafe`,
    which takes no lock, because a signal handler may interrupt this code at any point.
    """

    def __init__(
        self,
        cluster: Cluster,
        opening: Message,
        links: dict[int, Link],
        listener: Listener | None,
        runner: asyncio.Runner,
    ) -> None:
        self.process_id, self.num_processes = cluster.process_id, cluster.num_processes
        self.hosts = {int(process): name for process, name in opening["hosts"].items()}
        self.welcome = opening["welcome"]
        self.address = _address_here(links.values())
        host, _ = split_address(cluster.coordinator or "")
        self.jax_coordinator = join_address(host, opening["jax_port"])
        self.silence_seconds = opening["silence_seconds"]
        self.cause = None
        self._heartbeat = opening["heartbeat_seconds"]
        self._links, self._listener = links, listener
        self._listeners = Listeners()
        self._table: Table = {}
        self._outbox = asyncio.Queue[Message]()
        self._changed = threading.Condition()
        self._tick = _BEFORE_FIRST_TICK
        self._stop_requested, self._target, self._reason = False, None, ""
        self._ended = False
        self._closing = asyncio.Event()
        now = time.monotonic()
        self._heard_zero = self._last_turn = now
        self._coordinator = None
        if self.process_id == 0:
            self._coordinator = Coordinator(self.hosts, self.silence_seconds, self._send, now)
        self._runner, self._loop = runner, runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="jaxtrain-peers", daemon=True)
        self._thread.start()

    # -- called by the program's threads -----------------------------------------------------------

    def listen(self, listeners: Listeners) -> None:
        self._listeners = listeners
        self._post({"kind": "listen"})

    def table(self) -> Table:
        return (
            self._table if self._coordinator is None else self._coordinator.table(time.monotonic())
        )

    def request_stop(self, reason: str) -> None:
        self._post({"kind": "stop", "reason": reason})

    def tick(self, number: int) -> str | None:
        until = time.monotonic() + self.silence_seconds + 10
        with self._changed:
            while self._stop_requested and self._target is None and self.cause is None:
                if not self._changed.wait(max(until - time.monotonic(), 0)):
                    raise ClusterError(
                        "the processes did not agree in time on the step at which to stop"
                    )
            if self.cause is not None:
                raise ClusterError(str(self.cause))
            if self._target is not None and number > self._target:
                return self._reason
            self._tick = number
            return None

    def report_failure(self, reason: str) -> Cause:
        self._post({"kind": "failed", "reason": reason})
        own = Cause("failed", self.process_id, self.hosts[self.process_id], reason)
        with self._changed:
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(
                    lambda: self.cause or self._closing.is_set(), _VERDICT_SECONDS
                )
            return self.cause or own

    def goodbye(self, timeout_seconds: float = 60.0) -> None:
        self._post({"kind": "goodbye", "tick": self._tick})
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.cause, timeout=timeout_seconds)
        ended, cause = self._ended, self.cause
        missing = [] if self._coordinator is None else self._coordinator.missing()
        self.close()
        if not ended:
            who = name_processes(missing, self.hosts) if missing else "another process"
            late = f"{who} did not finish within {timeout_seconds:g} s of this process"
            raise ClusterError(late if cause is None else str(cause))

    def close(self) -> None:
        self._call(self._closing.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, message: Message) -> None:
        self._call(self._outbox.put_nowait, message)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._runner):
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        if self._listener is not None:
            self._listener.admit = self._reject_newcomer
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                tasks = [group.create_task(self._read(*one)) for one in self._links.items()]
                tasks += [group.create_task(self._beat()), group.create_task(self._send_outbox())]
                await self._closing.wait()
                await self._flush()
                for task in tasks:
                    task.cancel()
        finally:
            self._closing.set()
            with self._changed:
                self._changed.notify_all()
            for link in self._links.values():
                link.close()
            if self._listener is not None:
                await self._listener.close()

    async def _send_outbox(self) -> None:
        while True:
            message = await self._outbox.get()
            self._detect_stall()
            self._send_to_root(message)

    def _send_to_root(self, message: Message) -> None:
        """Send a message to process 0, which may be this process."""
        if message["kind"] == "listen":
            if self.cause is not None:
                self._notify_listeners()
        elif self._coordinator is not None:
            self._coordinate(0, message)
        else:
            self._links[0].send(message)

    def _coordinate(self, process: int, message: Message) -> None:
        assert self._coordinator is not None
        self._coordinator.receive(process, message, time.monotonic())
        if message["kind"] == "failed":
            self._group.create_task(self._check_after_doubt())

    async def _check_after_doubt(self) -> None:
        await asyncio.sleep(_DOUBT_SECONDS)
        self._check_processes()

    def _detect_stall(self) -> None:
        """Detect that this process was frozen, before it reports the other processes as lost."""
        now = time.monotonic()
        still, self._last_turn = now - self._last_turn, now
        # The others measure from its last heartbeat, up to one interval before the freeze.
        if still < self.silence_seconds - self._heartbeat:
            return
        if self._coordinator is not None:
            self._coordinator.mark_frozen(still, now)
        else:
            self._settle_here("lost", self.process_id, f"stood still for {still:.0f} s")

    async def _beat(self) -> None:
        """Send heartbeats and check those of the others, periodically."""
        rare = max(self.num_processes // _TABLE_ROWS_PER_BEAT, 1)
        for count in itertools.count(1):
            self._detect_stall()
            self._send_to_root({"kind": "beat", "activity": self._listeners.activity()})
            if self._coordinator is not None and count % rare == 0:
                self._coordinator.share_table(time.monotonic())
            elif self._coordinator is not None:
                for link in self._links.values():
                    link.send({"kind": "beat"})
            self._check_processes()
            await asyncio.sleep(self._heartbeat)

    def _check_processes(self) -> None:
        now = time.monotonic()
        if self._coordinator is not None:
            self._coordinator.check(now)
        elif not self._ended and now - self._heard_zero > self.silence_seconds:
            self._settle_here("lost", 0, f"silent for {self.silence_seconds:g} s")

    async def _read(self, process: int, link: Link) -> None:
        """Handle messages of a connection until it closes."""
        while message := await link.receive():
            self._detect_stall()
            if self._coordinator is not None:
                self._coordinate(process, message)
            else:
                self._heard_zero = time.monotonic()
                self._receive_from_coordinator(message)
        self._detect_stall()
        assert link.closed is not None
        if self._coordinator is not None:
            self._coordinator.mark_closed(process, link.closed, time.monotonic())
        elif not self._ended:
            self._settle_here("lost", 0, link.closed)

    def _receive_from_coordinator(self, message: Message) -> None:
        """Handle a message from process 0; process 0 also handles its own."""
        match message["kind"]:
            case "table":
                self._table = read_table(message)
            case "ask":
                with self._changed:
                    self._stop_requested = True
                    tick = self._tick
                self._send_to_root({"kind": "at", "tick": tick})
            case "until":
                with self._changed:
                    self._target, self._reason = message["tick"], message["reason"]
                    self._changed.notify_all()
            case "end":
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
            case "verdict":
                self._table = read_table(message)
                self._settle_here(
                    message["what"], message["process_id"], message["why"], message["host"]
                )

    def _settle_here(
        self, what: Literal["lost", "failed"], process: int, why: str, host: str | None = None
    ) -> None:
        with self._changed:
            if self.cause is not None:
                return
            self.cause = Cause(what, process, host or self.hosts[process], why)
            self._changed.notify_all()
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        cause = self.cause
        assert cause is not None
        if cause.what == "lost":
            self._listeners.on_lost(cause.process_id, cause.host, cause.why, self._table)
        elif cause.process_id != self.process_id:
            self._listeners.on_failed(cause.process_id, cause.host, cause.why)

    def _reject_newcomer(self, link: Link, hello: Message) -> str:
        """Return why a process that connects after the rendezvous is rejected."""
        process = hello["process_id"]
        first = {
            "process_id": process,
            "num_processes": self.num_processes,
            "host": self.hosts.get(process, "none"),
        }
        return f"the run has started with all its processes; {duplicate_message(first, hello)}"

    # -- sending ----------------------------------------------------------------------------------

    def _send(self, process: int, message: Message) -> None:
        if process != self.process_id:
            self._links[process].send(message)
        elif message["kind"] == "verdict":
            self._group.create_task(self._receive_verdict(message))
        else:
            self._receive_from_coordinator(message)

    async def _receive_verdict(self, message: Message) -> None:
        # The listeners may end this process.
        await self._flush()
        self._receive_from_coordinator(message)

    async def _flush(self) -> None:
        """Wait up to _FLUSH_SECONDS until the write buffers are empty."""
        until = time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < until and any(link.pending for link in self._links.values()):
            await asyncio.sleep(_POLL_SECONDS)


def _address_here(links: Iterable[Link]) -> str:
    """Return this machine's address in a connection to another machine; loopback without one."""
    for link in links:
        with contextlib.suppress(OSError):  # the connection may be closed already
            address = str(link.socket.getsockname()[0]).removeprefix("::ffff:")
            if not is_loopback(address):
                return address
    return "127.0.0.1"
