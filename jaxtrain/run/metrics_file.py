"""A run's metrics on disk: metrics.jsonl, event files and pictures, written and read back."""

import contextlib
import functools
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.run.appended import Appended
from jaxtrain.run.event_file import EventFile
from jaxtrain.run.show.confusion import CONFUSION, confusion_figure
from jaxtrain.run.show.plot import loss_png

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"
CONFUSION_FILE = "confusion.png"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsFiles:
    """metrics.jsonl, the event files, loss.png and, where classes are told, confusion.png of one
    run's folder."""

    def __init__(
        self,
        workdir: Path,
        first_step: int,
        references: Mapping[str, float],
        class_names: Sequence[str] = (),
    ) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        self._metrics = workdir / METRICS_FILE
        self._image = workdir / PLOT_FILE
        self._matrix = workdir / CONFUSION_FILE
        self._references, self._class_names = dict(references), tuple(class_names)
        self._confusion: list[list[int]] | None = None  # of this attempt's last evaluation
        drop_lines_past(self._metrics, first_step)
        self._lines = Appended(self._metrics)
        self._events = EventFile(workdir / TENSORBOARD_FOLDER, first_step)
        self._drawing: Future[None] | None = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line; infinities and NaN, which JSON does not have, become null."""
        self._lines.append((json.dumps(strict(line), allow_nan=False) + "\n").encode())
        self._events.write(int(line["step"]), numbers_of(line))
        self._confusion = line.get(CONFUSION, self._confusion)

    def draw(self) -> None:
        """Draws the pictures beside the training; leaves it out while they are being drawn."""
        if self._drawing is None or self._drawing.done():
            if self._drawing is not None:
                with contextlib.suppress(OSError):  # full, or away: the next is drawn
                    self._drawing.result()
            self._drawing = _drawer().submit(self._draw)

    def _draw(self) -> None:
        # One line at a time: a run's memory would grow with its length by what all of them take.
        write_atomically(self._image, loss_png(each_line(self._metrics), self._references))
        if self._confusion is not None:
            write_atomically(
                self._matrix, confusion_figure(self._confusion, self._class_names).png()
            )

    def close(self) -> None:
        """Draws the last pictures and closes the files; more calls do nothing.

        Raises:
          FullDiskError: a file could not be written to its end.
        """
        if self._lines.closed:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: _drawer().submit(self._draw).result())
            stack.callback(self._events.close)
            stack.callback(self._lines.close)


@functools.cache
def _drawer() -> ThreadPoolExecutor:
    """Draws beside the training: it takes some tenths of a second.

    One thread for all runs of the process, since matplotlib loads fonts for each thread that draws,
    and keeps them and their files open when it has ended.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="loss.png")


def strict(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line as JSON can have it: without infinities and NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """What a line says of its step, as far as that is numbers."""
    return {n: x for n, x in line.items() if n != "step" and isinstance(x, int | float)}


def read_lines(file: Place) -> list[dict[str, Any]]:
    """All of `each_line`."""
    return list(each_line(file))


def each_line(file: Place) -> Iterator[dict[str, Any]]:
    """The objects of a metrics.jsonl, read as they are asked for; a last line that a killed writer
    left torn is passed over.

    Raises:
      UserError: another line is not JSON.
    """
    with _opened(file) as lines:
        for number, text in enumerate(lines, 1):
            if not text.endswith("\n"):
                return
            try:
                yield json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{file}:{number}: not a line of JSON ({error}); remove that line, or the file"
                ) from error


def _opened(file: Place) -> TextIO:
    if isinstance(file, Path):
        return file.open(encoding="utf-8", newline="\n")
    return io.StringIO(file.read_text(encoding="utf-8"), newline="\n")


def drop_lines_past(file: Path, step: int) -> None:
    """Keeps a metrics.jsonl's lines up to `step`; a run that starts anew (step 0) keeps none."""
    if not file.exists():
        return
    kept = [line for line in read_lines(file) if line["step"] <= step] if step > 0 else []
    write_atomically(file, "".join(json.dumps(line) + "\n" for line in kept).encode())


def lines_of(folder: Place) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; none where there is no such file yet."""
    file = folder / METRICS_FILE
    return read_lines(file) if file.exists() else []
