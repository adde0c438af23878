"""A run's metrics on disk: metrics.jsonl, the event files and loss.png, written and read back."""

import contextlib
import functools
import json
import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxtrain.config.buckets import Place
from jaxtrain.config.disks import FullDiskError
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.run.appended import Appended
from jaxtrain.run.event_file import EventFile
from jaxtrain.run.show.plot import loss_png

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsFiles:
    """metrics.jsonl, the event files and loss.png of one run's folder."""

    def __init__(self, workdir: Path, first_step: int, references: Mapping[str, float]) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        self._metrics = workdir / METRICS_FILE
        self._image = workdir / PLOT_FILE
        self._references = dict(references)
        drop_lines_past(self._metrics, first_step)
        self._lines = Appended(self._metrics)
        self._events = EventFile(workdir / TENSORBOARD_FOLDER, first_step)
        self._drawing: Future[None] | None = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line; infinities and NaN, which JSON does not have, become null."""
        self._lines.append((json.dumps(strict(line), allow_nan=False) + "\n").encode())
        numbers = {n: x for n, x in line.items() if n != "step" and isinstance(x, int | float)}
        self._events.write(int(line["step"]), numbers)

    def draw(self) -> None:
        """Draws loss.png beside the training; leaves it out while the last drawing is going on."""
        if self._drawing is None or self._drawing.done():
            if self._drawing is not None:
                with contextlib.suppress(FullDiskError):  # as often as the next is drawn
                    self._drawing.result()
            self._drawing = _drawer().submit(self._draw)

    def _draw(self) -> None:
        lines = read_lines(self._metrics)
        write_atomically(self._image, loss_png(lines, self._references))

    def close(self) -> None:
        """Draws the last loss.png and closes the files; more calls do nothing.

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


def read_lines(file: Place) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl; a last line that a killed writer left torn is passed over.

    Raises:
      UserError: another line is not JSON.
    """
    lines = []
    # What stands behind the last newline is empty or torn.
    for number, text in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{file}:{number}: not a line of JSON ({error}); remove that line, or the file"
            ) from error
    return lines


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
