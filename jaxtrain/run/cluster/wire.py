"""Authenticated JSON messages over TCP: connections, addresses, ports, process 0's server socket.

The resources of unauthenticated clients are limited: bytes read, connection time, number of
connections, and lines logged about them.
"""

import asyncio
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

from jaxtrain.run.cluster.authentication import (
    Handshake,
    MessageKey,
    OtherTokenError,
    UnauthenticatedError,
    server_handshake,
)

Message = dict[str, Any]

# The longest message is the table of all processes, with about 200 bytes per process.
_MAX_BODY = 4 << 20
_LENGTH, _MARK = 4, 32
_CHUNK = 1 << 16


class _Reader(asyncio.StreamReader):
    """StreamReader that still returns data received before a connection error.

    Attributes:
      error: the error that ended the stream; None if the peer closed it.
    """

    error: Exception | None = None

    def set_exception(self, exc: Exception) -> None:
        self.error = exc
        self.feed_eof()


class Link:
    """Bidirectional connection for HMAC-authenticated JSON objects, on one event loop.

    Each message consists of its length, its HMAC and its JSON text. A broken connection does not
    raise: `receive` returns the messages received before, then None, and `closed` is the reason.

    Attributes:
      socket: the socket.
      address: the IP address of the peer, without its port.
      closed: why no more messages can be received; None while the connection is open.
      is_silent: whether no byte was received yet.
      is_authenticated: whether both peers have proved that they have the run's token.
      is_rejected: whether the peers have different tokens.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Wrap a connected socket; messages can be sent after `authenticate`."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.address = "unknown"
        # The peer may have disconnected already.
        with contextlib.suppress(OSError):
            self.address = connection.getpeername()[0]
        self.closed: str | None = None
        self.is_silent, self.is_authenticated, self.is_rejected = True, False, False
        self._keys: tuple[MessageKey, MessageKey]
        self._reader: _Reader
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pending(self) -> bool:
        """Whether sent messages are still in the write buffer."""
        return self._writer is not None and self._writer.transport.get_write_buffer_size() > 0

    async def authenticate(self, handshake: Handshake) -> bool:
        """Run the handshake; return whether it succeeded (if not, `closed` is the reason)."""
        loop = asyncio.get_running_loop()
        try:
            sent, wanted = next(handshake)
            while True:
                await loop.sock_sendall(self.socket, sent)
                sent, wanted = handshake.send(await self._read_exactly(wanted))
        except StopIteration as over:
            self._keys = over.value
            self._reader = _Reader(limit=_CHUNK, loop=loop)
            protocol = asyncio.StreamReaderProtocol(self._reader, loop=loop)
            transport, _ = await loop.create_connection(lambda: protocol, sock=self.socket)
            self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)
            self.is_authenticated = True
        except UnauthenticatedError as error:
            self.closed, self.is_rejected = str(error), isinstance(error, OtherTokenError)
        except OSError as error:
            self.closed = _describe_break(error)
        return self.is_authenticated

    async def _read_exactly(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            data = await asyncio.get_running_loop().sock_recv(self.socket, count - len(received))
            if not data:
                raise UnauthenticatedError("closed its connection")
            self.is_silent = False
            received += data
        return received

    def send(self, message: Message) -> None:
        """Send or queue a message without blocking; a closed connection drops it."""
        assert self._writer is not None
        body = json.dumps(message, separators=(",", ":")).encode()
        sending, _ = self._keys
        if not self._writer.is_closing():
            self._writer.write(struct.pack("!I", len(body)) + sending.mark(body) + body)

    async def receive(self) -> Message | None:
        """Return the next message; None at the end of the stream or for an invalid message."""
        if self.closed is not None:
            return None
        _, receiving = self._keys
        message = None
        try:
            head = await self._reader.readexactly(_LENGTH + _MARK)
            (length,) = struct.unpack_from("!I", head)
            if length > _MAX_BODY:
                self.closed = "announced a message that is too long"
                return None
            body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            self.closed = _describe_break(self._reader.error)
        else:
            if not hmac.compare_digest(head[_LENGTH:], receiving.mark(body)):
                self.closed = "sent a message that was changed, repeated or out of order"
            elif (message := _parse(body)) is None:
                self.closed = "sent an invalid message"
        return message

    def finish(self) -> None:
        """Close the sending direction; the peer can still read the messages sent before."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write_eof()

    def close(self) -> None:
        """Close the connection after the queued messages are sent."""
        if self._writer is None:
            self.socket.close()
        else:
            self._writer.close()


def _describe_break(error: Exception | None) -> str:
    if error is None:
        return "closed its connection"
    return f"lost its connection ({getattr(error, 'strerror', None) or error})"


def _parse(body: bytes) -> Message | None:
    try:
        message = json.loads(body)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None


# -- addresses and ports ---------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address, which only the same machine can reach."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def bind_host(host: str) -> str:
    """Return the address to which process 0 binds: a local IP address, else all addresses.

    On other machines, a host name may resolve to another of its addresses (cloud machines, pods).
    """
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    with contextlib.suppress(ValueError):
        # A link-local address is ambiguous without its interface.
        if not ipaddress.ip_address(host).is_link_local and is_local(host):
            return host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def is_free(host: str, port: int) -> bool:
    """Return whether process 0 can bind the port of a coordinator on `host` now."""
    try:
        listen(host, port).close()
    except OSError:
        return False
    return True


def free_port(host: str, after: int) -> int:
    """Return a free port: one of the twenty after `after` if possible, else any."""
    for port in range(after + 1, min(after + 21, 65536)):
        if is_free(host, port):
            return port
    with contextlib.closing(listen(host, 0)) as listening:
        return listening.getsockname()[1]


def is_local(host: str) -> bool:
    """Return whether one of the host's addresses, as resolved here, belongs to this machine."""
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
    """Return a server socket at this port; one for all addresses accepts IPv4 and IPv6."""
    where = bind_host(host)
    if where == "::":
        return socket.create_server(
            (where, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    return socket.create_server((where, port), family=family, backlog=1024)


def is_taken(error: OSError) -> bool:
    """Return whether binding failed because the port is already in use."""
    return error.errno == errno.EADDRINUSE


# Timeout of the whole handshake and hello together, so that a slow client cannot extend it.
_HELLO_SECONDS = 10.0
# Pending connections in addition to one per process: all processes may connect at once.
_ROOM_FOR_STRANGERS = 128
_ACCEPT_RETRY_SECONDS = 0.05
_LINE_SECONDS = 3600.0


class RejectedClients:
    """Counter of unauthenticated clients, which reports them at most once per hour.

    Attributes:
      count: the number of rejected connections.
      last: the address of the last rejected client.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.count, self.last = 0, ""
        self._report = report
        self._reported = 0
        self._next = -float("inf")

    def note(self, address: str, why: str) -> None:
        """Count a rejected client; the report contains nothing that the client sent."""
        self.count, self.last = self.count + 1, address
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LINE_SECONDS
        many = self.count - self._reported
        self._reported = self.count
        who = "an unauthenticated client" if many == 1 else f"{many} unauthenticated clients"
        self._report(
            f"rejected {who} at this run's port ({address} {why}); the run continues, and others "
            "are reported once an hour"
        )


class Listener:
    """Server socket that admits clients which prove the token and send a hello.

    Attributes:
      admit: called with the link and the hello of a client; returns None to admit the client, or
        the reason for the rejection.
      waiting: connections that are not admitted yet, or are rejected and still reading the reason.
      rejected: the counter of unauthenticated clients.
      port: the bound port.
    """

    def __init__(
        self, host: str, port: int, token: bytes, *, room: int, report: Callable[[str], None]
    ) -> None:
        """Bind the port; `start` accepts connections.

        Args:
          host: the host of the coordinator.
          port: the port of the coordinator; 0 takes a free one.
          token: the run's token.
          room: the maximum number of pending connections, in addition to some for unauthenticated
            clients.
          report: called with each line about unauthenticated clients.

        Raises:
          OSError: the port cannot be bound.
        """
        self.admit: Callable[[Link, Message], str | None] = lambda link, hello: None
        self.waiting: dict[Link, asyncio.Task[None]] = {}
        self.rejected = RejectedClients(report)
        self._socket = listen(host, port)
        self.port = self._socket.getsockname()[1]
        self._socket.setblocking(False)
        self._token, self._room = token, room + _ROOM_FOR_STRANGERS
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to accept connections; if too many are pending, the oldest are dropped."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # yield to other tasks between consecutive clients
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:  # disconnected before the accept, or out of file descriptors
                await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            link = Link(connection)
            self.waiting[link] = loop.create_task(self._receive_hello(link))
            unproven = [one for one in self.waiting if not one.is_authenticated and not one.closed]
            for one in unproven[: max(len(unproven) - self._room, 0)]:
                one.closed = "made room for newer ones"
                self.waiting[one].cancel()

    async def _receive_hello(self, link: Link) -> None:
        is_admitted = False
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                hello = None
                if await link.authenticate(server_handshake(self._token)):
                    hello = await link.receive()
            if hello is not None and is_hello(hello):
                sentence = self.admit(link, hello)
                is_admitted = sentence is None
                if sentence is not None:
                    link.send({"kind": "refused", "sentence": sentence})
                    link.finish()
                    async with asyncio.timeout(_HELLO_SECONDS):
                        while await link.receive():
                            pass
        except TimeoutError:
            pass
        finally:
            del self.waiting[link]
            # A client that disconnects without sending a byte was only a port check.
            is_check = link.closed is not None and link.is_silent
            if self._accepting and not link.is_authenticated and not is_check:
                why = link.closed or f"did not authenticate within {_HELLO_SECONDS:g} s"
                self.rejected.note(link.address, why)
            if not is_admitted:
                link.close()

    async def close(self) -> None:
        """Stop listening and drop waiting clients."""
        tasks = [*self.waiting.values(), *filter(None, [self._accepting])]
        self._accepting = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()


def is_hello(message: Message) -> bool:
    """Return whether a message is a hello with all required fields."""
    return (
        message.get("kind") == "hello"
        and all(isinstance(message.get(name), int) for name in ("process_id", "num_processes"))
        and isinstance(message.get("host"), str)
        and isinstance(message.get("hello"), dict)
    )
