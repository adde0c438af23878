"""Recorder of `jaxtrain train --profile`: traces a few steps and reports their time."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from jaxtrain.analysis.planning.compiled.costs import readers
from jaxtrain.analysis.planning.compiled.hlo import parse
from jaxtrain.analysis.profiling.events import newest_trace, operation_times
from jaxtrain.analysis.profiling.operations import Figures, Profile, ceilings, profile
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.run.show.progress import print_lines

FOLDER = "profile"
OPERATIONS_FILE = "operations.json"
# Steps of an attempt, from 1: the first step may compile, the second still warms up.
FIRST, LAST = 3, 6


class Recorder:
    """Recorder of steps 3 to 6 of an attempt; the loop calls `turn` if `turns_at` is true.

    Only process 0 records, but every process compiles the same program.
    """

    def __init__(
        self, workdir: Path | None, console: Console, dtype: str, *, done: int, last: int
    ) -> None:
        """Choose the steps to record, and measure a CPU's peak rates.

        Args:
          workdir: the run's folder; the trace is written to its subfolder `profile`.
          console: the console that prints the tables.
          dtype: the compute dtype.
          done: steps completed before this attempt.
          last: the last step of the attempt.

        Raises:
          UserError: fewer than 3 steps are left, or there is no workdir.
        """
        if workdir is None:
            raise UserError("profile=Recorder writes into the run's folder; give Trainer a workdir")
        self.validate(done, last)
        self._folder, self._console = workdir / FOLDER, console
        self._first, self._last = done + FIRST, min(done + LAST, last)
        if last - done < LAST:
            self._print(
                f"Profile: {last - done} steps are left, so steps {self._first} to {self._last} "
                f"are profiled instead of {LAST - FIRST + 1}"
            )
        devices = jax.local_devices()
        self._device, self._devices = devices[0], len(devices)
        self._ceilings = ceilings(self._device, dtype) if self._records else None
        self._text = ""
        self._started: float | None = None
        self._over = False

    @staticmethod
    def validate(done: int, last: int) -> None:
        """Validate the number of steps of a profiled attempt, before anything is written.

        Args:
          done: steps completed before the attempt.
          last: the last step of the attempt.

        Raises:
          UserError: fewer than 3 steps are left.
        """
        if last - done < FIRST:
            raise UserError(
                f"train --profile records steps {FIRST} to {LAST} after a start, and "
                f"{max(last - done, 0)} are left of Train.steps={last}; use Train.steps="
                f"{done + LAST} or more"
            )

    @property
    def _records(self) -> bool:
        return jax.process_index() == 0

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile the train step so that traces name its operations."""
        # The profiler does not distinguish the kernels of a CUDA graph.
        options: dict[str, str | bool] = {}
        if self._device.platform == "gpu":
            options["xla_gpu_enable_command_buffer"] = ""
        with _names_in_cache_key():
            compiled = lowered.compile(options)
        self._text = compiled.as_text() or ""
        return compiled

    def turns_at(self, step: int) -> bool:
        """Return whether recording starts or stops after this step."""
        at = self._first - 1 if self._started is None else self._last
        return self._records and not self._over and step == at

    def turn(self, seconds: float) -> None:
        """Start or stop recording; call after the devices have finished all steps so far.

        Args:
          seconds: the time of a clock that is paused outside training steps.
        """
        if self._started is None:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python calls would hide the operations
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
        """Discard an unfinished profile, when the run stops or rolls back."""
        if self._started is not None and not self._over:
            jax.profiler.stop_trace()
            self._print("Profile: skipped, because the run stopped during the profiled steps")
        self._over = True

    def _print(self, line: str) -> None:
        if self._records:
            print_lines(self._console, line)


@contextlib.contextmanager
def _names_in_cache_key() -> Iterator[None]:
    """Include scope names in the keys of the compilation cache, within the context.

    JAX excludes them by default: a program cached by an earlier version would have old names.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


ROWS = 15


def show(console: Console, found: Profile) -> None:
    """Print the layers and the slowest operations."""
    top = found.ceilings
    if top.flops is None or top.bandwidth is None:
        limits = f"{top.source}: no share of the roofline"
    else:
        limits = (
            f"roofline of {top.flops / 1e9:,.0f} GFLOP/s and {top.bandwidth / 1e9:,.1f} GB/s a "
            f"device ({top.source})"
        )
    heads = ("ms a step", "share", "runs", "GFLOP", "MB", "of roofline", "bound by")
    layers = Table(
        title=f"Steps {found.first} to {found.last}: {1e3 * found.step_seconds:.1f} ms a step on "
        f"{found.devices} {found.device_kind}",
        title_justify="left",
    )
    operations = Table(title="Operations that take longest", title_justify="left")
    for table, names in ((layers, ("layer", "pass")), (operations, ("operation", "layer", "from"))):
        for name in names:
            table.add_column(name, overflow="fold")
        for name in heads:
            table.add_column(name, justify="right")
    for one in found.layers[: 2 * ROWS]:
        layers.add_row(one.scope, one.stage, *_cells(one.figures))
    layers.add_row("no operation", "waiting", "", f"{found.elsewhere:.1%}")
    for one in found.operations[:ROWS]:
        where = f"{one.origin.scope} {one.origin.stage}"
        operations.add_row(one.name, where, one.origin.operation, *_cells(one.figures))
    console.print(layers)
    console.print(operations)
    print_lines(console, f"Per device; {limits}")


def _cells(figures: Figures) -> list[str]:
    return [
        f"{1e3 * figures.seconds:.2f}",
        f"{figures.share:.1%}",
        f"{figures.runs:,.0f}",
        "-" if figures.flops is None else f"{figures.flops / 1e9:,.3f}",
        f"{figures.moved_bytes / 1e6:,.1f}",
        "-" if figures.roofline is None else f"{figures.roofline:.0%}",
        figures.bound or "-",
    ]
