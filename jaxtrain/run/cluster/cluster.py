"""`Cluster`: the processes of a run; `Peers`: the interface to the others (failures, stops)."""

import abc
import dataclasses
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from jaxtrain.config.errors import UserError

Announcement = Mapping[str, str | int]
Reporter = Callable[[str], None]

LaunchedBy = Literal[
    "alone",
    "flags",
    "environment",
    "GKE TPU",
    "Kubernetes",
    "TPU VM",
    "Open MPI",
    "MPICH",
    "Slurm",
]


class ClusterError(RuntimeError):
    """A process of the run is missing, lost or cannot be reached; the message names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Cluster options of the command line; None if not set.

    Attributes:
      coordinator: HOST:PORT where process 0 listens.
      num_processes: the number of processes of the run.
      process_id: the id of this process, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processes of a run: their number, the id of this one, and the coordinator's address.

    Attributes:
      kind: the detected launcher.
      coordinator: HOST:PORT where process 0 listens; None for a single process.
      num_processes: the number of processes of the run.
      process_id: the id of this process, from 0.
      local_device_ids: the accelerators of this machine that this process uses; None for all.
      hosts: the host of each process, if known.
      found: how the cluster was detected, as a sentence to print.
    """

    kind: LaunchedBy = "alone"
    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0
    local_device_ids: tuple[int, ...] | None = None
    # A dict is not hashable; two clusters that differ only in it may have the same hash.
    hosts: Mapping[int, str] = dataclasses.field(default_factory=dict, hash=False)
    found: str = "One process: no other processes were detected"

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise UserError(f"{self.kind}: {self.num_processes} processes; there is at least 1")
        if not 0 <= self.process_id < self.num_processes:
            raise UserError(
                f"{self.kind}: process id {self.process_id} of {self.num_processes} processes; "
                f"ids go from 0 to {self.num_processes - 1}"
            )
        if self.coordinator is not None:
            split_address(self.coordinator)
        elif self.num_processes > 1:
            raise UserError(f"{self.kind}: {self.num_processes} processes need a coordinator")


def name_processes(processes: list[int], hosts: Mapping[int, str]) -> str:
    """Return `processes 2, 3 (hosts c, d)`, with the hosts if they are known."""
    known = [hosts[process] for process in processes if process in hosts]
    plural = "es" if len(processes) > 1 else ""
    sentence = f"process{plural} {', '.join(str(process) for process in processes)}"
    if known:
        sentence += f" (host{'s' if len(known) > 1 else ''} {', '.join(known)})"
    return sentence


Row = dict[str, Any]
Table = dict[int, Row]


@dataclasses.dataclass(frozen=True)
class Cause:
    """First cause of a run's failure, in any process.

    Attributes:
      what: `lost`: a process ended without a goodbye or became silent; `failed`: it reported an
        error itself.
      process_id: the id of the process.
      host: the host of the process.
      why: what was observed, or the reported error.
    """

    what: Literal["lost", "failed"]
    process_id: int
    host: str
    why: str

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}) {self.what}: {self.why}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listeners:
    """Callbacks for events of other processes; all are called on the channel's own thread.

    Attributes:
      activity: returns the activity of this process, JSON values that each heartbeat includes.
      on_lost: called if a process ended without a goodbye or became silent: (process id, host, why,
        table of all activities). This process's own id: it was frozen while the others continued.
      on_failed: called if another process reports an error: (process id, host, reason).
    """

    activity: Callable[[], dict[str, Any]] = dict
    on_lost: Callable[[int, str, str, Table], None] = lambda process, host, why, table: None
    on_failed: Callable[[int, str, str], None] = lambda process, host, reason: None


class Peers(abc.ABC):
    """Interface of a process to all processes of the run; `OneProcess` is for a single process.

    Attributes:
      process_id: the id of this process, from 0.
      num_processes: the number of processes.
      hosts: the host of each process.
      address: this machine's address in the connections to the others; loopback if all are local.
      welcome: the values that process 0 sent to all at the rendezvous.
      jax_coordinator: HOST:PORT for JAX's own coordinator; None for a single process.
      silence_seconds: a process is lost after this time without a message.
      cause: the first cause of a failure in any process; None without a failure.
    """

    process_id: int
    num_processes: int
    hosts: dict[int, str]
    address: str
    welcome: dict[str, str | int]
    jax_coordinator: str | None
    silence_seconds: float
    cause: Cause | None

    @abc.abstractmethod
    def listen(self, listeners: Listeners) -> None:
        """Set the listeners; earlier events are delivered immediately."""

    @abc.abstractmethod
    def table(self) -> Table:
        """Return the last reported activity of each process, by process id."""

    @abc.abstractmethod
    def request_stop(self, reason: str) -> None:
        """Request a stop of all processes at the same tick; safe in a signal handler.

        Only the first request of a run has an effect.
        """

    @abc.abstractmethod
    def tick(self, number: int) -> str | None:
        """Return None to continue with a tick of the main loop, or the reason to stop before it.

        Call it before each tick. Ticks (train steps and evaluation batches) have increasing
        numbers, equal on all processes. All processes receive the reason at the same tick. While
        they agree on the last tick, this call blocks.

        Raises:
          ClusterError: a process is lost or failed, or the processes did not agree in time.
        """

    @abc.abstractmethod
    def report_failure(self, reason: str) -> Cause:
        """Broadcast that this process ends with an error; return the FIRST cause in any process.

        The cause is another process's failure if this error only results from it. Blocks only
        briefly.
        """

    @abc.abstractmethod
    def goodbye(self, timeout_seconds: float = 60.0) -> None:
        """Shut down cleanly: wait until all processes are done, then close the channel.

        Raises:
          ClusterError: a process was not done in time, or was lost.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close the channel immediately; without a goodbye, the others treat this as a loss."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OneProcess(Peers):
    """Peers of a run with a single process: the same interface without sockets."""

    def __init__(self, welcome: "Announcement | None" = None) -> None:
        self.process_id, self.num_processes = 0, 1
        self.hosts = {0: socket.gethostname()}
        self.address = "127.0.0.1"
        self.welcome = dict(welcome or {})
        self.jax_coordinator = None
        self.silence_seconds = float("inf")
        self.cause = None
        self._listeners = Listeners()
        self._reason: str | None = None

    def listen(self, listeners: Listeners) -> None:
        self._listeners = listeners

    def table(self) -> Table:
        own = {"host": self.hosts[0], "seconds_ago": 0.0, "ended": False}
        return {0: {**own, **self._listeners.activity()}}

    def request_stop(self, reason: str) -> None:
        self._reason = self._reason or reason

    def tick(self, number: int) -> str | None:
        return self._reason

    def report_failure(self, reason: str) -> Cause:
        self.cause = self.cause or Cause("failed", 0, self.hosts[0], reason)
        return self.cause

    def goodbye(self, timeout_seconds: float = 60.0) -> None:
        pass

    def close(self) -> None:
        pass


def split_address(address: str) -> tuple[str, int]:
    """Split `'node1:8476'` or `'[fe80::1]:8476'` into host and port.

    Raises:
      UserError: the address is not HOST:PORT.
    """
    match = re.fullmatch(r"(?:\[([^\]\s]+)\]|([^:\s\[\]]+)):(\d{1,5})", address)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise UserError(
            f"coordinator address {address!r}: write HOST:PORT with a port from 1 to 65535, "
            "for example 'node1:8476'"
        )
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """Return host and port as `'node1:8476'` or `'[fe80::1]:8476'`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
