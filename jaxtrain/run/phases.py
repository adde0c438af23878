"""Phases of this process: what it is doing (start, compile, data, step, save), and for how long."""

import collections
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple

NAMES = ("start", "restore", "compile", "data", "step", "evaluation", "save")
IDLE = "idle"  # outside every phase
RECENT = 64  # recent durations kept per phase

Event = Literal["enter", "leave", "mark"]
Listener = Callable[[Event, str, int], None]


class Activity(NamedTuple):
    """The phase of a process at one moment.

    Attributes:
      phase: one of NAMES, or `idle`.
      step: the optimizer step that the phase was entered with; 0 if none.
      seconds: the phase's own time since it was entered or since its last beat.
      beats: progress counter: every enter, leave and beat of the process.
    """

    phase: str
    step: int
    seconds: float
    beats: int


class _Current(NamedTuple):
    phase: str
    step: int
    since: float  # the clock at the start of the time not yet in the totals
    total: float  # the phase's total up to `since`
    began: float  # the clock at enter or the last beat, plus the time of inner phases
    has_beaten: bool
    beats: int


class Phases:
    """The phases of one process.

    One thread enters and leaves; any thread may query. No lock is taken, so that queries are safe
    in a signal handler and never wait for a stuck thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start idle.

        Args:
          clock: monotonic seconds.
        """
        self._clock = clock
        self._listeners: tuple[Listener, ...] = ()
        self._totals: dict[str, float] = {}
        self._recent = {name: collections.deque[float](maxlen=RECENT) for name in NAMES}
        self._outer: list[tuple[_Current, float]] = []  # with its time since enter or beat
        now = clock()
        self._current = _Current(IDLE, 0, now, 0, now, False, 0)

    def phase(self, name: str, step: int = 0) -> "_Phase":
        """Run the context as a phase; phases nest: an inner one takes over the clock.

        Args:
          name: one of NAMES.
          step: its optimizer step; 0: none.
        """
        assert name in self._recent, f"{name!r} is not a phase; known: {', '.join(NAMES)}"
        return _Phase(self, name, step)

    def mark(self, point: str, step: int = 0) -> None:
        """Notify listeners of a named event, such as `save_started`."""
        for listener in self._listeners:
            listener("mark", point, step)

    def beat(self) -> None:
        """Record progress inside a long phase: its `seconds`, and its deadline, restart."""
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
        """Return the own time of each phase so far, including the current one; the sum is the
        elapsed time."""
        while True:
            current = self._current
            totals = dict(self._totals)
            # Both were read without a switch in between: no time is missing or counted twice.
            if self._current is current:
                break
        totals[current.phase] = current.total + (self._clock() - current.since)
        return totals

    def recent(self, name: str) -> tuple[float, ...]:
        """Return the phase's last own times in seconds: each from enter to leave, or from beat to
        beat."""
        return tuple(self._recent[name])

    def add_listener(self, listener: Listener) -> None:
        """Call `listener(event, name, step)` in the thread that enters, leaves or marks.

        It is called inside the phase: after it was entered, before it is left. Its errors propagate
        to the caller of the phase, which is left as by any other exception.
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
        if not inner.has_beaten:  # the time after the last beat is incomplete
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
