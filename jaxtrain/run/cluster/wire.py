"""Authenticated JSON messages over TCP: links, addresses, ports, and process 0's server socket.

The resources of an unauthenticated client are bounded: the bytes that are read from it, its time,
the number of its connections, and the lines that are logged about it.
"""

import contextlib
import errno
import hmac
import ipaddress
import json
import re
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.authentication import Handshake, ServerHandshake, UnauthenticatedError

Message = dict[str, Any]

# The table of all processes is the longest message: some 200 bytes for each of them.
_MAX_BODY = 4 << 20
_LENGTH, _MARK = 4, 32
# Read in one go: one end that never stops shall not keep the others waiting.
_READ_AT_ONCE = 1 << 20
_CHUNK = 1 << 16


class Link:
    """One non-blocking connection that carries JSON objects, sealed, both ways.

    Each message is its length, its mark and its text. Only the thread that owns it touches a link.
    A broken connection is no exception: `closed` says why, and what came before the break is still
    delivered.

    Attributes:
      socket: the connection.
      address: the other end's, without its port.
      closed: why nothing comes any more; None while it is open.
      is_silent: whether nothing ever came.
    """

    def __init__(self, connection: socket.socket, handshake: Handshake) -> None:
        """Begin the handshake; messages can be sent once it is over, see `is_proven`."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.address = "unknown"
        # It may be gone already.
        with contextlib.suppress(OSError):
            self.address = connection.getpeername()[0]
        self.closed: str | None = None
        self.is_silent = True
        self._handshake = handshake
        self._came, self._leaving = bytearray(), bytearray()
        self._put_back: list[Message] = []
        self._queue(handshake.begin())

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self.socket.fileno()

    @property
    def is_proven(self) -> bool:
        """Whether both ends have proved that they have the run's token."""
        return self._handshake.message_keys is not None

    @property
    def is_rejected(self) -> bool:
        """Whether the ends have different tokens."""
        return self._handshake.is_rejected

    @property
    def pending(self) -> bool:
        """Whether bytes wait until the connection takes them."""
        return bool(self._leaving)

    def send(self, message: Message) -> None:
        """Queue a message and send what the connection takes at once."""
        assert self._handshake.message_keys is not None
        body = json.dumps(message, separators=(",", ":")).encode()
        sending, _ = self._handshake.message_keys
        self._queue(struct.pack("!I", len(body)) + sending.mark(body) + body)

    def _queue(self, data: bytes) -> None:
        self._leaving += data
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes; after a break the rest is forgotten."""
        try:
            while self._leaving:
                del self._leaving[: self.socket.send(self._leaving)]
        except BlockingIOError:
            return
        except OSError:
            # The reading side sees the same break and says why.
            self._leaving.clear()

    def receive(self) -> list[Message]:
        """Return the messages that have come; sets `closed` at the end of the stream or at
        nonsense."""
        remaining = _READ_AT_ONCE
        try:
            while self.closed is None and remaining > 0:
                data = self.socket.recv(self._events())
                if not data:
                    self.closed = "closed its connection"
                remaining -= len(data)
                self.is_silent = self.is_silent and not data
                self._came += data
                if self._handshake.wants:
                    self._advance_handshake()
        except BlockingIOError:
            pass
        except OSError as error:
            self.closed = f"broke its connection ({error.strerror or error})"
        messages, self._put_back = self._put_back, []
        if self.is_proven:
            messages += self._unpack()
        return messages

    def _events(self) -> int:
        wants = self._handshake.wants
        return wants - len(self._came) if wants else _CHUNK

    def _advance_handshake(self) -> None:
        """Take the handshake one step on, when what it waits for is whole."""
        if len(self._came) < self._handshake.wants:
            return
        received = bytes(self._came)
        self._came.clear()
        try:
            self._queue(self._handshake.receive(received))
        except UnauthenticatedError as error:
            self.closed = str(error)
        else:
            if self._handshake.is_rejected:
                self.closed = "could not prove this run's token"

    def _unpack(self) -> list[Message]:
        assert self._handshake.message_keys is not None
        _, receiving = self._handshake.message_keys
        messages = []
        while len(self._came) >= _LENGTH + _MARK:
            (length,) = struct.unpack_from("!I", self._came)
            end = _LENGTH + _MARK + length
            if length > _MAX_BODY:
                self._give_up("announced a message that is too long")
            elif len(self._came) < end:
                break
            else:
                mark = bytes(self._came[_LENGTH : _LENGTH + _MARK])
                body = bytes(self._came[_LENGTH + _MARK : end])
                del self._came[:end]
                if not hmac.compare_digest(mark, receiving.mark(body)):
                    self._give_up("sent a message that was changed, repeated or out of order")
                elif (message := _parse(body)) is None:
                    self._give_up("sent what is no message of this program")
                else:
                    messages.append(message)
        return messages

    def _give_up(self, why: str) -> None:
        """Nothing that comes after this is looked at."""
        self.closed = why
        self._came.clear()

    def put_back(self, messages: list[Message]) -> None:
        """Messages that the next `receive` shall give first; the socket does not announce them."""
        self._put_back = messages

    def take_back(self) -> list[Message]:
        """Return the messages that were put back, without reading the socket."""
        messages, self._put_back = self._put_back, []
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def _parse(body: bytes) -> Message | None:
    try:
        message = json.loads(body)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None


# -- addresses and ports ---------------------------------------------------------------------------


def split_address(address: str) -> tuple[str, int]:
    """`'node1:8476'` or `'[fe80::1]:8476'` as host and port.

    Raises:
      UserError: it is no HOST:PORT.
    """
    match = re.fullmatch(r"(?:\[([^\]\s]+)\]|([^:\s\[\]]+)):(\d{1,5})", address)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise UserError(
            f"coordinator address {address!r}: write HOST:PORT with a port from 1 to 65535, "
            "for example 'node1:8476'"
        )
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """Host and port as `'node1:8476'` or `'[fe80::1]:8476'`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a coordinator on this host can be reached from the same machine only."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def bind_host(host: str) -> str:
    """Where process 0 listens: at an address of this machine alone, for a name at all of them.

    A host's name may resolve elsewhere to another of its addresses (cloud machines, pods).
    """
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    with contextlib.suppress(ValueError):
        # A link-local address means nothing without its interface.
        if not ipaddress.ip_address(host).is_link_local and is_local(host):
            return host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def is_free(host: str, port: int) -> bool:
    """Whether process 0 of a coordinator on `host` could listen on the port now."""
    try:
        listen(host, port).close()
    except OSError:
        return False
    return True


def free_port(host: str, after: int) -> int:
    """Return a port that can be bound now: one of the twenty after `after`, else any."""
    for port in range(after + 1, min(after + 21, 65536)):
        if is_free(host, port):
            return port
    with contextlib.closing(listen(host, 0)) as listening:
        return listening.getsockname()[1]


def is_local(host: str) -> bool:
    """Return whether one of the host's addresses belongs to this machine, as far as is known."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections at this port, of IPv4 too where all addresses are
    meant."""
    where = bind_host(host)
    if where == "::":
        return socket.create_server(
            (where, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    return socket.create_server((where, port), family=family, backlog=1024)


def is_taken(error: OSError) -> bool:
    """Whether binding failed because somebody else has the port."""
    return error.errno == errno.EADDRINUSE


# For a handshake and a hello, from the first byte to the last: one byte a second does not do.
_HELLO_SECONDS = 10.0
# Beside as many as there are processes, which may all come at once.
_ROOM_FOR_STRANGERS = 128
_ACCEPTED_AT_ONCE = 64
_LINE_SECONDS = 3600.0


class RejectedClients:
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


class Listener:
    """Listens; who proves the token and says hello is let in, others are dropped.

    Attributes:
      socket: the listening socket.
      waiting: connections that have not said hello yet, or that were rejected and may still read
        why; each has the time at which it is dropped.
      rejected: the unauthenticated clients that were turned away.
    """

    def __init__(
        self, host: str, port: int, token: bytes, *, room: int, report: Callable[[str], None]
    ) -> None:
        """Listen.

        Args:
          host: where.
          port: where.
          token: the run's.
          room: connections that are kept waiting at once, in addition to some for unauthenticated
            clients.
          report: called with a line about unauthenticated clients.

        Raises:
          OSError: the port cannot be bound.
        """
        self.socket = listen(host, port)
        self.socket.setblocking(False)
        self.waiting: dict[Link, float] = {}
        self.rejected = RejectedClients(report)
        self._token, self._room = token, room + _ROOM_FOR_STRANGERS
        self._refused: set[Link] = set()

    def accept(self) -> list[Link]:
        """New connections, which have said nothing yet; the oldest go where there are too many."""
        found = []
        # A connection that is gone before it is accepted is an error of accept's too.
        with contextlib.suppress(OSError):
            while len(found) < _ACCEPTED_AT_ONCE:
                connection, _ = self.socket.accept()
                link = Link(connection, ServerHandshake(self._token))
                self.waiting[link] = time.monotonic() + _HELLO_SECONDS
                found.append(link)
        unproven = [link for link in self.waiting if not link.is_proven and link.closed is None]
        for link in unproven[: max(len(unproven) - self._room, 0)]:
            link.closed = "made room for newer ones"
        return found

    def receive(self, link: Link) -> Message | None:
        """Return the hello of a waiting connection once it is whole; anything else closes the
        link."""
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
        """Take out the waiting connections that are closed or too slow; the caller closes them."""
        now = time.monotonic()
        gone = [link for link, until in self.waiting.items() if link.closed or now > until]
        for link in gone:
            del self.waiting[link]
            self._refused.discard(link)
            # Who connects and goes without a word looked whether somebody listens.
            if not link.is_proven and not (link.closed and link.is_silent):
                why = link.closed or f"proved nothing within {_HELLO_SECONDS:g} s"
                self.rejected.note(link.address, why)
        return gone

    def close(self) -> None:
        """Stop listening and drop who still waits."""
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
