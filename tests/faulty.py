"""`python -m jaxtrain` with faults: the command line as it is, struck at named points of its run.

FAULTS in the environment lists them, separated by blanks: `process:event:name:step:action`, for
example `1:enter:save:4:SIGKILL`. Events and names are those that listeners of `phases.Phases` hear;
an action is a signal that the process sends itself, or `raise`, `hang`, `slow`. A fault strikes
once in a run: MARKS names the folder where it is written down, which the next attempt reads.
"""

import os
import signal
import sys
import time
from pathlib import Path

from jaxtrain import __main__
from jaxtrain.run.attempts import begin, supervise
from jaxtrain.run.phases import Phases

PROCESS = int(os.environ.get("PROCESS", "0"))


class StruckError(RuntimeError):
    """The error that the action `raise` raises."""


def strike(event: str, name: str, step: int) -> None:
    for fault in os.environ.get("FAULTS", "").split():
        *where, action = fault.split(":")
        mark = Path(os.environ["MARKS"]) / fault
        if where != [str(PROCESS), event, name, str(step)] or mark.exists():
            continue
        mark.touch()
        sys.stdout.write(f"STRUCK {fault}\n")
        sys.stdout.flush()
        if action == "raise":
            raise StruckError(f"struck at {event} {name} {step}")
        if action == "hang":
            time.sleep(3600)
        elif action == "slow":
            time.sleep(2)
        else:
            os.kill(os.getpid(), getattr(signal, action))


class FaultyPhases(Phases):
    """The phases of an attempt, with our listener."""

    def __init__(self) -> None:
        super().__init__()
        self.add_listener(strike)


def main(words: list[str], *, supervised: bool) -> int:
    """The command line with these words; under a supervisor where that is requested."""
    begin.Phases = FaultyPhases
    begin.SILENCE_SECONDS = 6.0
    if supervised and os.environ.get("JAXTRAIN_SUPERVISOR") is None:
        again = f"import sys, faulty; sys.exit(faulty.main({words!r}, supervised=False))"
        command = [sys.executable, "-c", again]
        workdir = words[words.index("--workdir") + 1]
        settings = supervise.Supervision(stall_seconds=10)
        return supervise.supervise(command, workdir, settings=settings)
    return __main__.main(words)
