"""Training loop: steps, and the actions due between them (log, evaluate, save)."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import jax

from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.run.attempts.attempt import Attempt, Preempted
from jaxtrain.run.attempts.folder import RunFolder
from jaxtrain.run.best import Record, validate
from jaxtrain.run.evaluation import Evaluation
from jaxtrain.run.feed import Feed
from jaxtrain.run.garbage import Garbage
from jaxtrain.run.metrics import MetricsLog, lacks_evaluation
from jaxtrain.run.recorder import Recorder
from jaxtrain.run.saved import SavedRun
from jaxtrain.run.tracking.tracking import Tracking
from jaxtrain.training.guard import Guard, Rewind, Rewinds
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.settings import Best, Train
from jaxtrain.training.stepper import Stepper


@dataclasses.dataclass(kw_only=True)
class Loop:
    """A run between two of its steps, and what takes it on: to be run with its layout active.

    Attributes:
      train: what falls due when.
      guard: how many batches a rewind skips.
      stepper: the state, and the step.
      feed: the batches.
      evaluation: the loss over held-out ones.
      saved: the checkpoints.
      attempt: who may ask to stop, and where the time goes.
      folder: the run's folder; None keeps everything in memory.
      dataset: gives the opened data.
      best: which evaluation is the best.
      lines: those of the metrics so far.
      open_log: of the steps after a first one up to a last one.
      tracking: who else takes the metrics, of lines that survive a resume.
      say: takes a line for people.
      next_batch: the number of the batch that the next step takes.
      steps_done: optimizer steps taken, known without asking the device.
    """

    train: Train
    guard: Guard
    stepper: Stepper
    feed: Feed
    evaluation: Evaluation
    saved: SavedRun
    attempt: Attempt
    folder: RunFolder | None
    dataset: Callable[[], Dataset]
    best: Best
    lines: Callable[[], list[dict[str, Any]]]
    open_log: Callable[[int, int], MetricsLog]
    tracking: Sequence[Tracking]
    say: Callable[[str], None]
    next_batch: int
    steps_done: int
    _is_compiled: bool = False

    def run(self, last: int, recorder: Recorder | None) -> dict[str, Any]:
        """Takes steps up to `last`, going back where the guard says so; the last evaluation.

        Args:
          last: the step to end at.
          recorder: what records some of the steps; None: nothing does.

        Raises:
          Preempted: the run was asked to stop; the state is saved.
          BadStepError: a step's numbers are bad, and Guard.policy says to stop.
          CorruptionError: devices disagree about what they should hold alike.
          CheckpointError: a checkpoint cannot be written.
        """
        rewinds = Rewinds(self.guard)
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
            self._tell_trackers()
            if self.folder is not None:
                self.folder.push_or_report()
        return values

    def step(self, batch: Batch) -> Sums:
        """One step on a batch on the devices, and nothing of what falls due; its metrics there."""
        metrics = self.stepper.step(batch)
        self.steps_done += 1
        self.next_batch += 1
        return metrics

    def evaluate(self, log: MetricsLog | None) -> dict[str, Any]:
        """Over the held-out batches, of a mixture also by source.

        Inside a run, whose log is given, all may stop before each.
        """
        dataset, state, step = self.dataset(), self.stepper.state, self.steps_done

        def before_each() -> None:
            if log is not None:
                self._stop_if_asked(log)

        with ExitStack() as stack:

            def batches(part: range | None) -> Iterator[Batch]:
                stream = stack.enter_context(self.feed.heldout(dataset, part))
                return itertools.islice(stream, self.train.eval_batches)

            if dataset.mixing is None:
                return self.evaluation.of(state, batches(None), step=step, before_each=before_each)
            ranges = dataset.mixing.heldout_ranges()
            parts = ((name, batches(part)) for name, part in ranges.items())
            return self.evaluation.of_parts(state, parts, step=step, before_each=before_each)

    def _epochs_of_sources(self) -> dict[str, float]:
        """Of a mixture, how many epochs of each source are done."""
        mixing, train = self.dataset().mixing, self.train
        if mixing is None:
            return {}
        size, seed = train.global_batch_size, train.seed
        seen = mixing.seen(self.next_batch, global_batch_size=size, seed=seed)
        return {f"epochs_{name}": one.epochs for name, one in seen.items()}

    def _until(self, last: int, recorder: Recorder | None) -> dict[str, Any]:
        """The loop up to a step; Rewind where a step turned out to be bad."""
        train, phases = self.train, self.attempt.phases
        values: dict[str, Any] = {}
        first = self.steps_done
        self.saved.schedule.resume(first)
        with ExitStack() as stack:
            garbage = stack.enter_context(Garbage(last - first))
            with phases.phase("start"):
                log = stack.enter_context(self.open_log(first, last))
                stream = stack.enter_context(self.feed.training(self.dataset(), self.next_batch))
                for one in self.tracking:
                    one.go_on()
            if self._owes_evaluation(last):
                with log.paused():
                    values = self.evaluate(log)
                log.now(first, {**values, **self._epochs_of_sources()}, self._account(log))
            record = self._record(first)
            if record is not None and record.ends_run:
                self.say(f"Ended at step {first}: {record}")
                return values
            by_length = self.dataset().by_length is not None
            for step in range(first + 1, last + 1):
                self._stop_if_asked(log)
                with phases.phase("step" if self._is_compiled else "compile", step):
                    with phases.phase("data", step):
                        batch = next(stream)
                    metrics = self.stepper.checked_step(batch, step)
                    if not self._is_compiled:  # other processes may compile for longer
                        jax.block_until_ready(metrics)
                    self.steps_done = self.attempt.step = step
                    self.next_batch += 1
                    log.later(step, metrics, tokens=batch.inputs.size if by_length else None)
                if step == first + 1:
                    garbage.settle()
                self._is_compiled = True
                if recorder is not None and recorder.turns_at(step):
                    with log.paused():
                        jax.block_until_ready(self.stepper.state)
                        recorder.turn(log.seconds)
                is_best = ends = False
                if _every(train.eval_every, step) or step == last:
                    with log.paused():
                        values = self.evaluate(log)
                        garbage.collect()
                    log.now(step, {**values, **self._epochs_of_sources()}, self._account(log))
                    if self.folder is not None:
                        self.folder.push_soon()
                    if record is not None:
                        is_best = record.see(step, values)
                        ends = record.ends_run
                        self.saved.keep_best(record.steps)
                if self.saved.schedule.is_due(step) or step == last or is_best or ends:
                    with log.paused():
                        self._save_and_time()
                        garbage.collect()
                    self._account(log)
                if record is not None and (ends or step == last):
                    early = f"Ended at step {step}, not {last}: " if ends and step < last else ""
                    self.say(f"{early}{record}")
                if ends:
                    break
        return values

    def _record(self, step: int) -> Record | None:
        """What the evaluations up to a step have shown; None where nothing is compared."""
        if self.best.metric is None:
            return None
        known = self.evaluation.names(self.stepper.state, self.feed.abstract_training())
        mixing = self.dataset().mixing
        parts = [] if mixing is None else mixing.heldout_ranges()
        validate(self.best, [*known, *(f"{name}_{part}" for part in parts for name in known)])
        record = Record.of(self.best, self.lines(), step)
        self.saved.keep_best(record.steps)
        return record

    def _account(self, log: MetricsLog) -> dict[str, Any]:
        """Records where the time went so far."""
        goodput = self.attempt.goodput
        goodput.skipped(log.take_bad_steps())
        goodput.record(self.steps_done)
        return goodput.account().line()

    def _owes_evaluation(self, last: int) -> bool:
        """Whether the attempt before was stopped inside the evaluation of the step it ended at."""
        step = self.steps_done
        due = _every(self.train.eval_every, step) or step == last
        if not (due and step and self.folder is not None):
            return False
        return lacks_evaluation(self.folder.local, step)

    def _stop_if_asked(self, log: MetricsLog) -> None:
        """Saves and raises Preempted where all processes stop here."""
        reason = self.attempt.stop_reason()
        if reason is None:
            return
        if self.steps_done:
            with log.paused():
                self._save()
        with self.attempt.phases.phase("save", self.steps_done):
            self.saved.wait()
        self._tell_trackers()
        self._account(log)
        raise Preempted(self.steps_done, reason)

    def _save_and_time(self) -> None:
        """Saves, and lets the schedule know what that took from the steps."""
        waited, saved = self._save()
        with jax.transfer_guard("allow"):
            self.saved.schedule.record(self.steps_done, saved, waited_seconds=waited)

    def _save(self) -> tuple[float, float]:
        """Saves; the seconds that steps under way took before it, and those of the save itself."""
        phases = self.attempt.phases
        with phases.phase("save", self.steps_done):
            due = phases.seconds["save"]
            jax.block_until_ready(self.stepper.state)
            begun = phases.seconds["save"]
            self.saved.save(
                self.steps_done,
                self.stepper.state,
                next_batch=self.next_batch,
                digest=self.dataset().digest,
            )
            done = phases.seconds["save"]
        self._tell_trackers()
        return begun - due, done - begun

    def _tell_trackers(self) -> None:
        """Lets them have the lines that a later start does not write again."""
        if not self.tracking:
            return  # where checkpoints are in a bucket, what is on disk takes a request
        step = self.saved.on_disk() if self.saved.keeps else self.steps_done
        for one in self.tracking:
            one.up_to(step)

    def _go_back(self, rewind: Rewind, target: int) -> None:
        """Restores a state from before a bad step and skips the batches around it."""
        with jax.transfer_guard("allow"):
            self.stepper.state, position = self.saved.back_to(target, self.dataset())
            done, self.steps_done = self.steps_done, int(self.stepper.state.step)
        self.attempt.goodput.resumed_at(self.steps_done, done=done)
        skipped = self.guard.batches_to_skip(rewind.step, self.steps_done)
        self.next_batch = position + skipped
        self.say(f"{rewind} of step {self.steps_done}, passing over {skipped} batches")


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0
