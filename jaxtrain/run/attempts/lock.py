"""Lock of a run's folder with a heartbeat: one attempt writes at a time.

The holder of the newest attempt (see `jaxtrain.run.attempts.records`) shows itself in lock.json and
counts its heartbeats there. Clocks of machines are not compared: a holder elsewhere is alive
while its counter increases. An attempt that finds a newer number than its own has been superseded.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from jaxtrain.config.buckets import AnyPath, BucketPath, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import write_atomically
from jaxtrain.run.attempts.records import (
    LOCK_FILE,
    Claim,
    attempt_in,
    find_unended,
    newer_attempt,
    newest_attempt,
    read,
    record_end,
    take,
)

BEAT_SECONDS = 5.0
BEATS_WAITED = 3  # for a holder on another machine, before its folder is taken over


class Superseded(RuntimeError):  # noqa: N818 - a state of the run, not an error
    """A newer attempt has taken over the run's folder: this one must not write there."""

    def __init__(self, workdir: AnyPath, attempt: int, newer: int) -> None:
        super().__init__(
            f"attempt {attempt} may no longer write into {workdir}: attempt {newer} took it over"
        )
        self.attempt, self.newer = attempt, newer


class RunLock:
    """The right of one attempt to write into a run's folder.

    Attributes:
      workdir: the run's folder.
      attempt: this attempt's number, from 1.
    """

    def __init__(self, workdir: AnyPath, attempt: int, holder: "_Holder | None" = None) -> None:
        """Internal: use `acquire` or `join`."""
        self.workdir, self.attempt = workdir, attempt
        self._holder = holder

    @classmethod
    def acquire(
        cls,
        workdir: str | AnyPath,
        *,
        host: str | None = None,
        beat_seconds: float = BEAT_SECONDS,
        report: Callable[[str], None] | None = None,
        on_superseded: Callable[[Superseded], None] | None = None,
        supersedes: int = 0,
    ) -> Self:
        """Take the folder for the next attempt and beat until `release`; called by process 0 alone.

        A holder on this machine whose process is gone is replaced at once, one on another machine
        after its counter was unchanged for BEATS_WAITED of its beats on our monotonic clock.

        Args:
          workdir: the run's folder; created if missing.
          host: this machine's name; None: the system's.
          beat_seconds: between two beats.
          report: called with a line if the folder was taken over from another machine; None:
            stderr.
          on_superseded: called once, by the beating thread, when a newer attempt has the folder.
          supersedes: an attempt whose holder is replaced at once, because the hosts of an elastic
            run have replaced its generation; 0: none.

        Raises:
          UserError: another attempt is alive.
        """
        workdir = to_path(workdir)
        claim = Claim.of_this_process(host or socket.gethostname(), beat_seconds)
        while True:
            newest = newest_attempt(workdir)
            holder = find_unended(workdir, newest)
            if holder is not None and holder.token == claim.token:
                break  # storage that was slow to show our claim
            if newest > supersedes:
                _wait_until_stale(workdir, newest, holder, claim, report or _to_stderr)
            # Exactly the number after the one that was checked: with an older one, the claim fails.
            if take(workdir, newest + 1, claim):
                newest += 1
                break
        lock = cls(workdir, newest)
        lock.check()
        lock._holder = _Holder(lock, claim, on_superseded)
        return lock

    @classmethod
    def join(cls, workdir: str | AnyPath, attempt: int) -> Self:
        """Return the lock as the other processes of the run have it: they check, process 0
        holds."""
        return cls(to_path(workdir), attempt)

    def still_owned(self) -> bool:
        """Whether no newer attempt has taken the folder."""
        return newer_attempt(self.workdir, self.attempt) is None

    def check(self) -> None:
        """To be called before anything is written.

        Raises:
          Superseded: a newer attempt has taken the folder.
        """
        newer = newer_attempt(self.workdir, self.attempt)
        if newer is not None:
            raise Superseded(self.workdir, self.attempt, newer)

    def release(self) -> None:
        """Stop beating and release the folder; the attempt's number is kept.

        Does nothing in a process that joined, and more calls do nothing.
        """
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def require_not_held(workdir: AnyPath, report: Callable[[str], None]) -> None:
    """Raise UserError if a run's folder is locked; for programs without a lock, such as notebooks.

    A holder on another machine is waited for as in `RunLock.acquire`: one that died with its
    machine never records its end.

    Args:
      workdir: the run's folder.
      report: called with a line if a holder elsewhere is assumed gone.

    Raises:
      UserError: an attempt from the command line is alive there.
    """
    attempt = newest_attempt(workdir)
    mine = Claim.of_this_process(socket.gethostname(), BEAT_SECONDS)
    _wait_until_stale(workdir, attempt, find_unended(workdir, attempt), mine, report)


def _lock_error(workdir: AnyPath, attempt: int, holder: Claim) -> UserError:
    who = f"attempt {attempt}, process {holder.pid} on {holder.host}"
    return UserError(
        f"--workdir {workdir}: {who}, is writing there; wait for it, stop it with "
        f"'kill {holder.pid}' on {holder.host}, or use another --workdir"
    )


def _wait_until_stale(
    workdir: AnyPath, attempt: int, holder: Claim | None, mine: Claim, report: Callable[[str], None]
) -> None:
    """Return when the holder of `attempt` has ended; raise UserError if it is alive."""
    if holder is None:
        return
    who = f"attempt {attempt}, process {holder.pid} on {holder.host}"
    error = _lock_error(workdir, attempt, holder)
    if (holder.host, holder.machine) == (mine.host, mine.machine):
        if holder.is_alive():
            raise error
        return
    before = _beat(workdir, attempt)
    deadline = time.monotonic() + BEATS_WAITED * holder.beat_seconds
    now = time.monotonic()
    while now < deadline:
        time.sleep(holder.beat_seconds / 5)
        # The clock before the check: if we were frozen ourselves, the last check is fresh.
        now = time.monotonic()
        if _beat(workdir, attempt) != before:
            raise error
        if newest_attempt(workdir) > attempt or find_unended(workdir, attempt) is None:
            return
    report(
        f"taking over {workdir}: {who}, sent no heartbeat for "
        f"{BEATS_WAITED * holder.beat_seconds:g} seconds"
    )


def _beat(workdir: AnyPath, attempt: int) -> Any:
    shown = read(workdir / LOCK_FILE)
    return shown.get("beat") if shown is not None and attempt_in(shown) == attempt else None


class _Holder:
    """Writes lock.json and beats in it, in a thread."""

    def __init__(
        self, lock: RunLock, claim: Claim, on_superseded: Callable[[Superseded], None] | None
    ) -> None:
        self._lock, self._claim, self._on_superseded = lock, claim, on_superseded
        self._file = lock.workdir / LOCK_FILE
        self._beats = 0
        self._stream = self._show()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lock's beat", daemon=True)
        self._thread.start()

    def _content(self) -> bytes:
        # Constant length, so that a beat overwrites the last.
        facts = json.dumps({"attempt": self._lock.attempt, **dataclasses.asdict(self._claim)})
        return f'{facts[:-1]}, "beat": {self._beats:>12}}}\n'.encode()

    def _show(self) -> Any:
        """Create a new lock.json and keep it open; None in a bucket."""
        if isinstance(self._file, BucketPath):
            write_atomically(self._file, self._content())
            return None
        temporary = self._file.with_name(f".{LOCK_FILE}.{self._claim.token}.tmp")
        stream = temporary.open("wb", buffering=0)
        stream.write(self._content())
        os.fsync(stream.fileno())
        temporary.replace(self._file)
        return stream

    def _run(self) -> None:
        while not self._stopped.wait(self._claim.beat_seconds):
            try:
                self._lock.check()
                self._beat()
            except Superseded as superseded:
                if self._on_superseded is not None:
                    self._on_superseded(superseded)
                return
            except OSError:
                # Disk full or unavailable: the next beat tries again, and if that takes too
                # long another machine takes over, which `check` then finds.
                continue

    def _beat(self) -> None:
        self._beats += 1
        # In a bucket a beat between another process's check and its write may be lost for one
        # interval, like a file that was removed by hand: attempts/ determines the owner.
        if self._stream is None or not self._is_shown():
            # Removed by hand, or overwritten by an older attempt that froze while taking the
            # folder.
            before, self._stream = self._stream, self._show()
            if before is not None:
                before.close()
            return
        # Into the open file, not by its name: if a newer attempt renames its own
        # over between the check and this, the beat goes into the file that was replaced.
        os.pwrite(self._stream.fileno(), self._content(), 0)
        os.fsync(self._stream.fileno())

    def _is_shown(self) -> bool:
        shown = read(self._file)
        return shown is not None and shown.get("token") == self._claim.token

    def release(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._stream is not None:
            self._stream.close()
        # On a full disk too: then our process is found gone, or not beating.
        with contextlib.suppress(OSError):
            record_end(self._lock.workdir, self._lock.attempt)
            if self._is_shown():
                self._file.unlink(missing_ok=True)


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"jaxtrain: {line}\n")
