"""The command `sweep`: one run for each combination of setting values."""

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.config.buckets import BucketPath, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors, write_atomically
from jaxtrain.config.swept import combinations
from jaxtrain.run.attempts import DONE, FAILED, PREEMPTED, USER_ERROR, records
from jaxtrain.run.attempts.signals import record_signals
from jaxtrain.run.attempts.supervise import Child
from jaxtrain.run.metrics import compare
from jaxtrain.run.metrics.files import lines_of
from jaxtrain.run.show.progress import clock, print_lines, terminal
from jaxtrain.training.settings import Config, load_config

PICTURE = "sweep.png"
GRACE_SECONDS = 120.0  # to save and exit, when this process is gone
POLL_SECONDS = 0.2
CONFIG_FILE = "config.gin"


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination of values.

    Attributes:
      values: of the swept settings, as written.
      bindings: all of its bindings.
      folder: its run's folder.
      config: its configuration.
    """

    values: dict[str, str]
    bindings: list[str]
    folder: Path
    config: Config

    def is_done(self) -> bool:
        """Whether its run is finished.

        Raises:
          UserError: it has, with another configuration.
        """
        record = records.read(self.folder / records.EXIT_FILE) or {}
        if record.get("status") != "done" or record.get("step", 0) < self.config.train.steps:
            return False
        before = (self.folder / CONFIG_FILE).read_text(encoding="utf-8").splitlines()
        now = self.config.operative().splitlines()
        other = next((line for line in now if line not in before), None)
        if other is None:
            return True
        name = other.partition(" = ")[0]
        was = next((line for line in before if line.startswith(f"{name} = ")), f"no {name}")
        raise UserError(
            f"sweep: {self.folder} was trained with {was}, and this sweep has {other}; use another "
            "--workdir, or the same bindings"
        )


def sweep(arguments: argparse.Namespace) -> int:
    """Train unfinished runs, then show all runs; return the exit status.

    Raises:
      UserError: nothing is swept, a configuration is rejected, or a folder is another sweep's.
    """
    workdir = to_path(arguments.workdir)
    if isinstance(workdir, BucketPath):
        raise UserError(f"--workdir {workdir}: the folder of a sweep must be on this machine")
    bindings = list(arguments.gin_bindings)
    if arguments.simulate_devices is not None:
        bindings.append(f"Mesh.simulated_devices = {arguments.simulate_devices}")
    points = grid(arguments.config, bindings, workdir, allow_imports=arguments.allow_imports)
    with path_errors(f"--workdir {workdir}", needs="use a folder that can be made and written"):
        done = [point.is_done() for point in points]
        workdir.mkdir(parents=True, exist_ok=True)
    console, failed = terminal(), {}
    for number, point in enumerate(points):
        name = f"{point.folder.name} ({number + 1} of {len(points)})"
        if done[number]:
            print_lines(console, f"{name}: trained already")
            continue
        log = point.folder.with_name(f"{point.folder.name}.log")
        print_lines(console, f"{name}: its output is in {log}")
        started = time.monotonic()
        status, signals = _train(arguments, point, log)
        if signals or status == PREEMPTED:
            print_lines(console, f"{name}: stopped; run the same command again to resume")
            return PREEMPTED if status in (DONE, PREEMPTED) else FAILED
        if status != DONE:
            record = records.read(point.folder / records.EXIT_FILE) or {}
            rejected = status == USER_ERROR or "reason" not in record
            failed[point.folder] = f"status {status}" if rejected else str(record["reason"])
        seconds = clock(time.monotonic() - started)
        print_lines(console, f"{name}: {failed.get(point.folder, 'trained')}, {seconds}")
    _show(console, points, failed, workdir)
    return FAILED if failed else DONE


def grid(
    name: str, bindings: Sequence[str], workdir: Path, *, allow_imports: bool = False
) -> list[Point]:
    """Return the points of a sweep, the last swept setting changing fastest.

    Args:
      name: of the config.
      bindings: gin bindings; `Name.field = [A, B]` means one run with A and one with B.
      workdir: contains a folder per point.
      allow_imports: let the file import modules from outside jaxtrain.

    Raises:
      UserError: no binding has such a list, or one of the configurations is rejected.
    """
    chosen = combinations(bindings)
    if not chosen[0].values:
        raise UserError(
            "sweep: no binding has a list of values; write for example "
            "-b 'Optimizer.learning_rate = [1e-3, 3e-3]'"
        )
    points, folders = [], set[str]()
    for one in chosen:
        folder = _folder_name(one.values)
        while folder in folders:
            folder += "_"
        folders.add(folder)
        config = load_config(name, one.bindings, allow_imports=allow_imports)
        points.append(Point(one.values, one.bindings, workdir / folder, config))
    return points


def _folder_name(values: dict[str, str]) -> str:
    """Return a name such as 'learning_rate=1e-3,seed=0', with full setting names if ambiguous."""
    ends = [setting.rpartition(".")[2] for setting in values]
    names = ends if len(set(ends)) == len(ends) else list(values)
    whole = ",".join(f"{name}={value}" for name, value in zip(names, values.values(), strict=True))
    return re.sub(r"[^\w.,=+-]+", "_", whole)[:200].strip("_")


def _train(arguments: argparse.Namespace, point: Point, log: Path) -> tuple[int, bool]:
    """Return the status of its run, and whether a signal arrived, which was forwarded."""
    command = [sys.executable, "-P", "-m", "jaxtrain", "train", arguments.config]
    command += ["--workdir", str(point.folder)]
    command += [word for binding in point.bindings for word in ("-b", binding)]
    if arguments.allow_imports:
        command.append("--allow-imports")
    with record_signals() as stop, log.open("ab") as output:
        child = Child(command, beat_seconds=5.0, grace_seconds=GRACE_SECONDS, output=output)
        given = 0
        while (status := child.status()) is None:
            child.listen(POLL_SECONDS)
            for number in stop[given:]:
                child.send_signal(number)
                given += 1
        child.kill()  # its children are killed too
        child.close()
    return status, bool(stop)


def _show(
    console: Console, points: Sequence[Point], failed: dict[Path, str], workdir: Path
) -> None:
    """The table, with the run of the lowest held-out loss marked, and the picture."""
    last = {}
    for point in points:
        last[point.folder] = compare.last_values(lines_of(point.folder))
    losses = {folder: values.get("eval_loss") for folder, values in last.items()}
    held = {folder: loss for folder, loss in losses.items() if loss is not None}
    best = min(held, key=lambda folder: held[folder], default=None)
    table = Table(title=f"Sweep in {workdir}", title_justify="left")
    for setting in points[0].values:
        table.add_column(setting, overflow="fold")
    for name in ("step", "loss", "eval loss", ""):
        table.add_column(name, justify="right" if name else "left")
    for point in points:
        values = last[point.folder]
        numbers = [values.get(name) for name in ("step", "loss", "eval_loss")]
        cells = ["-" if number is None else f"{number:.6g}" for number in numbers]
        remark = "failed" if point.folder in failed else "best" if point.folder == best else ""
        table.add_row(*map(escape, point.values.values()), *cells, remark)
    console.print(table)
    runs = [compare.Run(p.folder.name, lines_of(p.folder)) for p in points if last[p.folder]]
    if runs:
        write_atomically(workdir / PICTURE, compare.figure(runs).png())
        print_lines(console, f"Drawn: {workdir / PICTURE}")
