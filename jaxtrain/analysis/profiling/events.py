"""Durations of a program's operations, read from the profiler's trace file."""

import bisect
import collections
import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path

import jax

# Prefix of the event that marks the completion of an operation. On a CPU an operation may continue
# on other threads after its event. The thread that completes it may run the next operations first,
# so this event may be recorded much later.
_END = "end: "


@dataclasses.dataclass(frozen=True)
class Timed:
    """Count and total time of the runs of one operation in a trace, over all local devices.

    Attributes:
      count: the number of runs.
      seconds: the total time. Time in which several operations overlap on a device is divided
        among them, so that the sum over operations does not exceed the elapsed time.
    """

    count: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """Profiler event: one run of an operation or of one of its kernels.

    Attributes:
      name: the name of the operation.
      start, end: the start and end of the event, in nanoseconds of the trace.
      kernel: the name of the kernel. A library call on a GPU launches several kernels, each with
        its own event.
    """

    name: str
    start: float
    end: float
    kernel: str = ""


def newest_trace(folder: Path) -> Path:
    """Return the newest trace file of the profiler under a folder."""
    files = list(folder.glob("plugins/profile/*/*.xplane.pb"))
    assert files, f"the profiler wrote no file into {folder}"
    return max(files, key=lambda file: file.stat().st_mtime)


def operation_times(
    trace: Path, module: str, readers: Mapping[str, Collection[str]]
) -> dict[str, Timed]:
    """Return the time of each operation of one program.

    Args:
      trace: an .xplane.pb file.
      module: the name of the program, such as "jit_train_step".
      readers: maps each operation of the program to those that start after it is done.
    """
    by_device: dict[Hashable, list[Run]] = collections.defaultdict(list)
    ends: dict[str, list[float]] = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith(_END):
                    ends[event.name.removeprefix(_END)].append(event.start_ns)
                    continue
                stats = dict(event.stats)
                name = _operation(event.name, stats, module)
                if name in readers:
                    end = event.start_ns + event.duration_ns
                    run = Run(name, event.start_ns, end, kernel=event.name)
                    by_device[plane.name, stats.get("device_ordinal")].append(run)
    found: dict[str, list[float]] = collections.defaultdict(list)
    kernels: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for runs in by_device.values():
        for run, seconds in zip(runs, divide_time(until_done(runs, ends, readers)), strict=True):
            found[run.name].append(seconds)
            kernels[run.name][run.kernel] += 1
    # A library call may run a kernel several times; assume that the rarest kernel runs once.
    return {name: Timed(min(kernels[name].values()), sum(times)) for name, times in found.items()}


def _operation(event: str, stats: dict, module: str) -> str:
    """Return the name of an event's instruction; "" for events of other programs."""
    if "hlo_op" in stats:  # CPUs and GPUs
        owner = str(stats.get("hlo_module", module)).split("(")[0]
        return str(stats["hlo_op"]) if owner == module else ""
    # TPUs name an event after the instruction's full text: '%fusion.3 = bf16[8,128] fusion(...)'.
    return event.partition(" = ")[0].removeprefix("%") if " = " in event else ""


def until_done(
    runs: Sequence[Run],
    ends: Mapping[str, Collection[float]],
    readers: Mapping[str, Collection[str]],
) -> list[Run]:
    """Extend each run to the time when its operation was done.

    Args:
      runs: the runs of one device.
      ends: for each operation, the times of its completion events.
      readers: for each operation, the names of those that start after it is done.
    """
    starts: dict[str, list[float]] = collections.defaultdict(list)
    for run in runs:
        starts[run.name].append(run.start)
    finished = {name: sorted(moments) for name, moments in ends.items()}
    for moments in starts.values():
        moments.sort()

    def first(moments: Sequence[float], after: float) -> float:
        position = bisect.bisect_left(moments, after)
        return moments[position] if position < len(moments) else math.inf

    def completion(run: Run) -> float:
        end, again = first(finished.get(run.name, []), run.end), math.nextafter(run.start, math.inf)
        if end == math.inf or end > first(starts[run.name], again):
            return run.end  # no completion event, or one of a later run
        read = min((first(starts[name], run.end) for name in readers[run.name]), default=end)
        return max(run.end, min(end, read))

    return [dataclasses.replace(run, end=completion(run)) for run in runs]


def divide_time(runs: Sequence[Run]) -> list[float]:
    """Return the seconds of each run; time in which runs overlap is divided evenly among them."""
    changes = [(run.start, True, i) for i, run in enumerate(runs)]
    changes += [(run.end, False, i) for i, run in enumerate(runs)]
    # At equal times, starts come first, so that a run of zero length starts before it ends.
    changes.sort(key=lambda change: (change[0], not change[1]))
    seconds, active, before = [0.0] * len(runs), set[int](), 0.0
    for now, begins, i in changes:
        for j in active:
            seconds[j] += (now - before) / len(active) / 1e9
        before = now
        (active.add if begins else active.remove)(i)
    return seconds
