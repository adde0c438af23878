"""Attempt records in a run's folder: owner, liveness, exit reason.

Every start of a run takes the next number by creating attempts/<number>.json, which can be created
once (a fencing token): the highest number is the attempt that may write.
"""

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Self

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.files import create, write_atomically
from jaxtrain.config.untrusted import parse_json

LOCK_FILE = "lock.json"
EXIT_FILE = "exit.json"
ATTEMPTS_FOLDER = "attempts"


# -- state of the folder -------------------------------------------------------------------------


def newest_attempt(workdir: AnyPath) -> int:
    """Return the highest attempt in the folder; 0 if there was none."""
    try:
        files = list((workdir / ATTEMPTS_FOLDER).iterdir())
    except FileNotFoundError:
        files = []
    numbers = [int(f.stem) for f in files if f.suffix == ".json" and f.stem.isdecimal()]
    shown = (attempt_in(read(workdir / name)) for name in (LOCK_FILE, EXIT_FILE))
    return max([*numbers, *shown])


def newer_attempt(workdir: AnyPath, attempt: int) -> int | None:
    """Return the number of a later attempt; None if there is none."""
    # The lock first: opening it makes a network file system ask its server, while of a name that
    # was absent a moment ago it may use its cache.
    shown = attempt_in(read(workdir / LOCK_FILE))
    if shown > attempt:
        return shown
    following = workdir / ATTEMPTS_FOLDER / f"{attempt + 1}.json"
    return attempt + 1 if following.exists() else None


def attempt_of(workdir: AnyPath, pid: int, *, after: int) -> int | None:
    """Return the attempt past `after` that a process of this number on this machine took, if
    any."""
    newest = newest_attempt(workdir)
    for attempt in range(newest, after, -1):
        claim = Claim.read(workdir / ATTEMPTS_FOLDER / f"{attempt}.json")
        if claim is not None and claim.pid == pid and claim.machine == _machine():
            return attempt
    return None


def is_held(workdir: AnyPath) -> bool:
    """Whether somebody may hold the folder: alive on this machine, or not ended on another."""
    claim = find_unended(workdir, newest_attempt(workdir))
    return claim is not None and (claim.machine != _machine() or claim.is_alive())


def record_end(workdir: AnyPath, attempt: int, **facts: str | float | None) -> None:
    """Add `facts` and that it ended to attempts/<attempt>.json."""
    file = workdir / ATTEMPTS_FOLDER / f"{attempt}.json"
    known = read(file) or {"attempt": attempt}
    whole = {**known, **facts, "ended": known.get("ended", time.time())}
    write_atomically(file, (json.dumps(whole) + "\n").encode())


def write_exit(workdir: AnyPath, *, status: str, reason: str, step: int, attempt: int) -> bool:
    """Record in exit.json how an attempt ended; return False if there is a newer attempt.

    Args:
      workdir: the run's folder.
      status: how it ended, in a word: done, preempted, failed.
      reason: the cause, in a sentence.
      step: the last step done, or the last saved one if unknown.
      attempt: index of that attempt of the run, from 1.
    """
    if newest_attempt(workdir) > attempt:
        return False
    line = {"status": status, "reason": reason, "step": step, "attempt": attempt}
    write_atomically(workdir / EXIT_FILE, (json.dumps(line) + "\n").encode())
    return True


def read(file: AnyPath) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no such file or object."""
    try:
        value = parse_json(file.read_bytes())
    except (ValueError, FileNotFoundError):
        return None
    except OSError as error:
        # Replaced from another machine while it was being read.
        if error.errno == errno.ESTALE:
            return None
        raise
    return value if isinstance(value, dict) else None


def attempt_in(content: dict[str, Any] | None) -> int:
    """Return the attempt that a file of the run's folder names; 0 where it names none."""
    number = (content or {}).get("attempt")
    return number if isinstance(number, int) else 0


def newest_step(workdir: AnyPath) -> int | None:
    """Return the step of the newest complete checkpoint: a numbered folder that holds
    manifest.json, or a local one from which the run has resumed."""
    try:
        folders = [f for f in (workdir / "checkpoints").iterdir() if f.name.isdecimal()]
    except FileNotFoundError:
        return None
    newest_first = sorted(folders, key=lambda folder: -int(folder.name))
    step = next((int(f.name) for f in newest_first if (f / "manifest.json").is_file()), None)
    resumed = (read(workdir / "checkpoints" / "local.json") or {}).get("resumed_step")
    if not isinstance(resumed, int):
        return step
    return resumed if step is None else max(step, resumed)


def stops_without_progress(workdir: AnyPath, status: int) -> int:
    """Count the newest consecutive attempts that ended with this status and no newer checkpoint."""
    count, attempt = 0, newest_attempt(workdir)
    while attempt > 0:
        record = read(workdir / ATTEMPTS_FOLDER / f"{attempt}.json") or {}
        if record.get("status") != status or record.get("step_before") != record.get("step_after"):
            break
        count, attempt = count + 1, attempt - 1
    return count


# -- owner ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """The process that took an attempt: the first fields of attempts/<number>.json.

    Attributes:
      host: the machine's name.
      machine: id of the machine and pid namespace in which `pid` is valid.
      pid: the process id.
      process_start: when the process started, which distinguishes it from a later process with the
        same number; "" if unknown.
      token: unique to this claim.
      beat_seconds: between two beats.
      started: wall time, seconds since 1970, for information.
    """

    host: str
    machine: str
    pid: int
    process_start: str
    token: str
    beat_seconds: float
    started: float

    @classmethod
    def of_this_process(cls, host: str, beat_seconds: float) -> Self:
        pid = os.getpid()
        return cls(
            host=host,
            machine=_machine(),
            pid=pid,
            process_start=_process_start(pid) or "",
            token=uuid.uuid4().hex,
            beat_seconds=beat_seconds,
            started=time.time(),
        )

    @classmethod
    def read(cls, file: AnyPath) -> Self | None:
        content = read(file) or {}
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{n: content[n] for n in names}) if content.keys() >= set(names) else None

    def is_alive(self) -> bool:
        """Whether the process runs; valid only on its own machine."""
        start = _process_start(self.pid)
        return start is not None and (
            start == self.process_start or "" in (start, self.process_start)
        )


# For a claim that is unreadable after a crash.
_UNKNOWN = Claim(
    host="an unknown host",
    machine="",
    pid=0,
    process_start="",
    token="",
    beat_seconds=5.0,
    started=0.0,
)


def find_unended(workdir: AnyPath, attempt: int) -> Claim | None:
    """Return the process of an attempt that has not recorded its end; None if there is none."""
    file = workdir / ATTEMPTS_FOLDER / f"{attempt}.json"
    if "ended" in (read(file) or {}):
        return None
    claim = Claim.read(file) or (_UNKNOWN if file.exists() else None)
    lock = workdir / LOCK_FILE
    if claim in (None, _UNKNOWN) and attempt_in(read(lock)) == attempt > 0:
        claim = Claim.read(lock) or _UNKNOWN
    return claim


def take(workdir: AnyPath, attempt: int, claim: Claim) -> bool:
    """Create attempts/<attempt>.json with its whole content, unless it exists."""
    file = workdir / ATTEMPTS_FOLDER / f"{attempt}.json"
    create(file, (json.dumps({"attempt": attempt, **dataclasses.asdict(claim)}) + "\n").encode())
    winner = Claim.read(file)
    return winner is not None and winner.token == claim.token


# -- processes -----------------------------------------------------------------------------------


def _machine() -> str:
    """Return the scope of process ids: this boot of this machine, and a container's id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> str | None:
    """Return the start time of a process on this machine; "" if unknown, None if it is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # another user's
    if sys.platform == "linux":
        try:
            # The name in brackets may hold blanks and brackets: fields count from the last one.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        # Fields 3 and 22 of proc_pid_stat(5). A zombie has ended and waits for its parent.
        return None if fields[0] in "ZX" else fields[19]
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip()
