"""`Cluster`: the processes of a run, as each of them sees it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.wire import split_address

Hello = Mapping[str, str | int]
Say = Callable[[str], None]

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
    """What the command line says about the processes of a run; None where it says nothing.

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
