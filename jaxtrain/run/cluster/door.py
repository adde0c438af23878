"""Server socket of process 0: accepts authenticated members, rejects other clients.

The resources of an unauthenticated client are bounded: the bytes that are read from it, its time,
the number of its connections, and the lines that are logged about it.
"""

import contextlib
import socket
import time
from collections.abc import Callable

from jaxtrain.run.cluster.greeting import Host
from jaxtrain.run.cluster.wire import Link, Message, listen

# For a greeting and a hello, from the first byte to the last: one byte a second does not do.
_HELLO_SECONDS = 10.0
# Beside as many as there are processes, which may all come at once.
_ROOM_FOR_STRANGERS = 128
_ACCEPTED_AT_ONCE = 64
_LINE_SECONDS = 3600.0


class Strangers:
    """Counts who came to the port without the run's token; says so once in an hour at most.

    Attributes:
      count: connections that were turned away.
      last: the address of the last one.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.count, self.last = 0, ""
        self._report = report
        self._said = 0
        self._next = -float("inf")

    def note(self, address: str, why: str) -> None:
        """One more was turned away; nothing that he sent is repeated."""
        self.count, self.last = self.count + 1, address
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LINE_SECONDS
        many = self.count - self._said
        self._said = self.count
        who = "an unauthenticated client" if many == 1 else f"{many} unauthenticated clients"
        self._report(
            f"{who} at this run's port turned away ({address} {why}); the run goes on, and others "
            "are reported once an hour"
        )


class Door:
    """Listens; who proves the token and says hello is let in, others are dropped.

    Attributes:
      socket: the listening socket.
      waiting: connections that have not said hello yet, or that were rejected and may still read
        why; each has the time at which it is dropped.
      strangers: the unauthenticated clients that were turned away.
    """

    def __init__(
        self, host: str, port: int, token: bytes, *, room: int, report: Callable[[str], None]
    ) -> None:
        """Listens.

        Args:
          host: where.
          port: where.
          token: the run's.
          room: connections that are kept waiting at once, beside some for unauthenticated clients.
          report: takes a line about unauthenticated clients.

        Raises:
          OSError: the port cannot be bound.
        """
        self.socket = listen(host, port)
        self.socket.setblocking(False)
        self.waiting: dict[Link, float] = {}
        self.strangers = Strangers(report)
        self._token, self._room = token, room + _ROOM_FOR_STRANGERS
        self._refused: set[Link] = set()

    def accept(self) -> list[Link]:
        """New connections, which have said nothing yet; the oldest go where there are too many."""
        found = []
        # A connection that is gone before it is accepted is an error of accept's too.
        with contextlib.suppress(OSError):
            while len(found) < _ACCEPTED_AT_ONCE:
                connection, _ = self.socket.accept()
                link = Link(connection, Host(self._token))
                self.waiting[link] = time.monotonic() + _HELLO_SECONDS
                found.append(link)
        unproven = [link for link in self.waiting if not link.is_proven and link.closed is None]
        for link in unproven[: max(len(unproven) - self._room, 0)]:
            link.closed = "made room for newer ones"
        return found

    def hear(self, link: Link) -> Message | None:
        """The hello of a waiting connection once it is whole; anything else closes the link."""
        messages = link.receive()
        if link in self._refused or not messages:
            return None
        hello = messages[0]
        if is_hello(hello):
            del self.waiting[link]
            return hello
        link.closed = "does not speak this protocol"
        return None

    def reject(self, link: Link, sentence: str) -> None:
        """Send an authenticated connection the reason for its rejection; it is closed after reading
        it."""
        link.send({"kind": "refused", "sentence": sentence})
        with contextlib.suppress(OSError):
            link.socket.shutdown(socket.SHUT_WR)
        self._refused.add(link)
        self.waiting[link] = time.monotonic() + _HELLO_SECONDS

    def leavers(self) -> list[Link]:
        """Takes out the waiting connections that are closed or too slow; the caller closes them."""
        now = time.monotonic()
        gone = [link for link, until in self.waiting.items() if link.closed or now > until]
        for link in gone:
            del self.waiting[link]
            self._refused.discard(link)
            # Who connects and goes without a word looked whether somebody listens.
            if not link.is_proven and not (link.closed and link.is_silent):
                why = link.closed or f"proved nothing within {_HELLO_SECONDS:g} s"
                self.strangers.note(link.address, why)
        return gone

    def close(self) -> None:
        """Stops listening and drops who still waits."""
        self.socket.close()
        for link in self.waiting:
            link.close()
        self.waiting.clear()


def is_hello(message: Message) -> bool:
    """Whether a message is a hello of this protocol with all that a hello says."""
    return (
        message.get("kind") == "hello"
        and all(isinstance(message.get(name), int) for name in ("process_id", "num_processes"))
        and isinstance(message.get("host"), str)
        and isinstance(message.get("hello"), dict)
    )
