"""Seconds of a restart under `jaxtrain supervise`, by part, with and without the warm standby.

    python -m benchmarks.restart [--rounds 3] [--json FILE]

`gpt_quickstart` on 8 simulated devices, all programs compiled before. Each round kills the attempt
(SIGKILL) after some steps, once with the standby interpreter that the supervisor keeps, and once
after killing that too, so that a fresh process starts. Parts: to the supervisor's line (notice), to
its new attempt's claim of the folder (the backoff of 1 s, Python and imports), to the line that a
checkpoint was read (devices, data, model, restore), and to the first step's record. The standby's
resident and anonymous memory are read from /proc.
"""

import argparse
import collections
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from jaxtrain.run.attempts import standby

WORDS = ("gpt_quickstart", "--simulate-devices", "8", "-b", "Train.steps = 100000")
BINDINGS = ("-b", "Train.save_every = 20", "-b", "Train.log_every = 1")
PARTS = ("notice", "backoff, Python and imports", "devices, model, restore", "first step")


def _wait(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise RuntimeError("the run made no progress")
        time.sleep(0.02)
    return value


class Run:
    """A supervised run, its output in a file."""

    def __init__(self, folder: Path) -> None:
        self.workdir, self._log = folder / "run", folder / "log"
        words = [*standby.PROGRAM, "supervise", "--stall-seconds", "10", "--", "train"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*words, *WORDS, *BINDINGS, "--workdir", str(self.workdir)],
                stdout=log,
                stderr=log,
                cwd=side_by_side.ROOT,
                env={**os.environ, "JAXTRAIN_CACHE": str(folder / "cache")},
            )

    def count(self, text: str) -> int:
        """How often its output has a text."""
        return self._log.read_text(errors="replace").count(text)

    def attempt(self) -> dict[str, Any]:
        """The newest attempt's record."""
        files = (self.workdir / "attempts").glob("[0-9]*.json")
        newest = max(files, key=lambda file: int(file.stem), default=None)
        return {"attempt": 0} if newest is None else json.loads(newest.read_text())

    def lines(self) -> int:
        """How many records metrics.jsonl has."""
        file = self.workdir / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def waiting(self) -> int | None:
        """The standby's process, if there is one."""
        own = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for word in own.split():
            named = standby.__name__ in Path(f"/proc/{word}/cmdline").read_text()
            if named and int(word) != self.attempt().get("pid"):
                return int(word)
        return None


def memory_of(pid: int) -> dict[str, float]:
    """Resident and anonymous megabytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {
        line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmR", "Rss"))
    }
    return {"resident": int(sizes["VmRSS"]) / 1e3, "anonymous": int(sizes["RssAnon"]) / 1e3}


def restart(run: Run, *, warm: bool) -> dict[str, float]:
    """Kill the attempt when the standby has imported all; return seconds by part."""
    ready = _wait(run.waiting)
    _wait(lambda: "jaxlib" in Path(f"/proc/{ready}/maps").read_text())
    time.sleep(15)  # it has imported the rest, and several checkpoints are complete
    if not warm:
        os.kill(ready, signal.SIGKILL)
    old = run.attempt()
    again, restored = run.count("starting again"), run.count("Going on from")
    began = time.monotonic()
    os.kill(old["pid"], signal.SIGKILL)
    _wait(lambda: run.count("starting again") > again)
    noticed = time.monotonic()
    new = _wait(lambda: (one := run.attempt())["attempt"] > old["attempt"] and one)
    claimed = time.monotonic()
    if (new["pid"] == ready) != warm:
        raise RuntimeError(f"process {new['pid']} took the attempt, with {ready} waiting")
    _wait(lambda: run.count("Going on from") > restored)
    read, lines = time.monotonic(), run.lines()
    _wait(lambda: run.lines() > lines)
    ends = (began, noticed, claimed, read, time.monotonic())
    return {part: ends[n + 1] - ends[n] for n, part in enumerate(PARTS)} | {
        "whole": ends[-1] - ends[0]
    }


def measure(rounds: int) -> dict[str, Any]:
    """Each round's seconds by part, fresh and warm, and the standby's memory."""
    found: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        try:
            for _ in range(rounds):
                for kind in ("fresh", "warm"):
                    found[kind].append(restart(run, warm=kind == "warm"))
            ready = _wait(run.waiting)
            time.sleep(15)
            memory = memory_of(ready)
        finally:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait()
    return {"seconds": dict(found), "megabytes": memory}


def main() -> None:
    """Measure, print and, if asked, write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    table = Table("part", *found["seconds"], title="seconds, median (least, most)")
    for part in (*PARTS, "whole"):
        cells = []
        for rows in found["seconds"].values():
            values = [row[part] for row in rows]
            middle = statistics.median(values)
            cells.append(f"{middle:.1f} ({min(values):.1f}, {max(values):.1f})")
        table.add_row(part, *cells)
    Console().print(table)
    sizes = ", ".join(
        f"{megabytes:.0f} MB {kind}" for kind, megabytes in found["megabytes"].items()
    )
    sys.stdout.write(f"standby: {sizes}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
