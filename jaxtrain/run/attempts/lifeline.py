"""Parent-death detection between `supervise` and its child process.

The two hold the ends of a socket. The child sends a byte per heartbeat, and each sees the end of
the connection when the other is gone, even if it was killed.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

SUPERVISOR_VARIABLE = "JAXTRAIN_SUPERVISOR"


class Child:
    """A command in a process group of its own, seen by its supervisor."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        beat_seconds: float,
        grace_seconds: float,
        output: IO[bytes] | None = None,
    ) -> None:
        """Starts the command; its standard error goes where this process's does.

        Args:
          command: the program and its arguments.
          beat_seconds: between two beats that it is to send.
          grace_seconds: that it has to end when this process is gone.
          output: takes its standard output; None: where this process's goes.
        """
        self._line, theirs = socket.socketpair()
        self._line_open = True
        with theirs:
            facts = f"{theirs.fileno()} {beat_seconds} {grace_seconds}"
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stdin=subprocess.DEVNULL,  # a group in the background may not read a terminal
                process_group=0,
                pass_fds=[theirs.fileno()],
                env={**os.environ, SUPERVISOR_VARIABLE: facts},
            )
        self.pid = self._process.pid

    def status(self) -> int | None:
        """Its exit status, negative: the signal that ended it; None while it runs."""
        return self._process.poll()

    def listen(self, seconds: float) -> bool:
        """Waits for a beat, at most so long; whether there was one."""
        if not self._line_open:
            time.sleep(seconds)
            return False
        if not select.select([self._line], [], [], seconds)[0]:
            return False
        self._line_open = bool(self._line.recv(4096))
        return self._line_open

    def send_signal(self, number: int) -> None:
        """To the command alone, not to what it started."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the command and all that it started, at once."""
        # macOS says PermissionError of a group of which only unreaped processes are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Closes the line."""
        self._line.close()


def report_to_supervisor(on_lost: Callable[[], None] | None = None) -> bool:
    """Lets a supervisor know that this process is alive, and ends it when the supervisor is gone.

    A daemon thread sends the beats. When the supervisor is gone, however it ended, `on_lost` is
    called in that thread; a process still there after the supervisor's grace_seconds is killed with
    its group. To be called once, as soon as the process can react to SIGTERM.

    Args:
      on_lost: asks the process to save and end; None sends it SIGTERM.

    Returns:
      Whether there is a supervisor.
    """
    facts = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if facts is None:
        return False
    descriptor, beat_seconds, grace_seconds = facts.split()
    line = socket.socket(fileno=int(descriptor))
    line.set_inheritable(False)
    line.setblocking(False)
    _beat(line)
    arguments = (line, float(beat_seconds), float(grace_seconds), on_lost or _terminate)
    threading.Thread(target=_report, args=arguments, name="supervisor", daemon=True).start()
    return True


def _report(
    line: socket.socket, beat_seconds: float, grace_seconds: float, on_lost: Callable[[], None]
) -> None:
    # The supervisor sends nothing: what there is to read is the end of the line.
    while not select.select([line], [], [], beat_seconds)[0]:
        _beat(line)
    on_lost()
    time.sleep(grace_seconds)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _beat(line: socket.socket) -> None:
    # A frozen supervisor does not read; one that is gone is seen at the next check.
    with contextlib.suppress(BlockingIOError, ConnectionError):
        line.send(b".")


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
