"""Metrics on disk: metrics.jsonl, TensorBoard event files and figures, written and read back.

Event files, one for each attempt, need no protobuf library: there are four messages
(tensorboard/compat/proto: event.proto, summary.proto). The packages with them import PyTorch or
TensorFlow if installed, for seconds before a run's first step.
"""

import contextlib
import functools
import io
import json
import math
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import count_of
from jaxtrain.config.files import Appended, write_atomically, writing
from jaxtrain.config.untrusted import MAX_JSON_BYTES, MalformedError, parse_json

if TYPE_CHECKING:  # it imports JAX, and readers of metrics.jsonl do not
    from jaxtrain.training.objectives.objective import Yardstick

_STARTED = 1  # SessionLog.START


class EventFile:
    """Scalars of one attempt.

    Args:
      folder: of all attempts' files; created if missing.
      first_step: the events of earlier attempts past this step are hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard needs the seconds and "tfevents"; nanoseconds, because two attempts within
        # one second would write into one file.
        now, host = time.time_ns(), socket.gethostname()
        self._file = Appended(folder / f"events.out.tfevents.{now // 10**9}.{host}.{now}")
        self._append(event(time.time(), 0, _bytes(3, b"brain.Event:2")))
        purged = first_step + 1 if first_step else 0
        self._append(event(time.time(), purged, _bytes(7, _number(1, _STARTED))))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step."""
        self._append(event(time.time(), step, summary(values)))

    def close(self) -> None:
        """Flush pending events; raise FullDiskError if the disk is full."""
        self._file.close()

    def _append(self, content: bytes) -> None:
        # A TFRecord: the length and its checksum, the bytes and theirs.
        length = struct.pack("<Q", len(content))
        sums = (struct.pack("<I", masked_checksum(part)) for part in (length, content))
        self._file.append(length + next(sums) + content + next(sums))


def event(wall_time: float, step: int, what: bytes) -> bytes:
    """Return an Event's bytes: wall_time is field 1, step 2, and its content comes last."""
    return b"\x09" + struct.pack("<d", wall_time) + (_number(2, step) if step else b"") + what


def summary(values: Mapping[str, float]) -> bytes:
    """Field 5 of an Event: a Summary of Values, each a tag (1) and a float32 (2)."""
    with np.errstate(over="ignore"):  # too large values become infinite
        numbers = {name: np.array(value, "<f4").tobytes() for name, value in values.items()}
    parts = (_bytes(1, name.encode()) + b"\x15" + number for name, number in numbers.items())
    return _bytes(5, b"".join(_bytes(1, part) for part in parts))


def _bytes(field: int, content: bytes) -> bytes:
    """Return a field that holds text or a message."""
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    """Return a field that holds a number, 0 or more."""
    return bytes([field << 3]) + _varint(value)


def _varint(value: int) -> bytes:
    """Encode a varint: seven bits per byte, lowest first; all but the last byte have the eighth
    bit."""
    digits = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def masked_checksum(content: bytes) -> int:
    """Return CRC-32C (RFC 3720, appendix B.4), rotated and offset as in TFRecords."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _table() -> tuple[int, ...]:
    """Return the checksum's table: for each byte eight steps of division by the polynomial."""

    def step(crc: int) -> int:
        return (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)

    return tuple(functools.reduce(lambda crc, _: step(crc), range(8), byte) for byte in range(256))


METRICS_FILE = "metrics.jsonl"
# How far each tracker has been sent its lines.
POSITION_FILES = "tracker_wandb.json", "tracker_mlflow.json", "tracker_track.json"
DAMAGED_FILE = "metrics.damaged.jsonl"  # lines that a resume found damaged
PLOT_FILE = "loss.png"
CONFUSION = "eval_confusion"  # its name in metrics.jsonl
CONFUSION_FILE = "confusion.png"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsFiles:
    """metrics.jsonl, the event files, loss.png and, for classification, confusion.png of one run's
    folder."""

    def __init__(
        self,
        workdir: Path,
        first_step: int,
        yardstick: "Yardstick",
        class_names: Sequence[str] = (),
    ) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        self._metrics = workdir / METRICS_FILE
        self._image = workdir / PLOT_FILE
        self._matrix = workdir / CONFUSION_FILE
        self._yardstick, self._class_names = yardstick, tuple(class_names)
        self._confusion: list[list[int]] | None = None  # of this attempt's last evaluation
        drop_lines_past(self._metrics, first_step)
        self._lines = Appended(self._metrics)
        self._events = EventFile(workdir / TENSORBOARD_FOLDER, first_step)
        self._drawing: Future[None] | None = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; infinities and NaN, which JSON does not have, become null."""
        self._lines.append((json.dumps(strict(line), allow_nan=False) + "\n").encode())
        self._events.write(int(line["step"]), numbers_of(line))
        self._confusion = line.get(CONFUSION, self._confusion)

    def draw(self) -> None:
        """Draw the pictures in a background thread; skip it while they are being drawn."""
        if self._drawing is None or self._drawing.done():
            if self._drawing is not None:
                # Disk full or unavailable: the next one is drawn.
                with contextlib.suppress(OSError):
                    self._drawing.result()
            self._drawing = _drawer().submit(self._draw)

    def _draw(self) -> None:
        from jaxtrain.run.show.figures import confusion_figure, loss_png

        # One line at a time: all lines would grow the memory with the run's length.
        write_atomically(self._image, loss_png(each_line(self._metrics), self._yardstick))
        if self._confusion is not None:
            write_atomically(
                self._matrix, confusion_figure(self._confusion, self._class_names).png()
            )

    def close(self) -> None:
        """Draw the last pictures and close the files; further calls do nothing.

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
    """Draw in a background thread: it takes some tenths of a second.

    One thread for all runs of the process, since matplotlib loads fonts for each thread that draws,
    and keeps them and their files open when it has ended.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="loss.png")


def class_names(facts: Mapping[str, Any]) -> list[str]:
    """Return the class names in the data's facts; empty if there are none."""
    names = facts.get("class_names")
    return [] if names is None else str(names).split(", ")


def strict(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line that JSON can represent: without infinities and NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a line that are numbers."""
    return {n: x for n, x in line.items() if n != "step" and isinstance(x, int | float)}


Report = Callable[[str], None]


def _warn(sentence: str) -> None:
    sys.stderr.write(f"jaxtrain: {sentence}\n")


def read_lines(file: AnyPath, report: Report = _warn) -> list[dict[str, Any]]:
    """Return all of `each_line`."""
    return list(each_line(file, report))


def each_line(file: AnyPath, report: Report = _warn) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics.jsonl one at a time.

    A last line that a killed writer left torn is skipped. So is a damaged line, such as one with a
    flipped bit: one message at the end counts them.

    Args:
      file: the metrics.jsonl.
      report: called with that message.
    """
    damaged = []
    for number, text, line in _parse(file):
        if isinstance(line, MalformedError):
            damaged.append((number, text, line))
        else:
            yield line
    if damaged:
        report(f"{_damage(file, damaged)}; skipped")


def parse_line(text: bytes) -> dict[str, Any]:
    """Return one line of a metrics.jsonl.

    Raises:
      MalformedError: it is not an object of JSON with the number of a step.
    """
    line = parse_json(text)
    if not isinstance(line, dict):
        raise MalformedError("not an object")
    step = line.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise MalformedError("no step number" if step is None else f"step {step!r}")
    return line


_Parsed = tuple[int, bytes, Any]


def _parse(file: AnyPath) -> Iterator[_Parsed]:
    """Yield of each line its number, its bytes, and its object or the MalformedError."""
    with _open(file) as stream:
        # Zeros after a power failure may extend for gigabytes without a line break.
        for number, text in enumerate(iter(lambda: stream.readline(MAX_JSON_BYTES), b""), 1):
            if not text.endswith(b"\n") and len(text) < MAX_JSON_BYTES:
                return
            try:
                yield number, text, parse_line(text)
            except MalformedError as error:
                yield number, text, error


def _damage(file: AnyPath, damaged: Sequence[_Parsed]) -> str:
    number, _, reason = damaged[0]
    return f"{file}: {count_of(len(damaged), 'damaged line')} (line {number}: {reason})"


def _open(file: AnyPath) -> BinaryIO:
    return file.open("rb") if isinstance(file, Path) else io.BytesIO(file.read_bytes())


def drop_lines_past(file: Path, step: int, report: Report = _warn) -> None:
    """Keep a metrics.jsonl's lines up to `step`; a run that restarts (step 0) keeps none.

    Damaged lines are moved to DAMAGED_FILE next to it, and reported: they do not end a run.
    """
    if not file.exists():
        return
    kept: list[bytes] = []
    damaged: list[_Parsed] = []
    for number, text, line in _parse(file) if step > 0 else ():
        if isinstance(line, MalformedError):
            damaged.append((number, text, line))
        elif line["step"] <= step:
            kept.append(text)
    if damaged:
        moved_to = file.with_name(DAMAGED_FILE)
        with writing(moved_to), moved_to.open("ab") as stream:
            stream.writelines(text.removesuffix(b"\n") + b"\n" for _, text, _ in damaged)
        report(f"{_damage(file, damaged)}; moved to {moved_to.name}; the other lines are kept")
    write_atomically(file, b"".join(kept))


def lines_of(folder: AnyPath) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; empty if there is no such file yet."""
    file = folder / METRICS_FILE
    return read_lines(file) if file.exists() else []
