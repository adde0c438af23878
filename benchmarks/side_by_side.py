"""Two or more sides of a comparison, timed in interleaved rounds: processes, or streams of one.

A side is a process that answers requests, one JSON value a line. Only one works at a time and the
others sleep, so that all sides meet the same disturbances of a shared machine, and the ratio of two
sides within a round says more than either time.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
THREADS = 2

T = TypeVar("T")


class Side:
    """One process of a comparison.

    Attributes:
      name: what it is called in tables.
      first_step_seconds: from the start of its process to the end of its first step.
      cpu_seconds: a step's processor time, all threads, median of the rounds.
      peak_bytes: the largest resident size that it has had, as of the last round.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.first_step_seconds = 0.0
        self.peak_bytes = 0
        self.cpu_seconds = 0.0
        fixed = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **fixed, **environment},
        )

    def ask(self, request: str, **arguments: Any) -> Any:
        """What the process answers; it ends the comparison where the process fails."""
        assert self._process.stdin is not None, "the process was opened with a pipe"
        assert self._process.stdout is not None, "the process was opened with a pipe"
        self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None, "the process was opened with a pipe"
        self._process.stdin.close()
        self._process.wait()


@dataclasses.dataclass(frozen=True)
class Runner:
    """What a side's process does.

    Attributes:
      step: one optimizer step on batch number i; a handle that `loss` takes.
      loss: waits for a step and gives its loss, or what else is compared, such as tokens.
      save: writes the weights to a path; None where the side reads them.
    """

    step: Callable[[int], Any]
    loss: Callable[[Any], Any]
    save: Callable[[str], None] | None = None


def serve(make: Callable[[], Runner]) -> None:
    """Answers a parent's requests until it closes the pipe."""
    # What libraries print goes to stderr: this pipe carries answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started, runner, first, done = time.perf_counter(), None, 0.0, 0
    for line in sys.stdin:
        message = json.loads(line)
        runner = runner or make()
        answer: Any = None
        if message["request"] == "save":
            assert runner.save is not None, "this side has no weights to give"
            runner.save(message["path"])
        elif message["request"] == "losses":
            answer = []
            for _ in range(message["steps"]):
                answer.append(runner.loss(runner.step(done)))
                first, done = first or time.perf_counter() - started, done + 1
        else:
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(message["steps"]):
                handle = runner.step(done)
                done += 1
            runner.loss(handle)
            answer = {
                "seconds": (time.perf_counter() - begin) / message["steps"],
                "cpu_seconds": (time.process_time() - begin_cpu) / message["steps"],
                "first_step_seconds": first,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


@contextlib.contextmanager
def closing_all(sides: Sequence[Side]) -> Iterator[None]:
    """Ends every process at the end."""
    try:
        yield
    finally:
        for side in sides:
            side.close()


def assert_equal_mathematics(losses: Mapping[str, list[Any]], tolerance: float) -> float:
    """The largest relative difference of two sides' losses, or of what else they computed.

    Raises:
      SystemExit: it is above `tolerance`: there is nothing to compare.
    """
    table = np.array(list(losses.values()))
    scale = np.where(table[0] == 0, 1, np.abs(table[0]))
    apart = float((np.abs(table - table[0]) / scale).max())
    if not apart <= tolerance:
        lines = "\n".join(f"  {name}: {values}" for name, values in losses.items())
        raise SystemExit(f"the losses are {apart:.1e} apart, more than {tolerance:.0e}:\n{lines}")
    return apart


def interleave(sides: Sequence[Side], *, rounds: int, round_seconds: float) -> dict[str, Any]:
    """Seconds a step of every side in every round; the order turns from round to round."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    cpu: dict[str, list[float]] = {side.name: [] for side in sides}
    # Also what warms them up.
    steps = {
        s.name: max(1, round(round_seconds / s.ask("time", steps=2)["seconds"])) for s in sides
    }
    for number in range(rounds):
        for side in _turned(sides, number):
            answer = side.ask("time", steps=steps[side.name])
            seconds[side.name].append(answer["seconds"])
            side.first_step_seconds = answer["first_step_seconds"]
            side.peak_bytes = answer["peak_bytes"]
            cpu[side.name].append(answer["cpu_seconds"])
            side.cpu_seconds = float(np.median(cpu[side.name]))
    return seconds


@dataclasses.dataclass(frozen=True)
class Streamed:
    """What a stream took in each round.

    Attributes:
      seconds: of an item.
      cpu_seconds: this process's processor time of an item, all threads.
      first_seconds: from asking for the stream to its first item.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    first_seconds: list[float] = dataclasses.field(default_factory=list)


def interleave_streams(
    makers: Mapping[str, Callable[[], Iterator[Any]]], *, rounds: int, count: int, ahead: int
) -> dict[str, Streamed]:
    """Streams of this process by turns, each opened anew in every round.

    Args:
      makers: opens each; a stream has a `close`.
      rounds: how often; the order turns from round to round.
      count: items that are timed.
      ahead: items taken before that, which were made before the clock starts.
    """
    found = {name: Streamed() for name in makers}
    for number in range(rounds):
        for name in _turned(list(makers), number):
            begin = time.perf_counter()
            stream: Any = makers[name]()
            next(stream)
            found[name].first_seconds.append(time.perf_counter() - begin)
            for _ in range(ahead):
                next(stream)
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                next(stream)
            found[name].seconds.append((time.perf_counter() - begin) / count)
            found[name].cpu_seconds.append((time.process_time() - begin_cpu) / count)
            stream.close()
            del stream
    return found


def _turned(items: Sequence[T], number: int) -> list[T]:
    """The items, beginning with another one in each round."""
    turn = number % len(items)
    return [*items[turn:], *items[:turn]]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile."""
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def circumstances(packages: Sequence[str]) -> dict[str, Any]:
    """Date, machine and versions, for the record."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{model}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
