"""Copies of local checkpoints between hosts: an HMAC-authenticated stream of sealed folders.

Each process serves the folders on its disk. A client proves the run's token by the handshake of the
control channel, names a folder, and receives its manifest and then its files in the manifest's
order. Every message has a counter and an HMAC, as on the control channel; the client compares the
files with their digests before the folder gets its name. Contents are not encrypted.
"""

import contextlib
import dataclasses
import hmac
import json
import os
import re
import shutil
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from jaxtrain.config.untrusted import parse_json
from jaxtrain.run.checkpoint import manifest
from jaxtrain.run.checkpoint.manifest import FILE, CheckpointError
from jaxtrain.run.cluster.authentication import (
    Handshake,
    MessageKey,
    UnauthenticatedError,
    client_handshake,
    server_handshake,
)
from jaxtrain.run.cluster.cluster import join_address, split_address
from jaxtrain.run.cluster.wire import RejectedClients, listen

_LENGTH, _MARK = 4, 32
_CHUNK = 1 << 20  # bytes of a file in a message
_MAX_BODY = 64 << 20  # a manifest of many arrays
_HANDSHAKE_SECONDS, _IDLE_SECONDS = 10.0, 60.0
_WRITE_SECONDS = 600.0  # for a peer to finish its write
_MOST_CLIENTS = 64
_NAME = re.compile(r"[0-9a-f]{16}")


class PeerError(OSError):
    """A peer does not have a folder, or its connection broke."""


@dataclasses.dataclass
class _Channel:
    """Authenticated messages over a blocking socket."""

    connection: socket.socket
    sending: MessageKey
    receiving: MessageKey

    @classmethod
    def open(cls, connection: socket.socket, handshake: Handshake) -> "_Channel":
        """Run the handshake.

        Raises:
          UnauthenticatedError: the peer does not have the token.
          OSError: the connection broke.
        """
        connection.settimeout(_HANDSHAKE_SECONDS)
        try:
            sent, wanted = next(handshake)
            while True:
                connection.sendall(sent)
                sent, wanted = handshake.send(_read_exactly(connection, wanted))
        except StopIteration as over:
            connection.settimeout(_IDLE_SECONDS)
            return cls(connection, *over.value)

    def send(self, body: bytes) -> None:
        self.connection.sendall(struct.pack("!I", len(body)) + self.sending.mark(body))
        self.connection.sendall(body)

    def receive(self) -> bytes:
        """Return the next message; OSError if it is damaged or there is none."""
        head = _read_exactly(self.connection, _LENGTH + _MARK)
        (length,) = struct.unpack_from("!I", head)
        if length > _MAX_BODY:
            raise PeerError("a peer announced a message that is too long")
        body = _read_exactly(self.connection, length)
        if not hmac.compare_digest(head[_LENGTH:], self.receiving.mark(body)):
            raise PeerError("a peer's message was changed, repeated or out of order")
        return body


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        read = connection.recv_into(view)
        if not read:
            raise PeerError("a peer closed its connection")
        view = view[read:]
    return bytes(content)


class PeerCopies:
    """Server of this process's sealed folders, and client of the others'.

    Attributes:
      address: HOST:PORT of the server.
    """

    def __init__(
        self, root: Path, token: bytes, host: str, report: Callable[[str], None] = lambda _: None
    ) -> None:
        """Start the server in a thread.

        Args:
          root: the local directory; nothing outside it is read.
          token: the run's secret.
          host: this machine's address.
          report: called with a line about unauthenticated clients, in another thread.

        Raises:
          OSError: no port can be opened.
        """
        self._root, self._token = root, token
        self._listening = listen(host, 0)
        self.address = join_address(host, self._listening.getsockname()[1])
        self._rejected = RejectedClients(report)
        self._written, self._changed = -1, threading.Condition()
        self._slots = threading.BoundedSemaphore(_MOST_CLIENTS)
        threading.Thread(target=self._accept, name="local-peers", daemon=True).start()

    def finish(self, step: int) -> None:
        """Answer clients that wait for a step, whose write is done or has failed; -1: all steps
        will be written again."""
        with self._changed:
            self._written = step
            self._changed.notify_all()

    def fetch(self, address: str, folder: Path, *, wait: bool = False) -> None:
        """Copy a folder from a peer, complete or not at all.

        Args:
          address: of the peer.
          folder: `<root>/<run>/<layout key>/<step>`, there and here.
          wait: for the peer to finish its write.

        Raises:
          OSError: the peer does not have it or cannot be reached, or there is no space.
          CheckpointError: what arrived differs from its digests.
        """
        step = int(folder.name)
        run, key = folder.parent.parent.name, folder.parent.name
        temporary = folder.with_name(f"{step}.{os.getpid()}.tmp")
        with contextlib.ExitStack() as stack:
            connection = socket.create_connection(split_address(address), _HANDSHAKE_SECONDS)
            stack.enter_context(connection)
            try:
                channel = _Channel.open(connection, client_handshake(self._token))
            except UnauthenticatedError as error:
                raise PeerError(str(error)) from error
            request = {"run": run, "key": key, "step": step, "wait": wait}
            channel.send(json.dumps(request).encode())
            connection.settimeout(_WRITE_SECONDS if wait else _IDLE_SECONDS)
            sealed = channel.receive()
            connection.settimeout(_IDLE_SECONDS)
            if not sealed:
                raise PeerError("the peer has no such checkpoint")
            temporary.mkdir(parents=True)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            (temporary / FILE).write_bytes(sealed)
            found = manifest.read(temporary, step)  # no name in it leads out of the folder
            for name, (size, _) in found.files.items():
                _receive_file(channel, temporary / name, size)
            manifest.check(temporary, found, found.files)
            if manifest.is_sealed(folder):  # by another process of this host
                return
            temporary.rename(folder)

    def close(self) -> None:
        """Stop the server."""
        # A thread in `accept` is woken by this, not by `close`.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    # -- the server's threads --------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                connection, (host, *_) = self._listening.accept()
            except OSError:
                return  # closed
            serving = (connection, str(host))
            threading.Thread(target=self._serve, args=serving, daemon=True).start()

    def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            # A peer that leaves reports it itself.
            with connection, contextlib.suppress(OSError, ValueError, KeyError, CheckpointError):
                channel = _Channel.open(connection, server_handshake(self._token))
                self._answer(channel)
        except UnauthenticatedError as error:
            self._rejected.note(host, str(error))
        finally:
            self._slots.release()

    def _answer(self, channel: _Channel) -> None:
        request = parse_json(channel.receive())
        run, key, step = str(request["run"]), str(request["key"]), int(request["step"])
        if not (_NAME.fullmatch(run) and _NAME.fullmatch(key)):
            raise ValueError("invalid names")
        folder = self._root / run / key / str(step)
        if request["wait"]:
            with self._changed:
                self._changed.wait_for(lambda: self._written >= step, _WRITE_SECONDS)
        if not manifest.is_sealed(folder):
            channel.send(b"")
            return
        found = manifest.read(folder, step)
        channel.send((folder / FILE).read_bytes())
        for name, (size, _) in found.files.items():
            _send_file(channel, folder / name, size)


def _send_file(channel: _Channel, path: Path, size: int) -> None:
    with path.open("rb") as file:
        while size > 0:
            content = file.read(min(_CHUNK, size))
            if not content:
                raise PeerError(f"{path} is shorter than its manifest says")
            channel.send(content)
            size -= len(content)


def _receive_file(channel: _Channel, path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while size > 0:
            content = channel.receive()
            if not content:
                raise PeerError("a peer sent an empty message")
            file.write(content)
            size -= len(content)
    if size < 0:
        raise PeerError("a peer sent more than its manifest says")
