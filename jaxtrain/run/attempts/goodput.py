"""Goodput: accounting of productive and lost time over all attempts of a run.

Goodput is the fraction of the time spent on optimizer steps whose result was kept. All seconds
come from the phases' monotonic clock; the wall clock is used only for the time down between
two attempts.
"""

import bisect
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.config.untrusted import parse_json, read_bounded
from jaxtrain.run.phases import Activity, Phases
from jaxtrain.run.show.progress import clock, print_lines

if TYPE_CHECKING:
    from jaxtrain.run.show.figures import Picture

FORMAT = 1  # of goodput.json
PRODUCTIVE = "step"
CAUSES = {
    PRODUCTIVE: "steps that count",
    "start": "starting: devices, data, model",
    "restore": "reading a checkpoint",
    "compile": "compiling",
    "data": "waiting for a batch",
    "evaluation": "evaluating",
    "save": "saving",
    "replay": "steps repeated after a restart or rewind",
    "bad": "steps whose update was skipped",
    "stall": "stalled",
    "down": "between the last record of an attempt and the next attempt",
    "idle": "between the phases",
}

# Above this many points every second one of the older half is dropped: a file that grows with the
# run would be written ever more slowly. Between points all steps are assumed to take equal time.
_MAX_POINTS = 1000
_MAX_BARS = 16

# Distinguished by lightness and hatching, so that grayscale prints are readable.
_COLUMNS = 3  # of the legend
_FACES = ("0.85", "white", "0.6", "0.95", "0.4", "white", "0.75", "0.2", "white", "0.5", "1", "0.9")
_HATCHES = ("", "///", "...", "xxx", "", "...", "\\\\\\", "", "+++", "xxx", "", "---")


@dataclasses.dataclass(frozen=True)
class Account:
    """Where the time of a run went.

    Attributes:
      attempts: seconds by cause of each attempt, the first one first. Causes are those of CAUSES;
        one that is absent took no time. The time down before an attempt is that attempt's.
      points: (step, productive seconds up to it), both growing: what is moved to `replay` when a
        later attempt resumes at a step.
      recorded_at: the wall clock when this was recorded; None if the run had then reached its
        end, so that the time until it is resumed is not a loss.
    """

    attempts: tuple[Mapping[str, float], ...]
    points: tuple[tuple[int, float], ...] = ()
    recorded_at: float | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by cause over all attempts: every cause, also those that took no time."""
        return {cause: sum(a.get(cause, 0) for a in self.attempts) for cause in CAUSES}

    @property
    def goodput(self) -> float:
        """Productive time over all time; 0 before there was any."""
        seconds = self.seconds
        total = sum(seconds.values())
        return seconds[PRODUCTIVE] / total if total else 0.0

    def line(self) -> dict[str, Any]:
        """Return fields of metrics.jsonl: `goodput`, `goodput_seconds` by cause, and more."""
        return {
            "goodput": round(float(self.goodput), 6),
            "goodput_seconds": {c: round(float(s), 3) for c, s in self.seconds.items()},
            "attempts": len(self.attempts),
            "restarts": len(self.attempts) - 1,
        }

    def sentence(self) -> str:
        """Return the account in a sentence: the share, and the largest losses."""
        seconds = self.seconds
        losses = sorted(((s, c) for c, s in seconds.items() if c != PRODUCTIVE), reverse=True)
        lost = ", ".join(f"{CAUSES[c]} {_human(s)}" for s, c in losses[:3] if s > 0)
        restarts = len(self.attempts) - 1
        plural = "" if restarts == 1 else "s"
        return (
            f"Goodput {self.goodput:.1%}: {_human(seconds[PRODUCTIVE])} of "
            f"{_human(sum(seconds.values()))} was productive training time, with {restarts} "
            f"restart{plural}; " + (f"largest losses: {lost}" if lost else "no losses")
        )

    def show(self, console: Console) -> None:
        """Print the causes that took time, and the sentence."""
        seconds = self.seconds
        total = sum(seconds.values())
        table = Table(title="Where the time went", title_justify="left")
        table.add_column("cause")
        table.add_column("time", justify="right")
        table.add_column("share", justify="right")
        for cause, spent in seconds.items():
            if spent > 0:
                table.add_row(CAUSES[cause], _human(spent), f"{spent / total:.1%}")
        console.print(table)
        print_lines(console, self.sentence())

    def figure(self) -> "Picture":
        """Return a bar for each attempt, stacked by cause; the oldest share one where there are
        many."""
        from jaxtrain.run.show.figures import Picture

        merged = max(0, len(self.attempts) - _MAX_BARS)
        bars = {str(n): a for n, a in enumerate(self.attempts, start=1) if n > merged}
        if merged:
            bars = {f"1-{merged}": Account(self.attempts[:merged]).seconds, **bars}
        figure = Picture(8, 1.8 + 0.3 * len(bars))
        axes = figure.add_subplot()
        ends = dict.fromkeys(bars, 0.0)
        for cause, face, hatch in zip(CAUSES, _FACES, _HATCHES, strict=True):
            widths = {name: float(bar.get(cause, 0)) for name, bar in bars.items()}
            if any(widths.values()):
                axes.barh(
                    list(bars),
                    list(widths.values()),
                    left=list(ends.values()),
                    label=cause,
                    color=face,
                    hatch=hatch,
                    edgecolor="black",
                    linewidth=0.6,
                )
                ends = {name: end + widths[name] for name, end in ends.items()}
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_ylabel("attempt")
        axes.set_title(f"goodput {self.goodput:.1%}", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        handles, causes = axes.get_legend_handles_labels()
        if handles:
            # A legend fills columns first, but is read by rows.
            order = [n for column in range(_COLUMNS) for n in range(column, len(causes), _COLUMNS)]
            figure.legend(
                [handles[n] for n in order], [CAUSES[causes[n]] for n in order],
                loc="outside lower center", ncols=min(_COLUMNS, len(causes)), frameon=False,
                fontsize="small",
            )  # fmt: skip
        return figure

    def draw(self, file: Path) -> None:
        """Write `figure` as a PNG file."""
        write_atomically(file, self.figure().png())

    def write(self, file: Path) -> None:
        """Write goodput.json, whole or not at all."""
        whole = {"format": FORMAT, **dataclasses.asdict(self)}
        write_atomically(file, (json.dumps(whole) + "\n").encode())


def read_account(file: Path) -> Account | None:
    """Return the account that `Account.write` wrote; None where there is no such file.

    Raises:
      UserError: the file is not an account.
    """
    if not file.exists():
        return None
    try:
        whole = parse_json(read_bounded(file))
        if whole["format"] != FORMAT:
            raise ValueError(f"its format is {whole['format']}, this version reads {FORMAT}")
        recorded_at = whole["recorded_at"]
        return Account(
            tuple({c: float(a[c]) for c in CAUSES if c in a} for a in whole["attempts"]),
            tuple((int(step), float(seconds)) for step, seconds in whole["points"]),
            None if recorded_at is None else float(recorded_at),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{file}: not a goodput file ({type(error).__name__}: {error}); remove it: the run "
            "resumes, and its goodput is counted from then"
        ) from error


class Goodput:
    """Account of a run during one attempt."""

    def __init__(
        self,
        previous: Account | None,
        phases: Phases,
        *,
        file: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Add an attempt, which began when `phases` did.

        Args:
          previous: the account of the attempts before; None: this is the first one.
          phases: where the time of this attempt goes.
          file: where `record` writes; None: nowhere.
          wall_clock: seconds since some epoch, the same for all attempts. It may jump: the time
            down is then wrong, but never below zero, and all else does not depend on it.
        """
        self._phases = phases
        self._file = file
        self._wall_clock = wall_clock
        # Mutable copies: resuming moves seconds of earlier attempts from step to replay.
        self._earlier = [dict(a) for a in previous.attempts] if previous else []
        self._moved: dict[str, float] = {}  # corrections of the current attempt's phases
        self._points = list(previous.points) if previous else []
        self._recorded_at = previous.recorded_at if previous else None
        if previous is not None and previous.recorded_at is not None:
            began = wall_clock() - sum(phases.seconds.values())
            self._moved["down"] = max(0, began - previous.recorded_at)

    def account(self) -> Account:
        """Return the account so far, this attempt up to now."""
        return Account(
            (*map(dict, self._earlier), self._attempt()), tuple(self._points), self._recorded_at
        )

    def record(self, step: int, *, stalled: Activity | None = None, finished: bool = False) -> None:
        """Note the productive time up to `step`, and write the file.

        Called after the start, after every evaluation and save and at the end, because the time
        since the last record of an attempt that is killed counts as down.

        Args:
          step: optimizer steps done; not below the last record, except after `mark_replay`.
          stalled: the activity that hung, if the process ends because of it: its time becomes
            `stall`.
          finished: whether the run has reached its end: later time is not down time.
        """
        if stalled is not None:
            self._move(stalled.phase, "stall", stalled.seconds)
        self._add_point(step)
        self._recorded_at = None if finished else self._wall_clock()
        if self._file is not None:
            with contextlib.suppress(
                OSError
            ):  # disk full or unavailable: the next record is written
                self.account().write(self._file)

    def mark_replay(self, step: int, *, done: int | None = None) -> None:
        """Turn the productive seconds of the steps past `step` into replay.

        Called at the start of every attempt, with the step of its checkpoint or 0, and by rewinds.

        Args:
          step: optimizer steps that the state has now.
          done: for a rewind, the steps that had been done before it.
        """
        if done is not None:
            self._add_point(done)
        lost = self._productive() - self._productive_at(step)
        for attempt in (None, *reversed(range(len(self._earlier)))):
            lost -= self._replay(attempt, lost)
        self._points = [point for point in self._points if point[0] <= step]
        self._add_point(step)

    def mark_skipped(self, steps: int = 1) -> None:
        """Turn the time of steps whose update was skipped from productive into bad.

        The bad step is known too late to have its time measured: each counts as
        the mean of those in `phases.recent("step")`.
        """
        recent = self._phases.recent(PRODUCTIVE)
        if recent:
            there = self._attempt().get(PRODUCTIVE, 0)
            self._move(PRODUCTIVE, "bad", min(steps * statistics.mean(recent), there))

    def _attempt(self) -> dict[str, float]:
        seconds = self._phases.seconds
        for cause, moved in self._moved.items():
            seconds[cause] = seconds.get(cause, 0) + moved
        return seconds

    def _move(self, cause: str, to: str, seconds: float) -> None:
        self._moved[cause] = self._moved.get(cause, 0) - seconds
        self._moved[to] = self._moved.get(to, 0) + seconds
        if cause == PRODUCTIVE:
            # Time removed from a step before a point is no longer in that point's seconds.
            productive = self._productive()
            self._points = [(step, min(p, productive)) for step, p in self._points]

    def _replay(self, attempt: int | None, most: float) -> float:
        """Move at most `most` productive seconds of an attempt to replay; return how many."""
        seconds = self._attempt() if attempt is None else self._earlier[attempt]
        moved = min(most, seconds.get(PRODUCTIVE, 0))
        if attempt is None:
            self._move(PRODUCTIVE, "replay", moved)
        else:
            seconds[PRODUCTIVE] = seconds.get(PRODUCTIVE, 0) - moved
            seconds["replay"] = seconds.get("replay", 0) + moved
        return moved

    def _productive(self) -> float:
        earlier = sum(attempt.get(PRODUCTIVE, 0) for attempt in self._earlier)
        return earlier + self._attempt().get(PRODUCTIVE, 0)

    def _productive_at(self, step: int) -> float:
        """Productive seconds up to a step, between two points by proportion."""
        if not self._points or step > self._points[-1][0]:
            # Killed between a save and its record: only earlier events are recorded.
            return self._productive() if step > 0 else 0
        points = [(0, 0), *self._points]
        after = bisect.bisect_left(points, step, key=lambda point: point[0])
        end, until_end = points[after]
        begin, until_begin = points[max(0, after - 1)]
        if step == end:
            productive = until_end
        else:
            productive = until_begin + (until_end - until_begin) * (step - begin) / (end - begin)
        return min(productive, self._productive())  # sums in another order round differently

    def _add_point(self, step: int) -> None:
        productive = self._productive()
        assert not self._points or step >= self._points[-1][0], "a step that was not resumed at"
        points = [point for point in self._points if point[0] < step]
        if len(points) >= _MAX_POINTS:
            half = len(points) // 2
            points = points[:half:2] + points[half:]
        self._points = [*points, (step, productive)]


def _human(seconds: float) -> str:
    return f"{float(seconds):.1f} s" if seconds < 100 else clock(float(seconds))
