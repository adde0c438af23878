"""Watchdog of a process: detects a hang in a phase, dumps stacks, and writes the reason to disk."""

import contextlib
import datetime
import faulthandler
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from jaxtrain.config.files import write_atomically
from jaxtrain.run.phases import NAMES, Activity, Phases
from jaxtrain.training.settings import Timeouts

# The last resort fires this many deadlines after the watchdog's last check.
LAST_RESORT = 2


class Watchdog:
    """A thread that watches the phases, between `__enter__` and `__exit__`.

    Python threads run only while the interpreter's lock is free. If C code holds it indefinitely,
    the last resort remains: a timer of the C library, rearmed at every check, writes the
    stacks and ends the process with status 1. It also fires if `on_expiry` itself hangs, for
    example on a dead disk.
    """

    def __init__(
        self,
        phases: Phases,
        timeouts: Timeouts,
        on_expiry: Callable[[Activity, float], None],
        *,
        last_resort: Path | None = None,
    ) -> None:
        """Prepare the watchdog; it does not watch yet.

        Args:
          phases: the watched phases.
          timeouts: the deadline of each phase.
          on_expiry: called from the watchdog's thread with the stalled activity and the deadline
            in seconds that it exceeded, once per stop of progress.
          last_resort: the file for the stacks of the C library's timer; None: no timer.
            It is opened at the start, because later there may be no disk, and removed if empty.
        """
        self._phases = phases
        self._timeouts = timeouts
        self._on_expiry = on_expiry
        self._last_resort = last_resort
        self._stacks: BinaryIO | None = None
        self._reported: int | None = (
            None  # heartbeats of the activity that on_expiry was called for
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._last_resort is not None:
            self._last_resort.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = self._last_resort.open("ab")
        self.check()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._stacks is not None and self._last_resort is not None:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()
            with contextlib.suppress(OSError):  # the error is reported anyway
                if self._last_resort.stat().st_size == 0:
                    self._last_resort.unlink()

    def check(self) -> None:
        """Check once: call `on_expiry` if the current phase has exceeded its deadline."""
        activity = self._phases.activity()
        recent = self._phases.recent(activity.phase) if activity.phase in NAMES else ()
        deadline = self._timeouts.of(activity.phase, recent)
        self._wind_up(activity, deadline)
        if (
            deadline is not None
            and activity.seconds > deadline
            and activity.beats != self._reported
        ):
            self._reported = activity.beats
            self._on_expiry(activity, deadline)

    def _wind_up(self, activity: Activity, deadline: float | None) -> None:
        if self._stacks is None:
            return
        # A phase without a deadline may hold the interpreter indefinitely; between phases the
        # next one may take it at once, so the timer runs there too.
        seconds = deadline if activity.phase in NAMES else self._timeouts.longest()
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(LAST_RESORT * seconds, file=self._stacks, exit=True)

    def _watch(self) -> None:
        seconds = self._timeouts.check_seconds()
        while not self._stop.wait(seconds):
            self.check()


def dump_stacks(file: Path) -> None:
    """Write the Python stacks of all threads of this process, and the threads' names.

    Called from another thread it works while the main thread is stuck in C code: it needs nothing
    of that thread.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        faulthandler.dump_traceback(file=stream, all_threads=True)
        # After the stacks: listing the threads takes a lock, which the stacks do without.
        names = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        lines = [f"Thread 0x{ident:016x} is {name}" for ident, name in names.items()]
        stream.write(("\n" + "\n".join(lines) + "\n").encode())


def write_reason(folder: Path, process: int, attempt: int, reason: str, activity: Activity) -> Path:
    """Write why a process ends to `reason-ATTEMPT-PROCESS.json`, whole or not at all.

    Args:
      folder: the folder.
      process: the process's index in its run.
      attempt: index of this attempt of the run, from 1.
      reason: the cause, in a sentence.
      activity: what the process was doing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"reason-{attempt}-{process}.json"
    line = {
        "process": process,
        "attempt": attempt,
        "reason": reason,
        "phase": activity.phase,
        "step": activity.step,
        "seconds": round(activity.seconds, 3),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_atomically(file, (json.dumps(line) + "\n").encode())
    return file
