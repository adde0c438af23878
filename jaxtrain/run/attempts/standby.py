"""Warm standby interpreter: a process that has imported JAX and waits for the next attempt.

The supervisor starts one after the first step of an attempt, and hands it the command of the next:
a restart does not wait for Python and its imports. It has initialized no backend: it holds no
device, no lock and no port. It ends when the supervisor does, since its socket is then closed.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = (sys.executable, "-P", "-m", "jaxtrain")
# What `train` imports before its first step, whatever its configuration; the last one Orbax.
_MODULES = ("jaxtrain.cli", "jaxtrain.run.commands.train", "jaxtrain.run.checkpoint.saved")
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class Standby:
    """A waiting process in its own process group, and the socket to it.

    Attributes:
      process: the process.
      line: our end of the socket, which becomes that of its heartbeats.
      descriptor: the other end's, in the process.
    """

    def __init__(self) -> None:
        self._environment, self._versions = dict(os.environ), _versions()
        self.line, theirs = socket.socketpair()
        with theirs:
            self.descriptor = theirs.fileno()
            self.process = subprocess.Popen(
                [*PROGRAM[:-1], __name__, str(self.descriptor)],
                stdin=subprocess.DEVNULL,
                process_group=0,
                pass_fds=[self.descriptor],
            )

    def fits(self) -> bool:
        """Return whether it can replace a fresh process: it lives, and environment and installed
        packages are still those that it has imported with."""
        return (
            self.process.poll() is None
            and self._environment == dict(os.environ)
            and self._versions == _versions()
        )

    def run(self, command: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Send it the command to run, in our current folder; return whether that was possible.

        Args:
          command: `PROGRAM` and its arguments.
          variables: added to its environment.
        """
        order = {
            "arguments": list(command[len(PROGRAM) :]),
            "folder": os.getcwd(),
            "variables": dict(variables),
        }
        with contextlib.suppress(OSError):
            self.line.sendall(json.dumps(order).encode() + b"\n")
            return True
        return False

    def close(self) -> None:
        """End it."""
        self.line.close()
        self.process.kill()
        self.process.wait()


class Reserve:
    """The supervisor's standby: at most one, and at most one start of it an attempt."""

    def __init__(self, command: Sequence[str]) -> None:
        """Args: command: of each attempt; none is kept for another program than `PROGRAM`."""
        self._is_ours = tuple(command[: len(PROGRAM)]) == PROGRAM
        self._standby: Standby | None = None

    def prepare(self) -> None:
        """Start a standby, unless there is one; call when an attempt has taken its first step."""
        if self._is_ours and self._standby is None:
            with contextlib.suppress(OSError):  # no process or memory left: a fresh start, then
                self._standby = Standby()

    def take(self) -> Standby | None:
        """Return the standby for the next attempt; None if a fresh process has to be started."""
        standby, self._standby = self._standby, None
        if standby is not None and not standby.fits():
            standby.close()
            return None
        return standby

    def close(self) -> None:
        """End the standby."""
        if self._standby is not None:
            self._standby.close()


def _versions() -> tuple[object, ...]:
    """Return what changes when a package is installed, or a module of jaxtrain is edited."""
    package = Path(__file__).parents[2]
    folder = Path(sysconfig.get_path("purelib"))
    changed = [file.stat().st_mtime_ns for file in (*package.rglob("*.py"), folder)]
    return len(changed), max(changed)


def wait(descriptor: int) -> None:
    """Import what training needs, wait for a command, and run it as `python -m jaxtrain` would.

    Args:
      descriptor: of the socket to the supervisor.
    """
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    score = _prefer_for_oom_kill()
    from jaxtrain.run.garbage import collect_rarely, share_arenas

    collect_rarely()
    share_arenas()
    for name in _MODULES:
        importlib.import_module(name)
    line = socket.socket(fileno=descriptor)
    received = b""
    while not received.endswith(b"\n"):
        more = line.recv(65536)
        if not more:
            return  # the supervisor is gone
        received += more
    line.detach()
    order = json.loads(received)
    if score is not None:
        with contextlib.suppress(OSError):
            _OOM_SCORE.write_text(score)
    os.chdir(order["folder"])
    os.environ.update(order["variables"])
    sys.argv = ["jaxtrain", *order["arguments"]]
    signal.signal(signal.SIGINT, interrupt)
    runpy.run_module("jaxtrain", run_name="__main__", alter_sys=True)


def _prefer_for_oom_kill() -> str | None:
    """Let Linux kill this process first if memory runs out; return the former score."""
    with contextlib.suppress(OSError):
        score = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text("1000")
        return score
    return None


if __name__ == "__main__":
    wait(int(sys.argv[1]))
