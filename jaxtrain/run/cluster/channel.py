"""Control channel between the processes of a run, with a coordinator on process 0.

The coordinator collects lost processes, the first cause of a failure and the common stop step.
"""

import collections
import contextlib
import dataclasses
import selectors
import socket
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
    name_processes,
)
from jaxtrain.run.cluster.rendezvous import Rendezvous, duplicate_message, join_run
from jaxtrain.run.cluster.wire import Link, Message, is_loopback

# A process that only feels another's death reports an error of its own, often some milliseconds
# before that death is seen here: the loss is waited for before an error is called the cause.
_DOUBT_SECONDS = 0.5


class Coordinator:
    """The decisions of process 0, fed with messages and times; it opens no socket.

    Attributes:
      cause: the first cause; None while all is well.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        silence_seconds: float,
        send: Callable[[int, Message], None],
        now: float,
    ) -> None:
        """Begin with all processes there.

        Args:
          hosts: of all processes.
          silence_seconds: after this long without a word a process is lost.
          send: takes a message to a process; to 0 it is this process's own.
          now: the monotonic time in seconds, as everywhere here.
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
        """One message of a process."""
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
        """A connection ended; after a goodbye or a report of its own that is no loss."""
        suspected = self._suspected is not None and self._suspected[1].process_id == process
        if process not in self._gone and not suspected:
            self._settle(Cause("lost", process, self._hosts[process], why), now)

    def check(self, now: float) -> None:
        """Look for processes that are silent and settle what was in doubt for long enough."""
        for process, heard in self._heard.items():
            if process and process not in self._gone and now - heard > self._silence:
                why = f"silent for {self._silence:g} s"
                self._settle(Cause("lost", process, self._hosts[process], why), now)
        if self._suspected is not None and now > self._suspected[0]:
            self._settle(self._suspected[1], now)

    def mark_frozen(self, seconds: float, now: float) -> None:
        """This process itself did not run for so long that it is the one that was lost."""
        self._settle(Cause("lost", 0, self._hosts[0], f"stood still for {seconds:.0f} s"), now)

    def next_check(self) -> float:
        """When `check` will have a doubt to settle; infinity where there is none."""
        if self._suspected is None or self.cause is not None:
            return float("inf")
        return self._suspected[0]

    def table(self, now: float) -> Table:
        """Return what each process was last doing, and how long ago it reported."""
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
        """Send the table to all, so that everybody has it should this process be lost."""
        self._broadcast({"kind": "table", "table": _with_text_keys(self.table(now))})

    def missing(self) -> list[int]:
        """Processes that have not said goodbye."""
        return [process for process in self._hosts if process not in self._gone]

    def _begin_stop(self, reason: str) -> None:
        if self._stop_reason is None:
            self._stop_reason = reason
            self._broadcast({"kind": "ask"})
            self._agree()

    def _agree(self) -> None:
        """All have said at which tick they are, or have ended: the last of these is the target."""
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
        # This process last: its answer to a verdict may be its end.
        for process in sorted(self._hosts, reverse=True):
            self._send(process, message)


def _with_text_keys(table: Table) -> dict[str, Row]:
    return {str(process): row for process, row in table.items()}


def read_table(message: Message) -> Table:
    """Return the table of a message, its keys numbers again."""
    return {int(process): row for process, row in message["table"].items()}


# The table goes to all; with many processes less often, so that the traffic grows with their
# number and not with its square.
_TABLE_ROWS_PER_BEAT = 32
_FLUSH_SECONDS = 2.0
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
    """Wait until all processes of the cluster are there and agree; open the channel to them.

    Process 0 listens at the coordinator's address. Each process and process 0 prove to each other
    that they have the run's token, and every message is sealed with keys of its connection: who
    has no token cannot join, stop or disturb the run, nor change what others say unnoticed. He can
    read it. The messages are JSON, and nothing in them is executed.

    Args:
      cluster: who this process is and where process 0 listens.
      hello: what all processes must have alike: versions, a digest of the configuration.
      token: the run's.
      timeout_seconds: how long the others are waited for.
      report: called with a line on what is waited for, and later from the channel's own thread on
        unauthenticated clients at the port.
      welcome: what process 0 sends to all, an attempt number for example; the others' is not used.
      heartbeat_seconds: between two signs of life; process 0's counts.
      silence_seconds: after this long without one a process is lost; process 0's counts.

    Raises:
      UserError: the port is taken; two processes have one id; number of processes or hello differ:
        every process that is there gets the same sentence. This process has no token, or another
        than process 0.
      ClusterError: a process is missing, or the coordinator cannot be reached.
    """
    assert heartbeat_seconds * 2 <= silence_seconds
    if cluster.num_processes == 1:
        return OneProcess(welcome)
    rendezvous = join_run(
        cluster,
        hello,
        token=token,
        timeout_seconds=timeout_seconds,
        report=report,
        welcome=welcome or {},
        heartbeat_seconds=heartbeat_seconds,
        silence_seconds=silence_seconds,
    )
    return ManyProcesses(cluster.process_id, rendezvous)


class ManyProcesses(Peers):
    """One process among several: a thread that keeps the connections.

    The thread alone touches sockets; other threads leave messages in `_outbox` and wake it. A deque
    and a socket pair, because a signal handler may interrupt this same code at any point and a lock
    held there would never come free.
    """

    def __init__(self, process_id: int, rendezvous: Rendezvous) -> None:
        self.process_id, self.num_processes = process_id, len(rendezvous.hosts)
        self.hosts, self.welcome = rendezvous.hosts, rendezvous.welcome
        self.address = _address_here(rendezvous.links.values())
        self.jax_coordinator = rendezvous.jax_coordinator
        self.silence_seconds = rendezvous.silence_seconds
        self.cause = None
        self._heartbeat = rendezvous.heartbeat_seconds
        self._links, self._listener = rendezvous.links, rendezvous.listener
        self._listeners = Listeners()
        self._table: Table = {}
        self._outbox: collections.deque[Message] = collections.deque()
        self._changed = threading.Condition()
        self._tick = _BEFORE_FIRST_TICK
        self._asked, self._target, self._reason = False, None, ""
        self._ended = self._closing = False
        now = time.monotonic()
        self._heard_zero = self._last_turn = self._next_beat = now
        self._beats = 0
        self._coordinator = None
        if process_id == 0:
            self._coordinator = Coordinator(
                rendezvous.hosts, rendezvous.silence_seconds, self._send, now
            )
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._alarm = socket.socketpair()
        self._wake_up.setblocking(False)
        self._alarm.setblocking(False)
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
            while self._asked and self._target is None and self.cause is None:
                if not self._changed.wait(max(until - time.monotonic(), 0)):
                    raise ClusterError("the processes did not agree in time where to stop")
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
                self._changed.wait_for(lambda: self.cause or self._closing, _VERDICT_SECONDS)
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
            late = f"{who} did not come to the end within {timeout_seconds:g} s of this one"
            raise ClusterError(late if cause is None else str(cause))

    def close(self) -> None:
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, message: Message) -> None:
        self._outbox.append(message)
        self._wake()

    def _wake(self) -> None:
        # A full pair wakes just as well, and a closed one has nobody left to wake.
        with contextlib.suppress(OSError):
            self._alarm.send(b"!")

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._selector.register(self._wake_up, selectors.EVENT_READ)
            if self._listener is not None:
                self._selector.register(self._listener.socket, selectors.EVENT_READ)
                for link in self._listener.waiting:
                    self._selector.register(link, selectors.EVENT_READ, link)
            for process, link in self._links.items():
                self._selector.register(link, selectors.EVENT_READ, process)
                # What came together with the welcome is in no socket any more.
                self._receive_from(process, link)
            while not self._closing:
                self._turn()
            self._flush()
        finally:
            self._close_all()

    def _turn(self) -> None:
        until = self._next_beat
        if self._coordinator is not None:
            until = min(until, self._coordinator.next_check())
        ready = self._selector.select(max(until - time.monotonic(), 0))
        self._detect_stall()
        for key, _ in ready:
            if key.fileobj is self._wake_up:
                with contextlib.suppress(BlockingIOError):
                    self._wake_up.recv(4096)
            elif self._listener is not None and key.fileobj is self._listener.socket:
                for link in self._listener.accept():
                    self._selector.register(link, selectors.EVENT_READ, link)
            elif isinstance(key.data, Link):
                self._receive_from_newcomer(key.data)
            else:
                self._receive_from(key.data, self._links[key.data])
        while self._outbox:
            self._say(self._outbox.popleft())
        self._check_processes()
        for link in self._links.values():
            link.flush()
        if self._listener is not None:
            for link in self._listener.leavers():
                self._selector.unregister(link)
                link.close()

    def _say(self, message: Message) -> None:
        """Something this process has to tell: to process 0, which may be itself."""
        if message["kind"] == "listen":
            if self.cause is not None:
                self._notify_listeners()
        elif self._coordinator is not None:
            self._coordinator.receive(0, message, time.monotonic())
        else:
            self._links[0].send(message)

    def _detect_stall(self) -> None:
        """A process that was frozen finds the others gone: before it blames them, itself."""
        now = time.monotonic()
        still, self._last_turn = now - self._last_turn, now
        # The others count from its last sign of life, up to a heartbeat before it froze.
        if still < self.silence_seconds - self._heartbeat:
            return
        if self._coordinator is not None:
            self._coordinator.mark_frozen(still, now)
        else:
            self._settle_here("lost", self.process_id, f"stood still for {still:.0f} s")

    def _check_processes(self) -> None:
        """Heartbeats and silence."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat
            self._beats += 1
            self._say({"kind": "beat", "activity": self._listeners.activity()})
            rare = max(self.num_processes // _TABLE_ROWS_PER_BEAT, 1)
            if self._coordinator is not None and self._beats % rare == 0:
                self._coordinator.share_table(now)
            elif self._coordinator is not None:
                self._send_to_workers({"kind": "beat"})
        if self._coordinator is not None:
            self._coordinator.check(now)
        elif not self._ended and now - self._heard_zero > self.silence_seconds:
            self._settle_here("lost", 0, f"silent for {self.silence_seconds:g} s")

    def _receive_from(self, process: int, link: Link) -> None:
        for message in link.receive():
            if self._coordinator is not None:
                self._coordinator.receive(process, message, time.monotonic())
            else:
                self._heard_zero = time.monotonic()
                self._receive_from_coordinator(message)
        if link.closed:
            self._selector.unregister(link)
            if self._coordinator is not None:
                self._coordinator.mark_closed(process, link.closed, time.monotonic())
            elif not self._ended:
                self._settle_here("lost", 0, link.closed)

    def _receive_from_coordinator(self, message: Message) -> None:
        """Handle a decision of process 0; process 0 itself receives it too."""
        match message["kind"]:
            case "table":
                self._table = read_table(message)
            case "ask":
                with self._changed:
                    self._asked = True
                    tick = self._tick
                self._say({"kind": "at", "tick": tick})
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

    def _receive_from_newcomer(self, link: Link) -> None:
        """Somebody knocks after the rendezvous: a double, a leftover, or no process of ours."""
        assert self._listener is not None
        if link not in self._listener.waiting:
            return
        hello = self._listener.receive(link)
        if hello is None:
            return
        process = hello["process_id"]
        first = {
            "process_id": process,
            "num_processes": self.num_processes,
            "host": self.hosts.get(process, "none"),
        }
        sentence = f"the run has started with all its processes; {duplicate_message(first, hello)}"
        self._listener.reject(link, sentence)

    # -- sending ----------------------------------------------------------------------------------

    def _send(self, process: int, message: Message) -> None:
        if process == self.process_id:
            if message["kind"] == "verdict":
                # What the listeners do about it may be this process's end.
                self._flush()
            self._receive_from_coordinator(message)
        else:
            self._links[process].send(message)

    def _send_to_workers(self, message: Message) -> None:
        for link in self._links.values():
            link.send(message)

    def _flush(self) -> None:
        """Wait, for a moment, until the connections have taken what was sent."""
        until = time.monotonic() + _FLUSH_SECONDS
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                if link.pending and not link.closed:
                    selector.register(link, selectors.EVENT_WRITE, link)
            while selector.get_map() and (remaining := until - time.monotonic()) > 0:
                for key, _ in selector.select(remaining):
                    key.data.flush()
                    if not key.data.pending:
                        selector.unregister(key.data)

    def _close_all(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for link in self._links.values():
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._wake_up.close()
        self._alarm.close()


def _address_here(links: Iterable[Link]) -> str:
    """This machine's address by a connection to another machine; loopback if there is none."""
    for link in links:
        with contextlib.suppress(OSError):  # it may be gone already
            address = str(link.socket.getsockname()[0]).removeprefix("::ffff:")
            if not is_loopback(address):
                return address
    return "127.0.0.1"
