"""`jaxtrain train --profile`: record a few steps and report where their time went."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console

from jaxtrain.analysis.planning.compiled.costs import readers
from jaxtrain.analysis.planning.compiled.hlo import parse
from jaxtrain.analysis.profiling.ceilings import ceilings
from jaxtrain.analysis.profiling.events import newest_trace, operation_times
from jaxtrain.analysis.profiling.operations import profile
from jaxtrain.analysis.profiling.show import show
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.run.show.progress import print_lines

FOLDER = "profile"
OPERATIONS_FILE = "operations.json"
# Of a start: the first step of one may compile, the second still warms up.
FIRST, LAST = 3, 6


class Recorder:
    """Recorder of steps 3 to 6 of an attempt; the loop calls `turn` where `turns_at` is true.

    Process 0 records; every process compiles the same program.
    """

    def __init__(
        self, workdir: Path | None, console: Console, dtype: str, *, done: int, last: int
    ) -> None:
        """Choose the steps to record, and measure a CPU's peak rates.

        Args:
          workdir: the run's folder; the trace goes into `profile` inside it.
          console: where the tables go.
          dtype: of the computation.
          done: steps taken before this start.
          last: the step it ends at.

        Raises:
          UserError: fewer than 3 steps are left, or there is no folder.
        """
        if workdir is None:
            raise UserError("profile=Recorder writes into the run's folder; give Trainer a workdir")
        self.validate(done, last)
        self._folder, self._console = workdir / FOLDER, console
        self._first, self._last = done + FIRST, min(done + LAST, last)
        if last - done < LAST:
            self._print(
                f"Profile: {last - done} steps are left, so it looks at steps {self._first} to "
                f"{self._last} instead of {LAST - FIRST + 1}"
            )
        devices = jax.local_devices()
        self._device, self._devices = devices[0], len(devices)
        self._ceilings = ceilings(self._device, dtype) if self._records else None
        self._text = ""
        self._started: float | None = None
        self._over = False

    @staticmethod
    def validate(done: int, last: int) -> None:
        """Validate an attempt to be profiled, before anything is written.

        Args:
          done: steps taken before it.
          last: the step it ends at.

        Raises:
          UserError: fewer than 3 steps are left.
        """
        if last - done < FIRST:
            raise UserError(
                f"train --profile looks at steps {FIRST} to {LAST} of a start, and "
                f"{max(last - done, 0)} are left of Train.steps={last}; use Train.steps="
                f"{done + LAST} or more"
            )

    @property
    def _records(self) -> bool:
        return jax.process_index() == 0

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Return the step that the loop calls from now on, with its operations named in traces."""
        # Kernels that run as one CUDA graph are not distinguished.
        options: dict[str, str | bool] = {}
        if self._device.platform == "gpu":
            options["xla_gpu_enable_command_buffer"] = ""
        with _names_in_cache_key():
            compiled = lowered.compile(options)
        self._text = compiled.as_text() or ""
        return compiled

    def turns_at(self, step: int) -> bool:
        """Whether recording begins or ends after this step."""
        at = self._first - 1 if self._started is None else self._last
        return self._records and not self._over and step == at

    def turn(self, seconds: float) -> None:
        """Start or stop recording; the devices have finished all steps so far.

        Args:
          seconds: on a clock that is paused outside training steps.
        """
        if self._started is None:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # the host's functions would bury the operations
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._started = seconds
            return
        jax.profiler.stop_trace()
        self._over = True
        self._show_profile((seconds - self._started) / (self._last - self._first + 1))

    def _show_profile(self, step_seconds: float) -> None:
        assert self._ceilings is not None, "this process records"
        trace, module = newest_trace(self._folder), parse(self._text)
        program = self._text.split(maxsplit=2)[1].rstrip(",")  # "HloModule jit_train_step, ..."
        found = profile(
            module,
            operation_times(trace, program, readers(module)),
            first=self._first,
            last=self._last,
            step_seconds=step_seconds,
            devices=self._devices,
            device_kind=self._device.device_kind,
            ceilings=self._ceilings,
        )
        file = self._folder / OPERATIONS_FILE
        write_atomically(file, json.dumps(found.to_json(), indent=1).encode())
        show(self._console, found)
        self._print(f"Profile: {file}; the trace for TensorBoard and Perfetto: {trace.parent}")

    def close(self) -> None:
        """Discard an unfinished profile: the run stops, or goes back."""
        if self._started is not None and not self._over:
            jax.profiler.stop_trace()
            self._print("Profile: left out, since the run stopped among the steps it looks at")
        self._over = True

    def _print(self, line: str) -> None:
        if self._records:
            print_lines(self._console, line)


@contextlib.contextmanager
def _names_in_cache_key() -> Iterator[None]:
    """Include scope names in the keys of cached programs, within the context.

    By default they are not: a program kept by an earlier version would bring its old names.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)
