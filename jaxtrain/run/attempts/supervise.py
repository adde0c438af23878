"""Supervisor: run a training command as a child process and restart it on failure.

Nothing here imports JAX: a supervisor starts in tenths of a second and never holds an accelerator.

Parent-death detection: supervisor and child hold the ends of a socket. The child sends a byte per
heartbeat, and each sees the end of the connection when the other is gone, even if it was killed.
"""

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Literal

from jaxtrain.config.buckets import AnyPath, BucketError, BucketPath, require, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors
from jaxtrain.run.attempts import DONE, FAILED, PREEMPTED, USER_ERROR, records
from jaxtrain.run.attempts.signals import SUPERVISOR_VARIABLE, record_signals
from jaxtrain.run.attempts.slurm import SlurmJob
from jaxtrain.run.attempts.standby import Reserve, Standby

_BEAT, _STEP = b".", b"s"  # heartbeats before and since the first step


class Child:
    """A command in its own process group, watched by its supervisor.

    Attributes:
      pid: its process id.
      has_stepped: whether it has reported its first step.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        beat_seconds: float,
        grace_seconds: float,
        output: IO[bytes] | None = None,
        standby: Standby | None = None,
        supersedes: int = 0,
    ) -> None:
        """Start the command; its standard error goes where this process's does.

        Args:
          command: the program and its arguments.
          beat_seconds: its heartbeat interval.
          grace_seconds: time to exit when this process is gone.
          output: receives its standard output; None: this process's.
          standby: runs the command, with this process's standard output; None: a fresh process.
          supersedes: the attempt that it replaces; see `RunLock.acquire`.
        """
        self._line_open, self.has_stepped = True, False
        if standby is not None:
            facts = f"{standby.descriptor} {beat_seconds} {grace_seconds} {supersedes}"
            if standby.run(command, {SUPERVISOR_VARIABLE: facts}):
                self._line, self._process = standby.line, standby.process
                self.pid = self._process.pid
                return
            standby.close()
        self._line, theirs = socket.socketpair()
        with theirs:
            facts = f"{theirs.fileno()} {beat_seconds} {grace_seconds} {supersedes}"
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stdin=subprocess.DEVNULL,  # a background group must not read a terminal
                process_group=0,
                pass_fds=[theirs.fileno()],
                env={**os.environ, SUPERVISOR_VARIABLE: facts},
            )
        self.pid = self._process.pid

    def status(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def listen(self, seconds: float) -> bool:
        """Wait for a heartbeat, up to a timeout; return whether there was one."""
        if not self._line_open:
            time.sleep(seconds)
            return False
        if not select.select([self._line], [], [], seconds)[0]:
            return False
        received = self._line.recv(4096)
        self._line_open = bool(received)
        self.has_stepped = self.has_stepped or _STEP in received
        return self._line_open

    def send_signal(self, number: int) -> None:
        """Send a signal to the command alone, not to its children."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the command's process group."""
        # macOS raises PermissionError for a group with only unreaped processes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection."""
        self._line.close()


def report_to_supervisor(
    on_lost: Callable[[], None] | None = None, has_stepped: Callable[[], bool] | None = None
) -> bool:
    """Send heartbeats to a supervisor, and end this process when the supervisor is gone.

    A daemon thread sends the beats. When the supervisor is gone, however it ended, `on_lost` is
    called in that thread; a process still there after the supervisor's grace_seconds is killed with
    its group. Call once, as soon as the process can handle SIGTERM.

    Args:
      on_lost: requests the process to save and exit; None sends it SIGTERM.
      has_stepped: whether the process has taken its first step, called in that thread.

    Returns:
      Whether there is a supervisor.
    """
    facts = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if facts is None:
        return False
    descriptor, beat_seconds, grace_seconds, _ = facts.split()
    line = socket.socket(fileno=int(descriptor))
    line.set_inheritable(False)
    line.setblocking(False)
    _beat(line)
    arguments = (line, float(beat_seconds), float(grace_seconds), on_lost or _terminate)
    threading.Thread(
        target=_report, args=(*arguments, has_stepped), name="supervisor", daemon=True
    ).start()
    return True


def _report(
    line: socket.socket,
    beat_seconds: float,
    grace_seconds: float,
    on_lost: Callable[[], None],
    has_stepped: Callable[[], bool] | None,
) -> None:
    # The supervisor sends nothing: reading detects the end of the connection.
    while not select.select([line], [], [], beat_seconds)[0]:
        _beat(line, _STEP if has_stepped is not None and has_stepped() else _BEAT)
    on_lost()
    time.sleep(grace_seconds)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _beat(line: socket.socket, word: bytes = _BEAT) -> None:
    # A frozen supervisor does not read; a lost one is detected at the next check.
    with contextlib.suppress(BlockingIOError, ConnectionError):
        line.send(word)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


_STATUS_WORDS = {DONE: "done", PREEMPTED: "preempted"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervision:
    """Restart policy and timeouts of a supervised command.

    Attributes:
      max_restarts_without_progress: consecutive restarts without a newer checkpoint; then it gives
        up. Attempts that a signal stopped are counted likewise, over all launches of the
        supervisor.
      grace_seconds: time for a command to save and exit after the first SIGTERM or Ctrl-C.
      stall_seconds: time without a heartbeat after which a command is killed as stalled. Heartbeats
        begin when the command calls `jaxtrain.run.attempts.supervise.report_to_supervisor`.
      backoff_seconds: before the first restart; doubled with each restart without progress.
      max_backoff_seconds: upper bound of the backoff.
      poll_seconds: between two checks of the command.
    """

    max_restarts_without_progress: int = 3
    grace_seconds: float = 120.0
    stall_seconds: float = 120.0
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    poll_seconds: float = 0.1

    def __post_init__(self) -> None:
        if self.max_restarts_without_progress < 0:
            raise UserError(
                f"--max-restarts-without-progress {self.max_restarts_without_progress}: use 0 "
                "(never restart without progress) or more"
            )
        if not self.grace_seconds >= 0:
            raise UserError(f"--grace-seconds {self.grace_seconds:g}: use 0 (none) or more")
        if not self.stall_seconds > 0:
            raise UserError(f"--stall-seconds {self.stall_seconds:g}: use more than 0, such as 120")

    def backoff(self, restarts: int) -> float:
        """Seconds before the restart that follows `restarts` others without progress."""
        return min(self.backoff_seconds * 2 ** min(restarts, 60), self.max_backoff_seconds)


def supervise(
    command: Sequence[str],
    workdir: str | AnyPath,
    *,
    settings: Supervision | None = None,
    report: Callable[[str], None] | None = None,
) -> int:
    """Run a command until it is done, gives up or is stopped; return the exit status.

    Status 0, 2 and 75 of the command are final; after anything else it is restarted. The
    command's output goes where this process prints. Call from the main thread.

    Args:
      command: the program and its arguments; it writes into `workdir`.
      workdir: the run's folder.
      settings: restart policy and timeouts; None: the defaults.
      report: called with each line to print; None: stderr.
    """
    workdir, settings, report = to_path(workdir), settings or Supervision(), report or to_stderr
    if isinstance(workdir, BucketPath):
        require("--workdir", workdir)
    with path_errors(f"--workdir {workdir}", needs="use a folder that can be made and written"):
        best, restarts = records.newest_step(workdir), 0
    with contextlib.closing(Reserve(command)) as reserve, record_signals() as stop:
        while True:
            ending = run_child(command, workdir, settings, stop, reserve, report)
            with contextlib.suppress(BucketError):
                ending.write(workdir)
            is_unstarted = bool(stop) and ending.attempt is None and ending.status == -stop[0]
            job = SlurmJob.detect(os.environ)
            if ending.status == PREEMPTED or (is_unstarted and job is not None):
                reason = _idle(workdir, ending, settings, job)
                if reason is not None:
                    report(reason)
                    ending.write_last(workdir, "failed", reason)
                    return FAILED
            if ending.status in (DONE, USER_ERROR, PREEMPTED):
                return ending.status
            step = ending.step_after
            if step is not None and (best is None or step > best):
                best, restarts = step, 0
            kept = "no checkpoint yet" if step is None else f"newest checkpoint: step {step}"
            if is_unstarted:
                # exit.json of the previous attempt is still valid.
                report(f"stopped by {_name(stop[0])} before anything was started")
                return PREEMPTED
            if stop:
                report(f"{ending} ({kept}); not restarted, because {_name(stop[0])} was received")
                return FAILED
            if restarts >= settings.max_restarts_without_progress:
                reason = (
                    f"gave up after {restarts} restarts in a row without a newer checkpoint "
                    f"({kept}); the last was {ending}"
                )
                report(reason)
                ending.write_last(workdir, "failed", reason)
                return FAILED
            seconds = settings.backoff(restarts)
            restarts += 1
            report(f"{ending} ({kept}); restarting in {seconds:g} s")
            if _wait(seconds, settings.poll_seconds, stop):
                reason = f"stopped by {_name(stop[0])} between two attempts; the last was {ending}"
                report(f"{reason}; run the same command again to resume")
                ending.write_last(workdir, "preempted", reason)
                return PREEMPTED


@dataclasses.dataclass(frozen=True)
class Order:
    """An order to end the command: `save` first, with SIGTERM, or `kill`; and why."""

    kind: Literal["save", "kill"]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How one launch of the command ended.

    Attributes:
      cause: a description.
      status: its exit status; negative: the signal that ended it.
      attempt: its attempt; None if it did not get that far or is not the run's process 0.
      step_before: the newest checkpoint when it started; None: there was none.
      step_after: the newest checkpoint when it ended.
      seconds: its run time.
      stopped_at: when a signal asked it to stop, by the monotonic clock; None: none did.
    """

    cause: str
    status: int
    attempt: int | None
    step_before: int | None
    step_after: int | None
    seconds: float
    stopped_at: float | None = None

    def __str__(self) -> str:
        who = "a start" if self.attempt is None else f"attempt {self.attempt}"
        return f"{who}: {self.cause}"

    def write(self, workdir: AnyPath) -> None:
        """Complete attempts/<attempt>.json, and exit.json if the command did not."""
        if self.attempt is None:
            return
        records.record_end(
            workdir,
            self.attempt,
            exit=self.cause,
            status=self.status if self.status >= 0 else None,
            signal=_name(-self.status) if self.status < 0 else None,
            step_before=self.step_before,
            step_after=self.step_after,
            seconds=self.seconds,
        )
        record = records.read(workdir / records.EXIT_FILE) or {}
        status = _STATUS_WORDS.get(self.status, "failed")
        # A run that recorded done or preempted, and then failed, did not end that way.
        contradicts = record.get("status") in _STATUS_WORDS.values() and record["status"] != status
        if record.get("attempt") != self.attempt or contradicts:
            self._write_exit(workdir, status, self.cause, self.attempt)

    def write_last(self, workdir: AnyPath, status: str, reason: str) -> None:
        """Record in exit.json how the supervisor ended, unless another process uses the folder.

        A launch that took no attempt has no number: the newest attempt's is used.
        """
        with contextlib.suppress(BucketError):
            if self.attempt is not None:
                self._write_exit(workdir, status, reason, self.attempt)
            elif not records.is_held(workdir):
                workdir.mkdir(parents=True, exist_ok=True)
                self._write_exit(workdir, status, reason, records.newest_attempt(workdir))

    def _write_exit(self, workdir: AnyPath, status: str, reason: str, attempt: int) -> None:
        step = self.step_after or 0
        records.write_exit(workdir, status=status, reason=reason, step=step, attempt=attempt)


def run_child(
    command: Sequence[str],
    workdir: AnyPath,
    settings: Supervision,
    stop: list[int],
    reserve: Reserve,
    report: Callable[[str], None],
    *,
    watch: Callable[[], Order | None] = lambda: None,
    supersedes: int = 0,
) -> Ending:
    """Run the command once; kill it if it stalls or does not stop in time.

    Args:
      command: the program and its arguments.
      workdir: the run's folder.
      settings: restart policy and timeouts.
      stop: signals received by this process; others are added meanwhile.
      reserve: has the standby interpreter that runs it, and gets the next one.
      report: called with each line to print.
      watch: called at each check; returns an order to end the command, or None.
      supersedes: the attempt that it replaces; see `RunLock.acquire`.
    """
    attempt_before, step_before = _read_progress(workdir)
    child = Child(
        command,
        beat_seconds=min(settings.stall_seconds / 10, 5.0),
        grace_seconds=settings.grace_seconds,
        standby=reserve.take(),
        supersedes=supersedes,
    )
    started = now = time.monotonic()
    silent, heard, deadline, stopped_at, cause = 0.0, False, None, None, ""
    is_prepared, ordered = False, ""
    while (status := child.status()) is None:
        beat = child.listen(settings.poll_seconds)
        before, now = now, time.monotonic()
        heard = heard or beat
        if child.has_stepped and not is_prepared:
            reserve.prepare()
            is_prepared = True
        # A check that took too long does not count: then we were frozen, and it may well be alive.
        silent = 0.0 if beat else silent + min(now - before, 5 * settings.poll_seconds)
        if cause:
            continue
        if (order := watch()) is not None and order.kind == "kill":
            cause = f"killed: {order.reason}"
            child.kill()
            continue
        if order is not None and deadline is None:
            deadline, ordered = now + settings.grace_seconds, order.reason
            report(order.reason)
            child.send_signal(signal.SIGTERM)
        if stop and deadline is None:
            deadline, stopped_at = now + settings.grace_seconds, now
            report(f"{_name(stop[0])}: waiting {settings.grace_seconds:g} s for it to save")
            child.send_signal(stop[0])
        if deadline is not None and (len(stop) > 1 or now >= deadline):
            came = f"a second signal, {_name(stop[1])}" if len(stop) > 1 else "no end"
            cause = f"killed after {_name(stop[0]) if stop else ordered} and {came}"
            child.kill()
        elif heard and silent > settings.stall_seconds:
            cause = f"stalled, killed: no progress for {settings.stall_seconds:g} s"
            child.kill()
    child.kill()  # its children are killed too
    child.close()
    attempt, outcome = None, f"ended with status {status}"
    with contextlib.suppress(BucketError):
        if attempt_before is not None:
            attempt = records.attempt_of(workdir, child.pid, after=attempt_before)
        outcome = _cause(workdir, status, attempt)
    return Ending(
        cause=cause or outcome,
        status=status,
        attempt=attempt,
        step_before=step_before,
        step_after=_read_progress(workdir)[1],
        seconds=time.monotonic() - started,
        stopped_at=stopped_at,
    )


def _read_progress(workdir: AnyPath) -> tuple[int | None, int | None]:
    """Return the newest attempt and checkpoint; None for both while a bucket does not answer.

    The launched command then reports the error itself, and is restarted.
    """
    try:
        return records.newest_attempt(workdir), records.newest_step(workdir)
    except BucketError:
        return None, None


def _idle(
    workdir: AnyPath, ending: Ending, settings: Supervision, job: SlurmJob | None
) -> str | None:
    """Return why a stopped run should not be queued again; None if it makes progress in between."""
    limit = None
    with contextlib.suppress(BucketError, OSError):
        stops = records.stops_without_progress(workdir, PREEMPTED)
        if job is not None and ending.step_before == ending.step_after:
            stops = max(stops, job.count_stop(workdir, ending.step_after))
        if stops > settings.max_restarts_without_progress:
            if job is not None:
                now = time.monotonic()
                limit = job.describe_limit(now - (ending.stopped_at or now))
            shorter = ", a shorter notice (sbatch --signal)" if limit else ""
            return (
                f"stopped {stops} times in a row before a newer checkpoint was written: not to be "
                f"queued again; {limit + '; ' if limit else ''}give it a longer time limit"
                f"{' (sbatch --time)' if limit else ''}{shorter}, or save more often "
                "(Train.save_every)"
            )
    return None


def _cause(workdir: AnyPath, status: int, attempt: int | None) -> str:
    """Return why a command ended by itself, in its own words if recorded."""
    if status < 0:
        return f"killed by {_name(-status)}"
    record = records.read(workdir / records.EXIT_FILE) or {}
    if status == DONE or attempt is None or record.get("attempt") != attempt:
        return f"ended with status {status}"
    return f"ended with status {status}: {str(record.get('reason')).partition(chr(10))[0][:300]}"


def _wait(seconds: float, poll_seconds: float, stop: list[int]) -> bool:
    """Wait; return True at once if a signal arrives."""
    end = time.monotonic() + seconds
    while not stop and time.monotonic() < end:
        time.sleep(min(poll_seconds, seconds))
    return bool(stop)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # one of the real-time signals


def to_stderr(line: str) -> None:
    """Print a supervisor's line to stderr; a closed terminal is not an error."""
    try:
        sys.stderr.write(f"jaxtrain supervise: {line}\n")
        sys.stderr.flush()
    except OSError:
        # A closed terminal accepts no more lines; the command still has to be waited for.
        # Discard pending output: the interpreter flushes it at exit, which would fail.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)
