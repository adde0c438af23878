"""`Cluster`: the processes of a run; `Peers`: the interface to the others (failures, stops)."""

import abc
import dataclasses
import socket
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.wire import split_address

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
    """A process of the run is missing, lost or cannot be reached; the sentence names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Cluster options of the command line; None where one is not given.

    Attributes:
      coordinator: HOST:PORT where process 0 listens.
      num_processes: processes of the run.
      process_id: which of them this one is, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes of one run, as this process sees them.

    Attributes:
      kind: the launcher that was detected.
      coordinator: HOST:PORT where process 0 listens; None where there is one process.
      num_processes: processes of the run.
      process_id: which of them this one is, from 0.
      local_device_ids: the accelerators of this machine that this process takes; None: all.
      hosts: the host of each process, as far as known.
      found: how it was found, as one sentence to print.
    """

    kind: LaunchedBy = "alone"
    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0
    local_device_ids: tuple[int, ...] | None = None
    # A dict does not hash; two clusters that differ in it alone may share a hash.
    hosts: Mapping[int, str] = dataclasses.field(default_factory=dict, hash=False)
    found: str = "One process: nothing here says that there are more"

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
    """`processes 2, 3 (hosts c, d)`; the hosts where they are known."""
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
    """Why a run cannot go on: the first thing that went wrong in any process.

    Attributes:
      what: `lost`: a process ended without a goodbye or went silent; `failed`: it said why itself.
      process_id: the process.
      host: its host.
      why: what was seen, or its own reason.
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
      activity: what this process is doing, sent with each heartbeat; values JSON can carry.
      on_lost: a process ended without a goodbye or went silent: (process id, host, why, table of
        what each was doing). Its own id: this process stood still and the others went on.
      on_failed: another process said why it ends: (process id, host, reason).
    """

    activity: Callable[[], dict[str, Any]] = dict
    on_lost: Callable[[int, str, str, Table], None] = lambda process, host, why, table: None
    on_failed: Callable[[int, str, str], None] = lambda process, host, reason: None


class Peers(abc.ABC):
    """The processes of a run as one of them sees them; `OneProcess` is a run of one.

    Attributes:
      process_id: this process, from 0.
      num_processes: all of them.
      hosts: their hosts.
      address: this machine's in the connections to the others; loopback if all run here.
      welcome: what process 0 sent to all at the rendezvous.
      jax_coordinator: HOST:PORT for JAX's own coordinator; None for one process.
      silence_seconds: after this long without a word a process is lost.
      cause: the first thing that went wrong in any process; None while all is well.
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
        """Set the listeners; events that happened before are delivered at once."""

    @abc.abstractmethod
    def table(self) -> Table:
        """Return what each process was last doing, by process id."""

    @abc.abstractmethod
    def request_stop(self, reason: str) -> None:
        """Ask all to stop at one tick; safe in a signal handler; the first request counts."""

    @abc.abstractmethod
    def tick(self, number: int) -> str | None:
        """To be called before each tick of the main loop: None, or the reason to stop instead.

        Ticks (train steps and evaluation batches) are numbered upwards, alike on all processes.
        All processes get the reason at the same tick. While the last tick is being agreed on, this
        waits for it.

        Raises:
          ClusterError: a process is lost or failed, or there was no agreement in time.
        """

    @abc.abstractmethod
    def report_failure(self, reason: str) -> Cause:
        """Broadcast that this process ends with an error; return the FIRST cause in any process.

        That is another process's where this error only follows from it. Never blocks for long.
        """

    @abc.abstractmethod
    def goodbye(self, timeout_seconds: float = 60.0) -> None:
        """The orderly end: waits until all processes have come to theirs, and closes the channel.

        Raises:
          ClusterError: a process did not come to its end in time, or was lost on the way.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End the channel at once; without a goodbye the others take it for a loss."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OneProcess(Peers):
    """A run of one process: the same calls without sockets."""

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
