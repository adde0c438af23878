"""Checkpoints of a run's folder: restore the newest, go back to an earlier one, save."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.config.buckets import Place
from jaxtrain.data.source import Dataset
from jaxtrain.run.attempts.phases import Phases
from jaxtrain.run.checkpoint import metadata, retention
from jaxtrain.run.checkpoint.ancestry import Ancestor, of_checkpoint
from jaxtrain.run.checkpoint.leaves import OtherLeavesError
from jaxtrain.run.checkpoint.manifest import CheckpointError, UnreadError
from jaxtrain.run.checkpoint.restore import restore
from jaxtrain.run.checkpoint.save_schedule import AutomaticInterval, FixedInterval, SaveSchedule
from jaxtrain.run.checkpoint.states import RunStates
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.settings import Config
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step


class SavedRun(RunStates):
    """The states of a run with a folder: its checkpoints."""

    keeps = True

    def __init__(
        self,
        workdir: Place,
        config: Config,
        program: Step,
        *,
        read_only: bool,
        report: Callable[[str], None],
        may_write: Callable[[], None],
        before_seal: Callable[[], None],
        phases: Phases,
    ) -> None:
        """Opens the checkpoints; args: as of `states_of`."""
        super().__init__(config, program, report)
        self._workdir, self._read_only, self._phases = workdir, read_only, phases
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
        # Imported here: most runs name their interval.
        from jaxtrain.run.attempts.failure_rates import DEFAULT_MTBF_HOURS

        hours = DEFAULT_MTBF_HOURS if mtbf is None else mtbf
        return AutomaticInterval(
            mtbf=hours * 3600 / self._program.setup.layout.mesh.size,
            steps=train.steps,
            phases=self._phases,
            agree=_largest,
            say=self._report,
        )

    def of_step(self, step: int) -> tuple[TrainState, int]:
        with self._phases.phase("restore", step):
            return self._restore(step, None)

    def newest(self, open_data: Callable[[], Dataset]) -> tuple[TrainState, int]:
        return self._newest(None if self._read_only else open_data())

    def back_to(self, step: int, dataset: Dataset) -> tuple[TrainState, int]:
        self._checkpoints.drop_after(step)
        return self._newest(dataset)

    def _newest(self, dataset: Dataset | None) -> tuple[TrainState, int]:
        while True:
            with self._phases.phase("restore"):
                step = self._checkpoints.newest_good()
            if step is None:
                return self._first(), 0
            with self._phases.phase("restore", step):
                try:
                    return self._restore(step, dataset)
                except CheckpointError as error:
                    if self._read_only or isinstance(error, UnreadError):
                        raise
                    self._checkpoints.pass_over(step, error)

    def save(self, step: int, state: TrainState, *, next_batch: int, digest: str) -> None:
        extra = metadata.describe(self._config, self._program, digest, next_batch, self.ancestors)
        with jax.transfer_guard("allow"):
            self._checkpoints.save(step, state, extra)

    def line(self, step: int) -> list[Ancestor]:
        if step not in self._checkpoints.steps():
            return self.ancestors
        return of_checkpoint(self._checkpoints, self._workdir, step)

    def on_disk(self) -> int:
        return self._checkpoints.latest_step() or 0

    def keep_best(self, steps: Sequence[int]) -> None:
        self._checkpoints.keep_best(steps)

    def wait(self) -> None:
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()

    def _restore(self, step: int, dataset: Dataset | None) -> tuple[TrainState, int]:
        extra = self._checkpoints.extra(step)
        self.ancestors = extra.get("ancestors", [])  # none of a checkpoint from before they stood
        if extra.get("only_parameters"):
            from jaxtrain.run.start import restore_parameters

            params = restore_parameters(self._checkpoints, step, self._config, self._program.setup)
            self.extra = extra
            return self._create(params), 0
        if dataset is not None:
            metadata.require_same_run(
                extra, self._config, dataset, step=step, workdir=self._workdir
            )
            for notes in (metadata.other_settings, metadata.other_rate):
                for note in notes(extra, self._config, step):
                    self._report(note)
        try:
            state = restore(self._checkpoints, step, self._program)
        except OtherLeavesError as error:
            raise metadata.with_settings(error, extra["config"], self._config) from error
        self.extra = extra
        return state, extra["data"]["next_batch"]


def _largest(values: Sequence[float]) -> Sequence[float]:
    """The largest of every process's value, for each; the same numbers on all of them."""
    if jax.process_count() == 1:
        return values
    gathered = multihost_utils.process_allgather(np.array(values, np.float32))
    return [float(value) for value in np.max(gathered, axis=0)]
