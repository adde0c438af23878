"""Writer of TensorBoard event files, one for each attempt, without a protobuf library.

Four messages are needed (tensorboard/compat/proto: event.proto, summary.proto). The packages that
have them load PyTorch or TensorFlow where there is one, for seconds before a run's first step.
"""

import functools
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxtrain.config.files import Appended

_STARTED = 1  # SessionLog.START


class EventFile:
    """Scalars of one attempt.

    Args:
      folder: of all attempts' files; made where there is none.
      first_step: the events of earlier attempts past this step are hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard wants the seconds and "tfevents"; the nanoseconds, because two attempts within
        # one second would write into one file.
        now, host = time.time_ns(), socket.gethostname()
        self._file = Appended(folder / f"events.out.tfevents.{now // 10**9}.{host}.{now}")
        self._append(event(time.time(), 0, _bytes(3, b"brain.Event:2")))
        purged = first_step + 1 if first_step else 0
        self._append(event(time.time(), purged, _bytes(7, _number(1, _STARTED))))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the values of a step."""
        self._append(event(time.time(), step, summary(values)))

    def close(self) -> None:
        """Writes the rest; raises FullDiskError where it cannot."""
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
    with np.errstate(over="ignore"):  # what is too large is infinite
        numbers = {name: np.array(value, "<f4").tobytes() for name, value in values.items()}
    parts = (_bytes(1, name.encode()) + b"\x15" + number for name, number in numbers.items())
    return _bytes(5, b"".join(_bytes(1, part) for part in parts))


def _bytes(field: int, content: bytes) -> bytes:
    """A field that holds text or a message."""
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    """A field that holds a number, 0 or more."""
    return bytes([field << 3]) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last byte have the eighth."""
    digits = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def masked_checksum(content: bytes) -> int:
    """CRC-32C (RFC 3720, appendix B.4), rotated and moved as TFRecords want it."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _table() -> tuple[int, ...]:
    """What a byte does to the checksum: its eight steps of division by the polynomial."""

    def step(crc: int) -> int:
        return (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)

    return tuple(functools.reduce(lambda crc, _: step(crc), range(8), byte) for byte in range(256))
