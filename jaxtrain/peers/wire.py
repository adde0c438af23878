"""JSON lines over TCP between the processes of one run: links, the door they come in by, ports."""

import contextlib
import errno
import json
import re
import socket
import time
from typing import Any

from jaxtrain.errors import UserError

Message = dict[str, Any]

PROTOCOL = "jaxtrain-peers-1"
# The table of all processes is the longest message: some 200 bytes for each of them.
_MAX_LINE = 4 << 20
_HELLO_SECONDS = 10.0


class Link:
    """One non-blocking connection that carries a JSON object a line, both ways.

    Only the thread that owns it touches a link. A broken connection is no exception: `closed`
    says why, and what came before the break is still delivered.

    Attributes:
      socket: the connection.
      closed: why nothing comes any more; None while it is open.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.closed: str | None = None
        self._came, self._leaving = bytearray(), bytearray()
        self._put_back: list[Message] = []

    def fileno(self) -> int:
        """The file descriptor, for selectors."""
        return self.socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether bytes wait until the connection takes them."""
        return bool(self._leaving)

    def send(self, message: Message) -> None:
        """Queues a message and sends what the connection takes at once."""
        self._leaving += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what the connection takes; after a break the rest is forgotten."""
        try:
            while self._leaving:
                del self._leaving[: self.socket.send(self._leaving)]
        except BlockingIOError:
            return
        except OSError:
            # The reading side sees the same break and says why.
            self._leaving.clear()

    def receive(self) -> list[Message]:
        """The messages that have come; sets `closed` at the end of the stream or at nonsense."""
        try:
            while data := self.socket.recv(1 << 16):
                self._came += data
            self.closed = "closed its connection"
        except BlockingIOError:
            pass
        except OSError as error:
            self.closed = f"broke its connection ({error.strerror or error})"
        *lines, rest = self._came.split(b"\n")
        self._came = bytearray(rest)
        messages, self._put_back = self._put_back, []
        for line in lines:
            message = _parse(bytes(line))
            if message is None:
                self.closed = "sent what is no message of this program"
                break
            messages.append(message)
        if len(self._came) > _MAX_LINE:
            self.closed = "sent a line without end"
        return messages

    def put_back(self, messages: list[Message]) -> None:
        """Messages that the next `receive` shall give first; the socket does not announce them."""
        self._put_back = messages

    def take_back(self) -> list[Message]:
        """What was put back, without asking the socket."""
        messages, self._put_back = self._put_back, []
        return messages

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()


def _parse(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None


class Door:
    """The listening socket of process 0: who knocks and says hello is let in, others are dropped.

    Attributes:
      socket: the listening socket.
      waiting: connections that have not said hello yet, or that were refused and may still read
        why; each has the time at which it is dropped.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listens.

        Raises:
          OSError: the port cannot be bound.
        """
        self.socket = _listen(host, port)
        self.socket.setblocking(False)
        self.waiting: dict[Link, float] = {}
        self._refused: set[Link] = set()

    def accept(self) -> list[Link]:
        """New connections, which have said nothing yet."""
        found = []
        # A connection that is gone before it is accepted is an error of accept's too.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                link = Link(connection)
                self.waiting[link] = time.monotonic() + _HELLO_SECONDS
                found.append(link)
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

    def refuse(self, link: Link, sentence: str) -> None:
        """Tells a connection that was let in why it has to go; it is closed when it has read it."""
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
        and message.get("protocol") == PROTOCOL
        and all(isinstance(message.get(name), int) for name in ("process_id", "num_processes"))
        and isinstance(message.get("host"), str)
        and isinstance(message.get("hello"), dict)
    )


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
    """Where process 0 listens: a loopback address alone, else all interfaces.

    A host's name may resolve elsewhere to another of its addresses (cloud machines, pods).
    """
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def is_free(host: str, port: int) -> bool:
    """Whether process 0 of a coordinator on `host` could listen on the port now."""
    try:
        _listen(host, port).close()
    except OSError:
        return False
    return True


def free_port(host: str, after: int) -> int:
    """A port that can be bound now: one of the twenty after `after`, else any."""
    for port in range(after + 1, min(after + 21, 65536)):
        if is_free(host, port):
            return port
    with contextlib.closing(_listen(host, 0)) as listening:
        return listening.getsockname()[1]


def is_local(host: str) -> bool:
    """Whether one of the host's addresses belongs to this machine, as far as can be told."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _listen(host: str, port: int) -> socket.socket:
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
