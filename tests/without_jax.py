"""Python programs that start in tenths of a second: the package's modules without JAX."""

import subprocess
import sys
from pathlib import Path

import jaxtrain

WITHOUT_JAX = f"""
import json, os, pathlib, signal, sys, threading, time, types
sys.path.insert(0, {str(Path(jaxtrain.__file__).parent.parent)!r})
from jaxtrain.config.errors import UserError
from jaxtrain.run.attempts.lock import RunLock, Superseded
# Of a suite that runs under nohup it is ignored, which what it starts inherits.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
def tell(line):
    os.write(1, (str(line) + "\\n").encode())  # also from a signal handler inside another
"""


class Process:
    """A Python program without JAX, spoken to line by line; killed at the end of the test."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_JAX + code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        return self.popen.stdout.readline().rstrip("\n")

    def ask(self, word: str) -> str:
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
