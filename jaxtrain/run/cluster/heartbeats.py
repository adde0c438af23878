"""Heartbeats between the supervisors of an elastic run, and the files of its generations."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.files import create, write_atomically
from jaxtrain.config.untrusted import parse_json
from jaxtrain.run.cluster.authentication import client_handshake
from jaxtrain.run.cluster.membership import Generation, Member, Membership
from jaxtrain.run.cluster.wire import Link, Listener, Message

HOSTS_FOLDER, GENERATIONS_FOLDER = "hosts", "generations"  # in attempts/
_INTERVAL_SECONDS = 0.5


class Heartbeats:
    """Server and clients of one supervisor's heartbeats, on a thread of their own.

    Attributes:
      port: where the other hosts reach it.
    """

    def __init__(
        self, address: str, token: bytes, *, seconds: float, report: Callable[[str], None]
    ) -> None:
        """Open a free port; `start` answers and sends.

        Args:
          address: this host's own.
          token: the run's secret.
          seconds: time limit of a connection or an answer.
          report: called with each line about unauthenticated clients.

        Raises:
          OSError: the address is not this host's.
        """
        self._listener = Listener(address, 0, token, room=1024, report=report)
        self.port = self._listener.port
        self._token, self._seconds = token, seconds
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._served: set[asyncio.Task[None]] = set()
        self._membership: Membership
        self._lock: threading.Lock
        self._clock: Callable[[], float]

    def start(
        self, membership: Membership, lock: threading.Lock, clock: Callable[[], float]
    ) -> None:
        """Answer and send heartbeats until `close`.

        Args:
          membership: gets the messages, with `lock` held.
          lock: guards it.
          clock: returns monotonic seconds.
        """
        self._membership, self._lock, self._clock = membership, lock, clock
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="heartbeats", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    async def _run(self) -> None:
        listener = self._listener
        listener.admit = self._admit
        listener.start()
        while not self._closing.is_set():
            with self._lock:
                targets = self._membership.targets()
            for gone in self._tasks.keys() - set(targets):
                self._tasks.pop(gone).cancel()
            for target in targets:
                if target not in self._tasks or self._tasks[target].done():
                    self._tasks[target] = asyncio.create_task(self._send_to(target))
            await asyncio.sleep(_INTERVAL_SECONDS / 5)
        tasks = [*self._tasks.values(), *self._served]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.close()

    def _admit(self, link: Link, hello: Message) -> None:
        task = asyncio.create_task(self._serve(link))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, link: Link) -> None:
        with contextlib.closing(link):
            while (message := await link.receive()) is not None:
                # A message of another version of this program ends the connection.
                with self._lock, contextlib.suppress(KeyError, TypeError):
                    link.send(self._membership.receive(message, self._clock()))
                    continue
                return

    async def _send_to(self, target: Member) -> None:
        """Connect and send heartbeats until an answer is missing; the next task tries again."""
        try:
            async with asyncio.timeout(self._seconds):
                link = Link(await _connect(target))
                is_ours = await link.authenticate(client_handshake(self._token))
        except (OSError, TimeoutError):
            await asyncio.sleep(_INTERVAL_SECONDS)
            return
        with contextlib.closing(link):
            if not is_ours:
                await asyncio.sleep(_INTERVAL_SECONDS)
                return
            hello = {"kind": "hello", "process_id": 0, "num_processes": 1, "hello": {}}
            link.send({**hello, "host": self._membership.me.name})
            while True:
                with self._lock:
                    message = self._membership.beat()
                link.send(message)
                answer = None
                with contextlib.suppress(TimeoutError):
                    answer = await asyncio.wait_for(link.receive(), self._seconds)
                if answer is None:
                    return
                with self._lock, contextlib.suppress(KeyError, TypeError):
                    self._membership.receive_answer(target.name, answer, self._clock())
                await asyncio.sleep(_INTERVAL_SECONDS)


async def _connect(target: Member) -> socket.socket:
    loop = asyncio.get_running_loop()
    kind = socket.SOCK_STREAM
    found = await loop.getaddrinfo(target.address, target.port, type=kind)
    family, _, _, _, address = found[0]
    connection = socket.socket(family, kind)
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


def read_hosts(folder: AnyPath) -> dict[str, Member]:
    """Return the registered hosts of a run by name.

    Args:
      folder: attempts/ in the run's folder.
    """
    found = {}
    for file in _files(folder / HOSTS_FOLDER):
        # Of another version of this program, or removed meanwhile.
        with contextlib.suppress(KeyError, TypeError, ValueError, FileNotFoundError):
            member = Member(**parse_json(file.read_bytes()))
            found[member.name] = member
    return found


def register(folder: AnyPath, member: Member) -> None:
    """Write a host's address for the others."""
    (folder / HOSTS_FOLDER).mkdir(parents=True, exist_ok=True)
    file = folder / HOSTS_FOLDER / f"{member.name}.json"
    write_atomically(file, (json.dumps(dataclasses.asdict(member)) + "\n").encode())


def read_newest(folder: AnyPath) -> Generation | None:
    """Return the newest generation of a run; None before the first."""
    files = {int(f.stem): f for f in _files(folder / GENERATIONS_FOLDER) if f.stem.isdecimal()}
    with contextlib.suppress(KeyError, TypeError, ValueError, FileNotFoundError):
        return Generation.from_json(parse_json(files[max(files)].read_bytes()))
    return None


def write_generation(folder: AnyPath, generation: Generation) -> None:
    """Create the file of a generation, unless another host has created one of its number."""
    file = folder / GENERATIONS_FOLDER / f"{generation.number}.json"
    create(file, (json.dumps(generation.to_json()) + "\n").encode())


def _files(folder: AnyPath) -> list[Any]:
    """Return the JSON files of a folder."""
    with contextlib.suppress(FileNotFoundError):
        return [file for file in folder.iterdir() if file.suffix == ".json"]
    return []
