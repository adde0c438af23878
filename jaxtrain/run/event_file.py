"""The event file that TensorBoard reads, one an attempt.

tensorboardX has the messages and the checksum; its own writer has a thread that ends in a traceback
of its own where the disk is full.
"""

import importlib
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.run.appended import Appended


class EventFile:
    """Scalars of one attempt.

    Args:
      folder: of all attempts' files; made where there is none.
      first_step: the events of earlier attempts past this step are hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        # Here, because it takes more than a second to import: only runs that write files pay.
        from tensorboardX.record_writer import masked_crc32c

        # Made by protobuf while they are imported: type checkers do not see what is in them.
        event, summary = (
            importlib.import_module(f"tensorboardX.proto.{name}_pb2")
            for name in ("event", "summary")
        )
        self._event, self._summary, self._checksum = event.Event, summary.Summary, masked_crc32c
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard wants the seconds and "tfevents"; the nanoseconds, because two attempts within
        # one second would write into one file.
        now, host = time.time_ns(), socket.gethostname()
        self._file = Appended(folder / f"events.out.tfevents.{now // 10**9}.{host}.{now}")
        self._append(event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        purged = first_step + 1 if first_step else 0
        start = event.SessionLog(status=event.SessionLog.START)
        self._append(event.Event(wall_time=time.time(), step=purged, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the values of a step."""
        scalars = [
            self._summary.Value(tag=name, simple_value=value) for name, value in values.items()
        ]
        summary = self._summary(value=scalars)
        self._append(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Writes the rest; raises FullDiskError where it cannot."""
        self._file.close()

    def _append(self, event: Any) -> None:
        # A TFRecord: the length and its checksum, the bytes and theirs.
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        sums = (struct.pack("<I", self._checksum(part)) for part in (length, content))
        self._file.append(length + next(sums) + content + next(sums))
