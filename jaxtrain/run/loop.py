"""Training loop: steps, and the actions due between them (log, evaluate, save).

`Functions` holds `init`, `train_step` and `eval_step` for a custom loop.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
from rich.console import Console

from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.run.attempts.attempt import Attempt, Preempted
from jaxtrain.run.attempts.folder import RunFolder
from jaxtrain.run.checkpoint.states import RunStates
from jaxtrain.run.evaluation import Evaluation, Record, validate_best
from jaxtrain.run.feed import Feed, RunData
from jaxtrain.run.garbage import Garbage
from jaxtrain.run.metrics.log import MetricsLog, RunMetrics, lacks_evaluation
from jaxtrain.training.compiled_step import CompiledStep, RunAhead, Stepper
from jaxtrain.training.guard import Rewind, Rewinds
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.settings import Config
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step

if TYPE_CHECKING:
    from jaxtrain.run.metrics.tracking import Tracking


class Recorder(Protocol):
    """Recorder of some steps of an attempt, such as `analysis.profiling.recorder.Recorder`."""

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Return the step function for the loop from now on."""
        ...

    def turns_at(self, step: int) -> bool:
        """Whether recording begins or ends after this step."""
        ...

    def turn(self, seconds: float) -> None:
        """Begin or end recording; the devices are done with every step so far."""
        ...

    def close(self) -> None:
        """End a recording in progress."""
        ...


class RecorderKind(Protocol):
    """Factory of a recorder for some steps of an attempt."""

    def validate(self, done: int, last: int) -> None:
        """Raise UserError if there are too few steps to record."""
        ...

    def __call__(
        self, workdir: Path | None, console: Console, dtype: str, *, done: int, last: int
    ) -> Recorder:
        """Return the recorder of an attempt from `done` steps to `last`."""
        ...


@dataclasses.dataclass(frozen=True)
class Due:
    """An action between two steps.

    Attributes:
      every: whether it is due after a step.
      action: called with the step.
    """

    every: Callable[[int], bool]
    action: Callable[[int], None]


@dataclasses.dataclass
class _Stretch:
    """A range of steps without a rewind.

    Attributes:
      first: steps done before it.
      last: the step to end at.
      log: of its metrics.
      garbage: the garbage collector.
      record: the record of evaluations; None if they are not compared.
      best_step: of the last evaluation that was better than all before.
      values: of the last evaluation.
    """

    first: int
    last: int
    log: MetricsLog
    garbage: Garbage
    record: Record | None = None
    best_step: int | None = None
    values: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def ends_early(self) -> bool:
        """Whether no better evaluation is waited for."""
        return self.record is not None and self.record.ends_run


@dataclasses.dataclass(kw_only=True)
class Loop:
    """The training loop of a run; its methods are called with the run's layout active.

    Attributes:
      config: the configuration.
      stepper: the state, and the compiled step.
      data: the run's data.
      feed: its batches, on the devices.
      evaluation: evaluates held-out batches.
      saved: the checkpoints.
      attempt: requests to stop, and time accounting.
      folder: the run's folder; None keeps everything in memory.
      metrics: the lines of all steps so far, and logs of the next ones.
      tracking: experiment trackers, for lines that survive a resume.
      report: called with each line to print.
      next_batch: index of the next step's batch.
      steps_done: optimizer steps taken, without a device transfer.
    """

    config: Config
    stepper: Stepper
    data: RunData
    feed: Feed
    evaluation: Evaluation
    saved: RunStates
    attempt: Attempt
    folder: RunFolder | None
    metrics: RunMetrics
    tracking: "Sequence[Tracking]"
    report: Callable[[str], None]
    next_batch: int
    steps_done: int
    _is_compiled: bool = False
    _own_log: MetricsLog | None = None  # of `step`

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The data, opened at the first use."""
        return self.data.dataset(self.stepper, self.steps_done)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics so far."""
        if self._own_log is not None:
            self._own_log.flush()
        return self.metrics.lines

    def run(self, last: int, recorder: "Recorder | None") -> dict[str, Any]:
        """Take steps up to `last`, with the guard's rewinds; return the last evaluation.

        Args:
          last: the step to end at.
          recorder: profiles some of the steps; None: no profile.

        Raises:
          Preempted: the run was asked to stop; the state is saved.
          BadStepError: a step is bad, and Guard.policy is to stop.
          CorruptionError: devices disagree about replicated values.
          CheckpointError: a checkpoint cannot be written.
        """
        self._close_own_log()
        rewinds = Rewinds(self.config.guard)
        with self.attempt.listening(), jax.transfer_guard("disallow"):
            while True:
                try:
                    values = self._until(last, recorder)
                    break
                except Rewind as rewind:
                    self._go_back(rewind, rewinds.target(rewind))
                finally:
                    if recorder is not None:
                        recorder.close()
        with self.attempt.phases.phase("save", self.steps_done):
            self.saved.wait()
            self._send_to_trackers()
            if self.folder is not None:
                self.folder.push_or_report()
        return values

    def step(self, batch: Batch) -> Sums:
        """Take one step on a batch on the devices, with a separate log; return its metrics."""
        if self._own_log is None:
            last = self.config.train.steps
            self._own_log = self.metrics.open(self.dataset, self.steps_done, last, guarded=False)
        metrics = self.stepper.step(batch)
        self.steps_done += 1
        self.next_batch += 1
        self._own_log.later(self.steps_done, metrics)
        return metrics

    def close(self) -> None:
        """Flush pending files to the run's folder and metrics to its trackers."""
        self._close_own_log()
        self.saved.close()
        for one in self.tracking:
            one.close()

    def _close_own_log(self) -> None:
        if self._own_log is not None:
            self._own_log.close()
            self._own_log = None

    def evaluate(self, log: MetricsLog | None) -> dict[str, Any]:
        """Evaluate the held-out batches, for a mixture also by source.

        During a run, whose log is given, it may stop before each batch.
        """
        dataset, state, step = self.dataset, self.stepper.state, self.steps_done

        def before_each() -> None:
            if log is not None:
                self._stop_if_requested(log)

        with ExitStack() as stack:

            def batches(part: range | None) -> Iterator[Batch]:
                stream = stack.enter_context(self.feed.heldout(dataset, part))
                return itertools.islice(stream, self.config.train.eval_batches)

            if dataset.mixing is None:
                return self.evaluation.of(state, batches(None), step=step, before_each=before_each)
            ranges = dataset.mixing.heldout_ranges()
            parts = ((name, batches(part)) for name, part in ranges.items())
            return self.evaluation.of_parts(state, parts, step=step, before_each=before_each)

    def _epochs_of_sources(self) -> dict[str, float]:
        """Return how many epochs of each source of a mixture are done."""
        mixing, train = self.dataset.mixing, self.config.train
        if mixing is None:
            return {}
        size, seed = train.global_batch_size, train.seed
        seen = mixing.count_seen(self.next_batch, global_batch_size=size, seed=seed)
        return {f"epochs_{name}": one.epochs for name, one in seen.items()}

    def _until(self, last: int, recorder: "Recorder | None") -> dict[str, Any]:
        """Run the loop up to a step; raise Rewind if a step is bad."""
        first = self.steps_done
        self.saved.schedule.resume(first)
        with ExitStack() as stack:
            garbage = stack.enter_context(Garbage(last - first))
            with self.attempt.phases.phase("start"):
                log = stack.enter_context(self.metrics.open(self.dataset, first, last))
                stream = stack.enter_context(self.feed.training(self.dataset, self.next_batch))
                for one in self.tracking:
                    one.go_on()
            stretch = _Stretch(first, last, log, garbage)
            if self._owes_evaluation(last):
                self._evaluate_and_log(stretch, first)
            stretch.record = self._record(first)
            if stretch.ends_early:
                self.report(f"Ended at step {first}: {stretch.record}")
                return stretch.values
            due = self._due(stretch, recorder)
            for step in range(first + 1, last + 1):
                self._stop_if_requested(log)
                self._take_step(stream, step, log)
                for one in due:
                    if one.every(step):
                        one.action(step)
                if stretch.ends_early:
                    break
        return stretch.values

    def _take_step(self, stream: Iterator[Batch], step: int, log: MetricsLog) -> None:
        phases, by_length = self.attempt.phases, self.dataset.by_length is not None
        with phases.phase("step" if self._is_compiled else "compile", step):
            with phases.phase("data", step):
                batch = next(stream)
            metrics = self.stepper.step_and_check(batch, step)
            if not self._is_compiled:  # other processes may compile for longer
                jax.block_until_ready(metrics)
            self.steps_done = self.attempt.step = step
            self.next_batch += 1
            log.later(step, metrics, tokens=batch.inputs.size if by_length else None)
        self._is_compiled = True

    def _due(self, stretch: _Stretch, recorder: "Recorder | None") -> list[Due]:
        """Return the actions that are due between the steps of a stretch, in order."""
        last, eval_every = stretch.last, self.config.train.eval_every

        def of(action: Callable[[_Stretch, int], None]) -> Callable[[int], None]:
            return functools.partial(action, stretch)

        def is_saved(step: int) -> bool:
            is_best = step == stretch.best_step
            return self.saved.schedule.is_due(step) or step == last or is_best or stretch.ends_early

        is_due_locally = self.saved.is_due_locally
        due = [Due(lambda step: step == stretch.first + 1, lambda _: stretch.garbage.settle())]
        if recorder is not None:
            due.append(Due(recorder.turns_at, lambda _: self._turn(recorder, stretch.log)))
        due.append(Due(lambda step: _every(eval_every, step) or step == last, of(self._evaluate)))
        # The last step is in the run's folder.
        due.append(Due(lambda step: step != last and is_due_locally(step), of(self._save_locally)))
        due.append(Due(is_saved, of(self._save_and_time)))
        if stretch.record is not None:
            due.append(Due(lambda step: stretch.ends_early or step == last, of(self._report_best)))
        return due

    def _turn(self, recorder: "Recorder", log: MetricsLog) -> None:
        with log.pause():
            jax.block_until_ready(self.stepper.state)
            recorder.turn(log.seconds)

    def _evaluate(self, stretch: _Stretch, step: int) -> None:
        self._evaluate_and_log(stretch, step)
        if self.folder is not None:
            self.folder.push_soon()
        if stretch.record is not None:
            if stretch.record.see(step, stretch.values):
                stretch.best_step = step
            self.saved.keep_best(stretch.record.steps)

    def _evaluate_and_log(self, stretch: _Stretch, step: int) -> None:
        with stretch.log.pause():
            stretch.values = self.evaluate(stretch.log)
            stretch.garbage.collect()
        line = {**stretch.values, **self._epochs_of_sources()}
        stretch.log.now(step, line, self._account(stretch.log))

    def _report_best(self, stretch: _Stretch, step: int) -> None:
        is_early = stretch.ends_early and step < stretch.last
        early = f"Ended at step {step}, not {stretch.last}: " if is_early else ""
        self.report(f"{early}{stretch.record}")

    def _record(self, step: int) -> Record | None:
        """Return the record of evaluations up to a step; None if they are not compared."""
        best = self.config.best
        if best.metric is None:
            return None
        known = self.evaluation.names(self.stepper.state, self.feed.abstract_training())
        mixing = self.dataset.mixing
        parts = [] if mixing is None else mixing.heldout_ranges()
        validate_best(best, [*known, *(f"{name}_{part}" for part in parts for name in known)])
        record = Record.of(best, self.lines, step)
        self.saved.keep_best(record.steps)
        return record

    def _account(self, log: MetricsLog) -> dict[str, Any]:
        """Record the time accounting so far."""
        goodput = self.attempt.goodput
        goodput.mark_skipped(log.take_bad_steps())
        goodput.record(self.steps_done)
        return goodput.account().line()

    def _owes_evaluation(self, last: int) -> bool:
        """Whether the attempt before was stopped inside the evaluation of the step it ended at."""
        step = self.steps_done
        due = _every(self.config.train.eval_every, step) or step == last
        if not (due and step and self.folder is not None):
            return False
        return lacks_evaluation(self.folder.local, step)

    def _stop_if_requested(self, log: MetricsLog) -> None:
        """Save and raise Preempted if all processes stop here."""
        reason = self.attempt.stop_reason()
        if reason is None:
            return
        if self.steps_done:
            with log.pause():
                self._save()
        with self.attempt.phases.phase("save", self.steps_done):
            self.saved.wait()
        self._send_to_trackers()
        self._account(log)
        raise Preempted(self.steps_done, reason)

    def _save_and_time(self, stretch: _Stretch, step: int) -> None:
        """Save, and report its cost to the schedule."""
        with stretch.log.pause():
            waited, saved = self._save()
            with jax.transfer_guard("allow"):
                self.saved.schedule.record(step, saved, waited_seconds=waited)
            stretch.garbage.collect()
        self._account(stretch.log)

    def _save_locally(self, stretch: _Stretch, step: int) -> None:
        with stretch.log.pause(), self.attempt.phases.phase("save", step):
            jax.block_until_ready(self.stepper.state)
            self.saved.save_locally(
                step, self.stepper.state, next_batch=self.next_batch, digest=self.dataset.digest
            )
        self._account(stretch.log)
        if self.folder is not None:
            self.folder.push_soon()  # the metrics of these steps are not repeated

    def _save(self) -> tuple[float, float]:
        """Save; return the seconds that steps in flight took before it, and those of the save
        itself."""
        phases = self.attempt.phases
        with phases.phase("save", self.steps_done):
            due = phases.seconds["save"]
            jax.block_until_ready(self.stepper.state)
            begun = phases.seconds["save"]
            self.saved.save(
                self.steps_done,
                self.stepper.state,
                next_batch=self.next_batch,
                digest=self.dataset.digest,
            )
            done = phases.seconds["save"]
        self._send_to_trackers()
        return begun - due, done - begun

    def _send_to_trackers(self) -> None:
        """Send trackers the lines that a later attempt will not write again."""
        if not self.tracking:
            return  # with checkpoints in a bucket, checking what is complete takes a request
        step = self.saved.on_disk() if self.saved.keeps else self.steps_done
        for one in self.tracking:
            one.up_to(step)

    def _go_back(self, rewind: Rewind, target: int) -> None:
        """Restore a state from before a bad step and skips the batches around it."""
        with jax.transfer_guard("allow"):
            self.stepper.state, position = self.saved.rewind(target, self.dataset)
            done, self.steps_done = self.steps_done, int(self.stepper.state.step)
        self.attempt.goodput.mark_replay(self.steps_done, done=done)
        skipped = self.config.guard.batches_to_skip(rewind.step, self.steps_done)
        self.next_batch = position + skipped
        self.report(f"{rewind} of step {self.steps_done}, skipping {skipped} batches")


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


class Functions:
    """Compiled functions of a `Trainer`, without its state, log and checkpoints.

    Batches are those of `Trainer.step`: of the whole global batch, on the host or on devices.
    """

    def __init__(
        self, program: Step, step: CompiledStep, evaluation: Evaluation,
        feed: Feed,
    ) -> None:  # fmt: skip
        """Compiles nothing yet."""
        self._program, self._step = program, step
        self._evaluation, self._feed = evaluation, feed
        self._ahead = RunAhead()

    def init(self, seed: int) -> TrainState:
        """Return a new state, sharded over the mesh; the same bits on every mesh.

        Args:
          seed: of the parameters.
        """
        return self._program.create(seed)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """Take one optimizer step; return the new state and its metrics, scalars on the devices.

        Args:
          state: donated: its arrays cannot be read afterwards.
          batch: a global batch.

        Raises:
          UserError: the step cannot learn from the batch.
        """
        with self._program.setup.layout.active():
            state, metrics = self._step(state, self._feed.own("functions.train_step", batch))
        self._ahead.add(metrics["loss"])
        return state, metrics

    def eval_step(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """Return `eval_loss` and the objective's other metrics over a batch, as Python numbers.

        Args:
          state: are unchanged.
          batch: its rows must divide over the devices that split a batch.

        Raises:
          UserError: the batch cannot be evaluated, or has no target that counts.
        """
        with self._program.setup.layout.active():
            placed = self._feed.own("functions.eval_step", batch, whole=True)
        return self._evaluation.of(state, [placed], step=int(state.step), before_each=lambda: None)
