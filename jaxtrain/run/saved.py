"""Saved states of a run: restore the newest, go back to an earlier one, save."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxtrain.config.buckets import BucketPath, Place, require
from jaxtrain.data.source import Dataset
from jaxtrain.run import resume
from jaxtrain.run.ancestry import Ancestor, of_checkpoint
from jaxtrain.run.attempts.failure_rates import DEFAULT_MTBF_HOURS
from jaxtrain.run.attempts.folder import RunFolder
from jaxtrain.run.attempts.lock import require_not_held
from jaxtrain.run.attempts.phases import Phases
from jaxtrain.run.checkpoint import retention
from jaxtrain.run.checkpoint.leaves import OtherLeavesError
from jaxtrain.run.checkpoint.manifest import CheckpointError, UnreadError
from jaxtrain.run.checkpoint.save_schedule import (
    AutomaticInterval,
    FixedInterval,
    SaveSchedule,
)
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.metrics_file import METRICS_FILE
from jaxtrain.run.tracking.tracking import POSITION_FILES
from jaxtrain.run.weights import with_trained
from jaxtrain.training.exchange.exchange_program import ExchangeProgram
from jaxtrain.training.settings import Config
from jaxtrain.training.step import Program, TrainState


class SavedRun:
    """The checkpoints of one run's folder, restored into one program.

    A state comes with its position: the number of the batch that the next step takes. That is the
    state's step, and more by the batches that rewinds have skipped.

    Attributes:
      extra: what the checkpoint that was restored last says beside its state; None: none was.
      ancestors: what the run's first parameters came from, the nearest first.
      schedule: after which steps a state is saved.
    """

    def __init__(
        self,
        workdir: Place | None,
        config: Config,
        program: Program | ExchangeProgram,
        *,
        read_only: bool,
        report: Callable[[str], None],
        may_write: Callable[[], None],
        before_seal: Callable[[], None],
        phases: Phases,
    ) -> None:
        """Opens the checkpoints of a run.

        Args:
          workdir: the run's folder; None keeps no state.
          config: the run's configuration.
          program: what the states are restored into.
          read_only: nothing in workdir changes.
          report: takes what people should know: damage, a disk that fills up.
          may_write: raises where the folder belongs to another attempt by now.
          before_seal: brings what belongs to a state into the folder, before the state counts.
          phases: what this process is doing.
        """
        self._workdir, self._config, self._program = workdir, config, program
        self._read_only, self._report, self._phases = read_only, report, phases
        self.extra: dict[str, Any] | None = None
        self.ancestors: list[Ancestor] = []
        self._checkpoints = None
        if workdir is not None:
            if not read_only and jax.process_index() == 0:
                retention.reject_others(workdir)
            self._checkpoints = Checkpoints(
                workdir,
                config.checkpoint,
                read_only=read_only,
                report=report,
                may_write=may_write,
                before_seal=before_seal,
            )
            for line in self._checkpoints.cleaned:
                report(line)
        self.schedule = self._schedule()

    def _schedule(self) -> SaveSchedule:
        train, mtbf = self._config.train, self._config.checkpoint.mtbf
        if train.save_every != "auto":
            return FixedInterval(train.save_every)
        if self._checkpoints is None:
            return FixedInterval(0)
        hours = DEFAULT_MTBF_HOURS if mtbf is None else mtbf
        return AutomaticInterval(
            mtbf=hours * 3600 / self._program.layout.mesh.size,
            steps=train.steps,
            phases=self._phases,
            agree=_largest,
            say=self._report,
        )

    def of_step(self, step: int) -> tuple[TrainState, int]:
        """The state of a step, and its position, for looking at it.

        Raises:
          UserError: there is no complete checkpoint of this step; offers the nearest.
          CheckpointError: it is damaged.
        """
        with self._phases.phase("restore", step):
            return self._restore(step, None)

    def newest(self, open_data: Callable[[], Dataset]) -> tuple[TrainState, int]:
        """The newest good state and its position; a fresh one where there is no checkpoint.

        Args:
          open_data: the run's data; only asked for where the run goes on.

        Raises:
          UserError: the folder holds another run.
          CheckpointError: there are checkpoints, and none of them is good.
        """
        if self._checkpoints is None:
            return self._fresh(), 0
        return self._newest(None if self._read_only else open_data())

    def back_to(self, step: int, dataset: Dataset) -> tuple[TrainState, int]:
        """The newest good state at `step` or before it, and its position; later ones are removed.

        They stand on the way that is left: the run comes to their steps again, with other batches.
        """
        if self._checkpoints is None:
            return self._fresh(), 0
        self._checkpoints.drop_after(step)
        return self._newest(dataset)

    def _newest(self, dataset: Dataset | None) -> tuple[TrainState, int]:
        assert self._checkpoints is not None
        while True:
            with self._phases.phase("restore"):
                step = self._checkpoints.newest_good()
            if step is None:
                return self._fresh(), 0
            with self._phases.phase("restore", step):
                try:
                    return self._restore(step, dataset)
                except CheckpointError as error:
                    if self._read_only or isinstance(error, UnreadError):
                        raise
                    self._checkpoints.pass_over(step, error)

    def save(self, step: int, state: TrainState, *, next_batch: int, digest: str) -> None:
        """Saves a state and its position; the disk is written behind the next steps' back.

        Args:
          step: optimizer steps taken.
          state: the state after them.
          next_batch: the number of the batch that the next step takes.
          digest: the data's sha256.
        """
        if self._checkpoints is None:
            return
        extra = resume.describe(self._config, self._program, digest, next_batch, self.ancestors)
        with jax.transfer_guard("allow"):
            self._checkpoints.save(step, state, extra)

    def line(self, step: int) -> list[Ancestor]:
        """The ancestors of what is made of the state of `step`: its checkpoint first, if any."""
        if self._checkpoints is None or step not in self._checkpoints.steps():
            return self.ancestors
        assert self._workdir is not None, "checkpoints without a folder"
        return of_checkpoint(self._checkpoints, self._workdir, step)

    @property
    def keeps(self) -> bool:
        """Whether states are kept at all."""
        return self._checkpoints is not None

    def on_disk(self) -> int:
        """The step of the newest state that is complete there; 0 where there is none."""
        return (None if self._checkpoints is None else self._checkpoints.latest_step()) or 0

    def keep_best(self, steps: Sequence[int]) -> None:
        """From now on the checkpoint of the last of these steps that is saved stays."""
        if self._checkpoints is not None:
            self._checkpoints.keep_best(steps)

    def wait(self) -> None:
        """Returns when the last save is on disk and sealed; raises what went wrong with it."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def close(self) -> None:
        """Waits for the save in progress and lets go of the folder."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _fresh(self) -> TrainState:
        train, params = self._config.train, None
        if train.start_from is not None:
            from jaxtrain.run.start import ancestors_of, first_parameters, newest_step

            step = newest_step(train.start_from)
            params = first_parameters(
                train.start_from, self._config, self._program.plain, step=step
            )
            self.ancestors = ancestors_of(train.start_from, step, self._config.checkpoint)
            self._report(f"Parameters from {train.start_from}; everything else is fresh")
        return self._create(params)

    def _create(self, params: nnx.State | None) -> TrainState:
        if self._config.train.task.name == "distillation":
            from jaxtrain.run.start import with_teacher

            params = with_teacher(params, self._config, self._program.plain)
        state = self._program.create(self._config.train.seed, params)
        finetune = self._config.finetune
        if finetune.adapter is not None:
            from jaxtrain.run.huggingface.adapters import read_adapter

            adapter = read_adapter(finetune.adapter, self._config, self._program.plain)
            self._report(f"Adapters from {finetune.adapter}")
            state = with_trained(self._program, state, adapter)
        return state

    def _restore(self, step: int, dataset: Dataset | None) -> tuple[TrainState, int]:
        assert self._checkpoints is not None
        extra = self._checkpoints.extra(step)
        self.ancestors = extra.get("ancestors", [])  # none of a checkpoint from before they stood
        if extra.get("only_parameters"):
            from jaxtrain.run.start import restored_parameters

            params = restored_parameters(self._checkpoints, step, self._config, self._program.plain)
            self.extra = extra
            return self._create(params), 0
        if dataset is not None:
            resume.require_same_run(extra, self._config, dataset, step=step, workdir=self._workdir)
            for notes in (resume.other_settings, resume.other_rate):
                for note in notes(extra, self._config, step):
                    self._report(note)
        try:
            state = resume.restore(self._checkpoints, step, self._program)
        except OtherLeavesError as error:
            raise resume.with_settings(error, extra["config"], self._config) from error
        self.extra = extra
        return state, extra["data"]["next_batch"]


def _largest(values: Sequence[float]) -> Sequence[float]:
    """The largest of every process's value, for each; the same numbers on all of them."""
    if jax.process_count() == 1:
        return values
    gathered = multihost_utils.process_allgather(np.array(values, np.float32))
    return [float(value) for value in np.max(gathered, axis=0)]


def own_folder(workdir: Place, report: Callable[[str], None]) -> RunFolder:
    """The folder of a run that has no attempt of the command line's.

    Raises:
      UserError: another process is writing there, or the bucket cannot be reached.
    """
    if isinstance(workdir, BucketPath):
        require("workdir", workdir)
    require_not_held(workdir, report)
    return RunFolder(workdir, pull=[METRICS_FILE, *POSITION_FILES], report=report)
