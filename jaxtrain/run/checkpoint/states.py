"""States of a run: the initial one, and the saved ones."""

import abc
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxtrain.config.buckets import AnyPath
from jaxtrain.data.source import Dataset
from jaxtrain.run.checkpoint.save_schedule import FixedInterval, SaveSchedule
from jaxtrain.run.phases import Phases
from jaxtrain.training.settings import Config
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step

if TYPE_CHECKING:
    from jaxtrain.run.checkpoint.metadata import Ancestor
    from jaxtrain.run.checkpoint.store import Checkpoints

_log = logging.getLogger(__name__)


class Initial(Protocol):
    """Makes the state that a run starts with, such as `run.initial_state.InitialState`."""

    def create(self) -> "tuple[TrainState, list[Ancestor]]":
        """Return the initial state and the ancestors of its parameters."""
        ...

    def from_parameters(self, checkpoints: "Checkpoints", step: int) -> TrainState:
        """Return an initial state with the parameters of a checkpoint that has nothing else."""
        ...


@dataclasses.dataclass(frozen=True)
class PeerAccess:
    """How this process exchanges local checkpoints with the others.

    Attributes:
      token: the run's secret; None: no copies on peers.
      address: of this machine.
      report: prints a line on this process's own terminal.
    """

    token: bytes | None = None
    address: str = "127.0.0.1"
    report: Callable[[str], None] = _log.warning


class RunStates(abc.ABC):
    """The states of one run, in the layout of its program.

    A state comes with its position: the index of the next step's batch. That is the
    state's step plus the batches that rewinds have skipped.

    Attributes:
      extra: metadata of the checkpoint that was restored last; None: none was.
      ancestors: origins of the run's initial parameters, the nearest first.
      schedule: the steps after which a state is saved.
      keeps: whether states are saved at all.
    """

    schedule: SaveSchedule
    keeps: bool

    def __init__(
        self,
        config: Config,
        program: Step,
        initial: Initial,
        report: Callable[[str], None],
    ) -> None:
        """Args: as of `states_of`."""
        self._config, self._program = config, program
        self._initial, self._report = initial, report
        self.extra: dict[str, Any] | None = None
        self.ancestors: list[Ancestor] = []

    @abc.abstractmethod
    def restore_step(self, step: int) -> tuple[TrainState, int]:
        """Return the state of a step, and its position, for inspection.

        Raises:
          UserError: there is no complete checkpoint of this step; names the nearest.
          CheckpointError: it is damaged.
        """

    @abc.abstractmethod
    def newest(self, open_data: Callable[[], Dataset]) -> tuple[TrainState, int]:
        """Return the newest good state and its position; a new one if there is no checkpoint.

        Args:
          open_data: opens the run's data; called only if the run resumes.

        Raises:
          UserError: the folder holds another run.
          CheckpointError: there are checkpoints, and none of them is good.
        """

    @abc.abstractmethod
    def rewind(self, step: int, dataset: Dataset) -> tuple[TrainState, int]:
        """Return the newest good state at `step` or before it, and its position; later ones are
        removed.

        They are on the abandoned path: the run reaches their steps again, with other batches.
        """

    @abc.abstractmethod
    def save(self, step: int, state: TrainState, *, next_batch: int, digest: str) -> None:
        """Save a state and its position; the disk is written while the next steps run.

        Args:
          step: optimizer steps taken.
          state: the state after them.
          next_batch: index of the next step's batch.
          digest: the data's sha256.
        """

    def is_due_locally(self, step: int) -> bool:
        """Whether a local checkpoint follows this step; equal on all processes."""
        del step
        return False

    def save_locally(self, step: int, state: TrainState, *, next_batch: int, digest: str) -> None:
        """Save a state on each host's own disk or in its memory; args: as of `save`."""
        raise AssertionError("no local checkpoints")

    @abc.abstractmethod
    def line(self, step: int) -> "list[Ancestor]":
        """Return the ancestors of what is made of the state of `step`: its checkpoint first, if
        any."""

    @abc.abstractmethod
    def on_disk(self) -> int:
        """Return the step of the newest complete state; 0 if there is none."""

    @abc.abstractmethod
    def keep_best(self, steps: Sequence[int]) -> None:
        """From now on keep the checkpoint of the last of these steps that is saved."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Return when the last save is on disk and sealed; raise its error, if any."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for the save in progress and close the folder."""

    def _first(self) -> TrainState:
        """Return the state that the run starts with."""
        state, self.ancestors = self._initial.create()
        return state


class InMemory(RunStates):
    """States of a run without a folder: none is saved."""

    keeps = False

    def __init__(
        self,
        config: Config,
        program: Step,
        initial: Initial,
        report: Callable[[str], None],
    ) -> None:
        """Args: as of `states_of`."""
        super().__init__(config, program, initial, report)
        period = config.train.save_every
        self.schedule = FixedInterval(0 if isinstance(period, str) else period)

    def restore_step(self, step: int) -> tuple[TrainState, int]:
        raise AssertionError(f"no checkpoint of step {step} without a folder")

    def newest(self, open_data: Callable[[], Dataset]) -> tuple[TrainState, int]:
        del open_data
        return self._first(), 0

    def rewind(self, step: int, dataset: Dataset) -> tuple[TrainState, int]:
        del step, dataset
        return self._first(), 0

    def save(self, step: int, state: TrainState, *, next_batch: int, digest: str) -> None:
        pass

    def line(self, step: int) -> "list[Ancestor]":
        del step
        return self.ancestors

    def on_disk(self) -> int:
        return 0

    def keep_best(self, steps: Sequence[int]) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


def states_of(
    workdir: AnyPath | None,
    config: Config,
    program: Step,
    initial: Initial,
    *,
    read_only: bool,
    report: Callable[[str], None],
    may_write: Callable[[], None],
    before_seal: Callable[[], None],
    phases: Phases,
    peers: PeerAccess = PeerAccess(),
) -> RunStates:
    """Return the states of a run.

    Args:
      workdir: the run's folder; None keeps no state.
      config: the run's configuration.
      program: what the states are restored into.
      initial: creates the state of a run without checkpoints.
      read_only: do not change anything in workdir.
      report: called with each warning: damage, a disk that fills up.
      may_write: raises if the folder belongs to another attempt by now.
      before_seal: copies files that belong to a state to the folder, before the state is sealed.
      phases: of this process.
      peers: for copies of local checkpoints.
    """
    if workdir is None:
        return InMemory(config, program, initial, report)
    # Imported here: a run without a folder does not need Orbax, which takes 0.3 s.
    from jaxtrain.run.checkpoint.saved import SavedRun

    return SavedRun(
        workdir, config, program, initial, read_only=read_only, report=report, may_write=may_write,
        before_seal=before_seal, phases=phases, peers=peers,
    )  # fmt: skip
