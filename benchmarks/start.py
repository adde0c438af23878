"""What a start takes: the command's help, what training imports, and its first step.

    python -m benchmarks.start [--rounds 3] [--json FILE]

Every figure is a process of its own. The first step is that of `jaxtrain train gpt_quickstart` on 8
simulated devices, from the start of the process to its line of step 1, which is printed when the
devices are two steps further: cold, with no program compiled, and warm, with those that the start
before has left. Processor time is all threads'; other work on the machine changes it less than the
clock. What modules take is `python -X importtime`'s figure, without those that they import.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side

HELP = ("-m", "jaxtrain", "--help")
TRAIN = ("-m", "jaxtrain", "train", "gpt_quickstart", "--simulate-devices", "8", "--workdir")
FIRST_STEP = "step 1/"
LARGEST = 10


def packages(report: Iterable[str]) -> dict[str, float]:
    """Milliseconds that each package's modules take by themselves, the largest first.

    Args:
      report: the lines of `python -X importtime`; others are skipped.
    """
    found: collections.Counter[str] = collections.Counter()
    for line in report:
        entry = re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", line)
        if entry:
            found[entry[2].split(".")[0]] += int(entry[1]) / 1e3
    return dict(found.most_common())


def start(
    words: Sequence[str], until: str | None, report: Path, **environment: str
) -> dict[str, float]:
    """Wall and processor seconds of a program, to its end or to its first line that begins so.

    Args:
      words: the arguments of Python.
      until: where the line begins after which the program is killed; None waits for its end.
      report: where its stderr goes.
      environment: variables that it has besides.

    Raises:
      RuntimeError: the program ended before that line, or not well.
    """
    began = time.perf_counter()
    with report.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=side_by_side.ROOT,
            env={**os.environ, **environment},
        )
        assert process.stdout is not None, "it was opened with a pipe"
        with contextlib.closing(process.stdout) as lines:
            reached = any(until is not None and line.strip().startswith(until) for line in lines)
            seconds = time.perf_counter() - began
            if reached:
                process.kill()
            _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if reached != (until is not None) or (until is None and status):
        raise RuntimeError(f"{' '.join(words)} ended: {report.read_text()[-2000:]}")
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def measure(rounds: int) -> dict[str, Any]:
    """All rows: each a list of rounds; and what the largest packages take in one start."""
    rows: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "stderr"
        for number in range(rounds):
            rows["--help"].append(start(HELP, None, report))
            code = "from jaxtrain.run.commands import train"
            rows["imports of train"].append(start(("-c", code), None, report))
            cache = {"JAXTRAIN_CACHE": str(folder / f"cache{number}")}
            for row in ("first step, cold", "first step, warm"):
                words = (*TRAIN, str(folder / f"{row} {number}"))
                rows[row].append(start(words, FIRST_STEP, report, **cache))
        largest = {}
        for row, words in (("--help", HELP), ("imports of train", ("-c", code))):
            start(("-X", "importtime", *words), None, report)
            largest[row] = packages(report.read_text().splitlines())
    return {"rows": dict(rows), "packages": largest}


def show(found: Mapping[str, Any], console: Console) -> None:
    """The rows, and the ten packages that take most."""
    rows = Table("start", "seconds", "CPU seconds", title="median of the rounds (least, most)")
    for name, measured in found["rows"].items():
        cells = []
        for key in ("seconds", "cpu_seconds"):
            values = [one[key] for one in measured]
            cells.append(f"{np.median(values):.2f} ({min(values):.2f}, {max(values):.2f})")
        rows.add_row(name, *cells)
    console.print(rows)
    for name, of in found["packages"].items():
        total = sum(of.values())
        parts = ", ".join(f"{package} {ms:.0f}" for package, ms in list(of.items())[:LARGEST])
        console.print(f"{name}: {total:.0f} ms of imports; {parts}", soft_wrap=True)


def main() -> None:
    """Measures, prints and, where asked, writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    show(found, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
