"""Asynchronous metrics: from devices to metrics.jsonl, TensorBoard, loss.png, terminal; MFU.

The training loop never waits for the step it has just dispatched: `later` keeps the device scalars
and reads them when the devices are further on.
"""

import collections
import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from jaxtrain.config.buckets import AnyPath
from jaxtrain.data.source import Dataset
from jaxtrain.parallel.chips import peak_flops
from jaxtrain.run.metrics.files import MetricsFiles, class_names, lines_of, numbers_of, strict
from jaxtrain.run.show.progress import Display
from jaxtrain.training.guard import BadStepError, Guard, Rewind
from jaxtrain.training.objectives.objective import Yardstick
from jaxtrain.training.settings import Config

# Steps that may be in flight when `later` returns. Two keep the devices busy while the host
# prepares the next batch; more would only pile up input batches in device memory, make the clock
# be wrong (a dispatched step is not a finished one) and delay the detection of a bad step.
RUN_AHEAD_STEPS = 2

# The metrics by which a step is judged good or bad; read for every step.
_LOOKED_AT = ("bad", "loss", "grad_norm", "loss_threshold", "grad_norm_threshold")


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    step: int
    metrics: Mapping[str, Any]
    units: int


class MetricsLog:
    """Metrics log of one run; process 0 writes, every process waits and checks."""

    def __init__(
        self,
        workdir: Path | None,
        *,
        total_steps: int,
        unit: Literal["tokens", "images", "vectors", "pairs"],
        units_per_step: int,
        flops_per_step: float | None,
        peak_flops: float | None,
        first_step: int,
        log_every: int,
        terminal: Console,
        yardstick: Yardstick = Yardstick(),  # noqa: B008 - frozen
        class_names: Sequence[str] = (),
        guard: Guard | None = Guard(),  # noqa: B008 - frozen
        history: list[dict[str, Any]] | None = None,
    ) -> None:
        """Open the log; the clock of the first step starts here.

        Args:
          workdir: the run's folder; None writes no files.
          total_steps: the step the run ends at.
          unit: the unit of throughput.
          units_per_step: tokens, images and so on in one global batch.
          flops_per_step: model FLOPs of one optimizer step on the global batch; None: no MFU.
          peak_flops: FLOP/s of all devices of the run together; None if unknown.
          first_step: steps already done, 0 for a new run. A resumed run's older lines are kept,
            those past `first_step` are dropped.
          log_every: steps between two lines.
          terminal: for progress: one live line on a terminal, plain lines elsewhere.
          yardstick: metrics and baselines of loss.png.
          class_names: of confusion.png; empty: classes are numbered.
          guard: the reaction to bad steps; None: they are logged like the others.
          history: receives the lines if there is no file; those past `first_step` are dropped.
        """
        self._guard = guard
        self.bad_steps = 0  # skipped so far, by the policy 'skip'
        self._bad_in_a_row = self._bad_steps_taken = 0
        self._total_steps = total_steps
        self._unit = unit
        self._units_per_step = units_per_step
        self._window_units: list[int] = []  # of the steps since the last line
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops
        self._first_step = first_step
        self._log_every = log_every
        self._pending: collections.deque[_Dispatched] = collections.deque()
        is_writer = jax.process_index() == 0
        self._files = (
            MetricsFiles(workdir, first_step, yardstick, class_names)
            if is_writer and workdir
            else None
        )
        self._history = history if workdir is None else None
        if self._history is not None:  # like in the file: a rewind reaches these steps again
            self._history[:] = [line for line in self._history if line["step"] <= first_step]
        self._display = Display(terminal, unit, total_steps, first_step) if is_writer else None
        self._window_start = time.perf_counter()
        self._window_first_step = first_step
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Close the log; an error of its files does not hide the run's own error."""
        try:
            self.close()
        except OSError:
            if error is None:
                raise

    @property
    def seconds(self) -> float:
        """A clock of training alone: it is paused with the log."""
        now = time.perf_counter() if self._paused_at is None else self._paused_at
        return now - self._paused_seconds

    def later(self, step: int, metrics: Mapping[str, Any], *, tokens: int | None = None) -> None:
        """Take a dispatched step's metrics and wait for the step two before it, never for this.

        Args:
          step: number of optimizer steps done with this one.
          metrics: device scalars, including `loss`; or vectors for `means`, which are
            read only for steps that are logged, evaluated or saved.
          tokens: of its batch, if batches have different row lengths; None: units_per_step.

        Raises:
          BadStepError: an earlier step, now read, is bad, and the run is to stop.
          Rewind: it is bad, and the run is to go back.
        """
        units = self._units_per_step if tokens is None else tokens
        self._pending.append(_Dispatched(step, metrics, units))
        while len(self._pending) > RUN_AHEAD_STEPS:
            self._settle(self._pending.popleft())

    def now(
        self, step: int, values: Mapping[str, Any], account: Mapping[str, Any] | None = None
    ) -> None:
        """Write an evaluation's line.

        Args:
          step: number of optimizer steps done.
          values: host numbers, named `eval_loss`, `eval_accuracy`, ...; other values are
            only written.
          account: time accounting so far, shown at the end.
        """
        self.flush()
        self._keep({"step": step, **values, **(account or {})})
        if self._files is not None:
            self._files.draw()
        if self._display is not None:
            numbers = numbers_of(values).items()
            figures = "  ".join(f"{name} {value:.4g}" for name, value in numbers)
            self._display.line(f"step {step}/{self._total_steps}  {figures}")

    def take_bad_steps(self) -> int:
        """Return the number of skipped steps since the last call."""
        taken, self._bad_steps_taken = self._bad_steps_taken, self.bad_steps
        return self.bad_steps - taken

    def flush(self) -> None:
        """Wait for every dispatched step and write pending lines.

        Raises:
          BadStepError: a step, now read, is bad, and the run is to stop.
          Rewind: it is bad, and the run is to go back.
        """
        while self._pending:
            dispatched = self._pending.popleft()
            self._settle(dispatched, last=not self._pending)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Settle all steps, and exclude the time of an evaluation or save from step_seconds.

        Settling first means that no checkpoint has the state of a bad step, and that a
        checkpoint's metrics are on disk before it is.
        """
        self.flush()
        start = time.perf_counter()
        before, self._paused_at = self._paused_at, start
        try:
            yield
        finally:
            paused = time.perf_counter() - start
            self._window_start += paused
            self._paused_at = before
            self._paused_seconds += 0.0 if before else paused

    def close(self) -> None:
        """Write pending lines and the final loss.png, and release the terminal.

        Raises:
          BadStepError: a step, now read, is bad, and the run is to stop.
          Rewind: it is bad, and the run is to go back.
        """
        try:
            self.flush()
        finally:
            self._pending.clear()
            if self._display is not None:
                self._display.close()
            if self._files is not None:
                self._files.close()

    def _settle(self, dispatched: _Dispatched, *, last: bool = False) -> None:
        """Wait for one step, write its line if it has one, and apply the guard.

        Vectors are read for steps that are logged, and for `last`.
        """
        step, metrics = dispatched.step, dispatched.metrics
        self._window_units.append(dispatched.units)
        # Step 1 of the run, not of the attempt: a resumed run writes the same lines as one that
        # was never interrupted.
        due = step % self._log_every == 0 or step in (1, self._total_steps)
        why = None
        if "weight" in metrics and not (due or last):
            # A non-finite loss leads to non-finite parameters: a later step shows it.
            jax.block_until_ready(metrics["loss"])
        else:
            if "weight" in metrics:
                # Imported here: per-replica steps are rare.
                from jaxtrain.training.exchange.per_replica import means

                metrics = means(metrics)
            # These transfers are intended. jax.device_get allows them too, but takes five times as
            # long.
            with jax.transfer_guard_device_to_host("allow"):
                looked_at = {k: metrics[k].item() for k in _LOOKED_AT if k in metrics}
            why = what_is_bad(looked_at)
        if due or why is not None:
            self._write(step, jax.device_get(dict(metrics)))
        elif step == self._first_step + 1:
            # A resumed attempt's first step compiles: it opens no window.
            self._open_window(step)
        if why is None:
            self._bad_in_a_row = 0
        elif self._guard is not None:
            self._act_on(self._guard, step, why)

    def _act_on(self, guard: Guard, step: int, why: str) -> None:
        """Continue after a bad step, or raise the error that ends or rewinds the run."""
        self._bad_in_a_row += 1
        policy, in_a_row = guard.policy, self._bad_in_a_row
        if policy == "skip" and in_a_row < guard.max_bad_steps:
            self.bad_steps += 1
            if self._display is not None:
                self._display.line(
                    f"step {step}/{self._total_steps}  skipped ({self.bad_steps} so far): {why}"
                )
            return
        self._pending.clear()
        if policy == "rewind":
            raise Rewind(step, why)
        raise BadStepError(step, why, policy=policy, in_a_row=in_a_row)

    def _open_window(self, step: int) -> None:
        self._window_start, self._window_first_step = time.perf_counter(), step
        self._window_units.clear()

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        seconds = time.perf_counter() - self._window_start
        step_seconds = seconds / max(1, step - self._window_first_step)
        units = statistics.fmean(self._window_units)
        self._open_window(step)
        line: dict[str, float | None] = {
            "step": step,
            **{name: float(value) for name, value in metrics.items()},
            f"{self._unit}_per_second": units / step_seconds,
            "step_seconds": step_seconds,
            "mfu": None,
        }
        if self._flops_per_step is not None and self._peak_flops is not None:
            line["mfu"] = self._flops_per_step / step_seconds / self._peak_flops
        self._keep(line)
        if self._display is not None:
            self._display.show(line)

    def _keep(self, line: Mapping[str, Any]) -> None:
        if self._files is not None:
            self._files.write(line)
        if self._history is not None:
            self._history.append(strict(line))


def what_is_bad(metrics: Mapping[str, float]) -> str | None:
    """Return what is bad about a step with these metrics (host numbers); None for a good step.

    If the step has not judged itself (no `bad` among them), non-finite values are bad.
    """
    if metrics.get("bad", 1.0) == 0.0:
        return None
    for name, noun in (("loss", "the loss"), ("grad_norm", "the gradient norm")):
        value = metrics.get(name, 0.0)
        if not math.isfinite(value):
            return f"{noun} is {value}"
        if value > metrics.get(f"{name}_threshold", math.inf):
            threshold = metrics[f"{name}_threshold"]
            return f"{noun} spikes to {value:.4g}, above {threshold:.4g} (Guard.spike_sigma)"
    return None


class RunMetrics:
    """The metrics of a run over all its logs.

    Attributes:
      in_memory: the lines of a run without a folder.
    """

    def __init__(
        self,
        config: Config,
        devices: Sequence[jax.Device],
        *,
        folder: Path | None,
        workdir: AnyPath | None,
        terminal: Console,
    ) -> None:
        """Store the settings; nothing is opened yet.

        Args:
          config: the run's configuration.
          devices: of the whole mesh.
          folder: for metrics.jsonl and its figures; None writes no file.
          workdir: where lines are read instead, for an inspected run.
          terminal: for progress.
        """
        self._config, self._devices, self._terminal = config, devices, terminal
        self._folder, self._workdir = folder, workdir if folder is None else folder
        self.in_memory: list[dict[str, Any]] = []

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far; without a folder those in memory."""
        return list(self.in_memory) if self._workdir is None else lines_of(self._workdir)

    def open(self, dataset: Dataset, first: int, last: int, *, guarded: bool = True) -> MetricsLog:
        """Return the log of some steps, whose clock starts here.

        Args:
          dataset: determines the unit, and the baselines of the loss.
          first: steps done.
          last: the step that the run ends with.
          guarded: whether a bad step ends or rewinds the run, by `Guard.policy`.
        """
        config, train = self._config, self._config.train
        batch = train.data.abstract_batch(train.global_batch_size)
        in_order = batch.positions is not None  # tokens, or vectors instead
        peak, flops = peak_flops(self._devices[0].device_kind, config.precision.matmul), None
        # With rows of several lengths there is no constant number of tokens.
        if peak is not None and dataset.by_length is None:
            # Imported here: of CPUs no peak is known, and no share of it is a metric.
            from jaxtrain.training.flops import flops_per_step

            flops = flops_per_step(config)
        return MetricsLog(
            self._folder,
            total_steps=last,
            unit=dataset.unit,
            units_per_step=train.global_batch_size * (batch.inputs.shape[1] if in_order else 1),
            flops_per_step=flops,
            peak_flops=None if peak is None else peak * len(self._devices),
            first_step=first,
            log_every=train.log_every,
            terminal=self._terminal,
            yardstick=train.task.yardstick(train.model, dataset.facts),
            class_names=class_names(dataset.facts),
            guard=config.guard if guarded else None,
            history=self.in_memory,
        )


def lacks_evaluation(folder: Path, step: int) -> bool:
    """Whether a run with metrics lacks an evaluation at `step`; called by all processes.

    Process 0 decides: for a run in a bucket the others have no such file.
    """
    lines = lines_of(folder)
    done = any(line["step"] == step and "eval_loss" in line for line in lines)
    lacks = bool(lines) and not done
    with jax.transfer_guard("allow"):
        return bool(multihost_utils.broadcast_one_to_all(np.bool_(lacks)))
