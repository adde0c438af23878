"""Progress display: one live line with ETA on a terminal, plain lines elsewhere.

Standard output may be closed during a run, which then stops cleanly.
"""

import errno
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

TERMINAL_CLOSED = "a closed terminal"


class Output:
    """An output stream; once its reader is gone, what is written is discarded.

    Args:
      stream: such as `sys.stdout`.
      closed: the message for its closing, if it is a pipe.
    """

    def __init__(self, stream: TextIO, closed: str) -> None:
        self._stream, self._closed = stream, closed
        self.encoding = stream.encoding
        self._is_terminal = stream.isatty()
        self._gone: str | None = None
        self._report: Callable[[str], None] | None = None

    def when_closed(self, report: Callable[[str], None]) -> None:
        """Call `report` when the stream is closed, or now if it is."""
        self._report = report
        if self._gone is not None:
            report(self._gone)

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Redirect output that cannot be written to the null device, on stderr too."""
        is_pipe = error.errno == errno.EPIPE
        if not (is_pipe or (error.errno == errno.EIO and self._is_terminal)):
            raise error
        lost = os.fstat(self.fileno())
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (self.fileno(), sys.stderr.fileno()):
            if os.path.samestat(os.fstat(descriptor), lost):
                os.dup2(null, descriptor)
        os.close(null)
        self._gone = self._closed if is_pipe else TERMINAL_CLOSED
        if self._report is not None:
            self._report(self._gone)


class Display:
    """The progress of one run."""

    def __init__(self, console: Console, unit: str, total_steps: int, first_step: int) -> None:
        self._console = console
        self._unit = unit
        self._total_steps = total_steps
        self._first_step = first_step
        self._progress: Progress | None = None

    def show(self, line: Mapping[str, float | None]) -> None:
        step, figures = int(line["step"] or 0), self._figures(line)
        if not self._console.is_terminal:
            self.line(f"step {step}/{self._total_steps}  {figures}")
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=self._total_steps, figures="")
            self._progress.start()
        self._progress.update(self._task, completed=step, figures=figures)

    def line(self, text: str) -> None:
        print_lines(self._console, text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _figures(self, line: Mapping[str, float | None]) -> str:
        step, seconds = int(line["step"] or 0), line["step_seconds"] or 0.0
        rate, mfu = line[f"{self._unit}_per_second"] or 0.0, line["mfu"]
        # The first step includes compilation: it does not predict the rest.
        compiled = step > self._first_step + 1
        remaining = clock(max(self._total_steps - step, 0) * seconds) if compiled else "?"
        parts = [
            f"loss {line['loss']:.4g}",
            f"{quantity(rate)} {self._unit}/s",
            f"{seconds:.3g} s/step",
            *([f"mfu {mfu:.1%}"] if mfu is not None else []),
            f"eta {remaining}",
        ]
        return "  ".join(parts)


def quantity(number: float) -> str:
    """Return a number in three or four figures: 950, 41.2k, 1.3M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def clock(seconds: float) -> str:
    """Format seconds as 0:50, 12:05 or 3:07:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def print_lines(console: Console, *lines: str) -> None:
    """Print lines unwrapped: a log file's are not cut to a terminal's width."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def on_first_process(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line on process 0 and does nothing on others."""
    # Imported here: the command line's help is printed without JAX.
    import jax

    def print_first(line: str) -> None:
        if jax.process_index() == 0:
            print_lines(console, line)

    return print_first


def quiet() -> Console:
    """Return a console that prints nothing."""
    return Console(file=open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the console


def terminal(output: Output | None = None) -> Console:
    """Return a console on a stream, by default standard output; if that is no terminal, wide enough
    for tables."""
    file: Any = output  # it has rich's file interface
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=160)


# -- durations and sizes, as text and for axes of figures ------------------------------------------


class Unit(NamedTuple):
    """A unit: its size in seconds or bytes, and its name."""

    size: float
    name: str


_SECONDS = (
    Unit(1e-6, "us"), Unit(1e-3, "ms"), Unit(1.0, "s"), Unit(60.0, "min"), Unit(3600.0, "hours"),
    Unit(86_400.0, "days"),
)  # fmt: skip
_BYTES = tuple(Unit(1024.0**n, name) for n, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))
_NOTHING = 1e-9  # seconds below this are rounding errors


def time_unit(seconds: float) -> Unit:
    """Return the largest unit that fits into a duration once, or twice for minutes and hours."""
    fitting = [one for one in _SECONDS if seconds >= one.size * (2 if one.size > 1 else 1)]
    return fitting[-1] if fitting else _SECONDS[0]


def byte_unit(size: float) -> Unit:
    """Return the largest binary unit of which a size has at least one."""
    return [_BYTES[0], *(one for one in _BYTES if size >= one.size)][-1]


def human_seconds(seconds: float) -> str:
    """Format a duration with up to four digits: `13.7 us`, `2.5 ms`, `12.5 days`; 0 below 1 ns."""
    if abs(seconds) < _NOTHING:
        return "0"
    unit = time_unit(abs(seconds))
    value = seconds / unit.size
    return f"{value:,.0f} {unit.name}" if abs(value) >= 1000 else f"{value:.4g} {unit.name}"


def amount(number: float) -> str:
    """Format a number with three digits and a word: 2.89 billion."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:.3g}"
