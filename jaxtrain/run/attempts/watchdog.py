"""Phases of this process (start, compile, data, step, save), and the watchdog that limits them.

The watchdog detects a hang, dumps stacks, and writes the reason to disk.
"""

import collections
import contextlib
import datetime
import faulthandler
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, NamedTuple

from jaxtrain.config.files import write_atomically
from jaxtrain.training.settings import Timeouts

NAMES = ("start", "restore", "compile", "data", "step", "evaluation", "save")
IDLE = "idle"  # outside every phase
RECENT = 64  # uninterrupted stretches of work remembered for each phase

Event = Literal["enter", "leave", "mark"]
Listener = Callable[[Event, str, int], None]


class Activity(NamedTuple):
    """The phase of a process at one moment.

    Attributes:
      phase: one of NAMES, or `idle`.
      step: the optimizer step that the phase was entered with; 0 where it belongs to none.
      seconds: the phase's own time since it was entered or since its last beat.
      beats: progress so far: every enter, leave and beat of the process counts one.
    """

    phase: str
    step: int
    seconds: float
    beats: int


class _Current(NamedTuple):
    phase: str
    step: int
    since: float  # the clock where the time not yet in the totals begins
    total: float  # the phase's total up to `since`
    began: float  # the clock at enter or the last beat, what inner phases took added
    has_beaten: bool
    beats: int


class Phases:
    """The phases of one process.

    One thread enters and leaves; any thread may ask. No lock is taken, so that asking is safe in a
    signal handler and never waits for a thread that is stuck.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts idle.

        Args:
          clock: seconds that only grow.
        """
        self._clock = clock
        self._listeners: tuple[Listener, ...] = ()
        self._totals: dict[str, float] = {}
        self._recent = {name: collections.deque[float](maxlen=RECENT) for name in NAMES}
        self._outer: list[tuple[_Current, float]] = []  # with its time since enter or beat
        now = clock()
        self._current = _Current(IDLE, 0, now, 0, now, False, 0)

    def phase(self, name: str, step: int = 0) -> "_Phase":
        """Around a phase; phases nest: the inner one takes over the clock, the outer resumes.

        Args:
          name: one of NAMES.
          step: the optimizer step that it belongs to; 0: none.
        """
        assert name in self._recent, f"{name!r} is no phase; known: {', '.join(NAMES)}"
        return _Phase(self, name, step)

    def mark(self, point: str, step: int = 0) -> None:
        """Says that a named point went by, such as `save_started`; only listeners hear it."""
        for listener in self._listeners:
            listener("mark", point, step)

    def beat(self) -> None:
        """Progress inside a long phase: its `seconds`, and with them its deadline, restart."""
        now, current = self._clock(), self._current
        if current.phase != IDLE:
            self._recent[current.phase].append(now - current.began)
        self._current = current._replace(began=now, has_beaten=True, beats=current.beats + 1)

    def activity(self) -> Activity:
        """Return the current phase."""
        current = self._current
        return Activity(current.phase, current.step, self._clock() - current.began, current.beats)

    @property
    def seconds(self) -> dict[str, float]:
        """Own time of each phase so far, the current one included; the sum is the time elapsed."""
        while True:
            current = self._current
            totals = dict(self._totals)
            # Both were read while nobody switched: no stretch is missing or counted twice.
            if self._current is current:
                break
        totals[current.phase] = current.total + (self._clock() - current.since)
        return totals

    def recent(self, name: str) -> tuple[float, ...]:
        """The phase's last own times in seconds: each from enter to leave, or from beat to beat."""
        return tuple(self._recent[name])

    def add_listener(self, listener: Listener) -> None:
        """Calls `listener(event, name, step)` in the thread that enters, leaves or marks.

        It is called inside the phase: after it was entered, before it is left. What it raises goes
        to the caller of the phase, which is left then as by any other exception.
        """
        self._listeners = (*self._listeners, listener)

    def _enter(self, name: str, step: int) -> None:
        now, outer = self._clock(), self._current
        self._outer.append((outer, now - outer.began))
        self._totals[outer.phase] = outer.total + (now - outer.since)
        total = self._totals.get(name, 0)
        self._current = _Current(name, step, now, total, now, False, outer.beats + 1)

    def _leave(self) -> None:
        now, inner = self._clock(), self._current
        outer, elapsed = self._outer.pop()
        if not inner.has_beaten:  # what follows the last beat is no whole stretch
            self._recent[inner.phase].append(now - inner.began)
        self._totals[inner.phase] = inner.total + (now - inner.since)
        total, beats = self._totals[outer.phase], inner.beats + 1
        self._current = _Current(
            outer.phase, outer.step, now, total, now - elapsed, outer.has_beaten, beats
        )


class _Phase:
    """The context manager of one phase: a class, because generators cost three times as much."""

    __slots__ = ("_name", "_phases", "_step")

    def __init__(self, phases: Phases, name: str, step: int) -> None:
        self._phases = phases
        self._name = name
        self._step = step

    def __enter__(self) -> None:
        phases = self._phases
        phases._enter(self._name, self._step)
        try:
            for listener in phases._listeners:
                listener("enter", self._name, self._step)
        except BaseException:
            phases._leave()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        phases = self._phases
        try:
            for listener in phases._listeners:
                listener("leave", self._name, self._step)
        finally:
            phases._leave()


# The last resort comes this many deadlines after the last time the watchdog could look.
LAST_RESORT = 2


class Watchdog:
    """A thread that looks at the phases, between `__enter__` and `__exit__`.

    Python threads run only while the interpreter's lock is free. Where C code keeps it indefinitely
    the last resort remains: a timer of the C library's, wound up again at every look, writes the
    stacks and ends the process with status 1. It also fires where `on_expiry` itself hangs, say
    at a dead disk.
    """

    def __init__(
        self,
        phases: Phases,
        timeouts: Timeouts,
        on_expiry: Callable[[Activity, float], None],
        *,
        last_resort: Path | None = None,
    ) -> None:
        """Does not watch yet.

        Args:
          phases: what is watched.
          timeouts: how long each phase may last.
          on_expiry: called from the watchdog's thread with the stalled activity and the deadline
            in seconds that it passed, once for each time that progress stops.
          last_resort: the file that the C library's timer writes the stacks to; None: no timer.
            It is opened at the start, because later there may be no disk, and removed if empty.
        """
        self._phases = phases
        self._timeouts = timeouts
        self._on_expiry = on_expiry
        self._last_resort = last_resort
        self._stacks: BinaryIO | None = None
        self._reported: int | None = None  # the beats of the activity that on_expiry was called for
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
        """One look: calls `on_expiry` where the current phase has passed its deadline."""
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
        # A phase switched off may hold the interpreter as long as it likes; between phases the
        # next one may take the interpreter at once, so the timer runs there too.
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
    """Writes the Python stacks of all threads of this process, and the threads' names.

    Called from another thread it works while the main thread is stuck in C code: nothing is asked
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
    """Writes why a process ends to `reason-ATTEMPT-PROCESS.json`, whole or not at all.

    Args:
      folder: where to.
      process: the process's index in its run.
      attempt: which start of the run this is, from 1.
      reason: why, in a sentence.
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
