"""Comparison of several runs, named or found in a folder: table, figure, page (`jaxtrain plot`)."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.config.buckets import AnyPath, to_path
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import path_errors, writable, write_atomically
from jaxtrain.run.metrics.files import METRICS_FILE, lines_of
from jaxtrain.run.show import html_charts
from jaxtrain.run.show.html_page import Recorder, document, sections
from jaxtrain.run.show.progress import print_lines

if TYPE_CHECKING:
    from jaxtrain.run.show.figures import Picture


_DEPTH = 3  # a folder of runs may hold a sweep's folder, which holds runs
_SHOWN = 8


def runs_in(folder: Path, file: str) -> list[Path]:
    """Return the folders below this one that hold a file of runs, in order of their names.

    Args:
      folder: a folder.
      file: what a run's folder has, such as `config.gin`.
    """
    return list(_below(folder, file, _DEPTH))


def _below(folder: Path, file: str, depth: int) -> Iterator[Path]:
    for inside in sorted(path for path in folder.iterdir() if path.is_dir()):
        if (inside / file).is_file():
            yield inside
        elif depth > 1 and not inside.name.startswith("."):
            yield from _below(inside, file, depth - 1)


def list_names(runs: list[Path]) -> str:
    """Some runs by their paths, for a message."""
    more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return ", ".join(map(str, runs[:_SHOWN])) + more


PICTURE = "plot.png"
POINTS = 100  # of a curve; with more lines, each point is a mean of neighbors

# Distinguished without color: by lightness, then by dashes; evaluations by markers.
_LIGHTNESS = ("black", "0.4", "0.6")
_DASHES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D", "v", "x")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's metrics.

    Attributes:
      name: its name in the table and the figure.
      lines: the objects of its metrics.jsonl.
    """

    name: str
    lines: Sequence[Mapping[str, Any]]


def plot(
    console: Console,
    folders: Sequence[str],
    png: str | None,
    html: str | None = None,
    words: Sequence[str] = (),
) -> None:
    """Print a table of these runs and draw them.

    Args:
      console: where the table is printed.
      folders: of runs, or containing such.
      png: the figure's file; `PICTURE` if neither it nor `html` is given.
      html: the file of an HTML page with the curves.
      words: the command line, for the page.

    Raises:
      UserError: a folder is not a run's, or has no metrics yet; or a file cannot be written.
    """
    picture = writable("--png", PICTURE if png is None and html is None else png)
    page = writable("--html", html)
    runs = open_runs(folders)
    console.print(table(runs))
    if picture is not None:
        write_atomically(picture, figure(runs).png())
        print_lines(console, f"Drawn: {picture}")
    if page is not None:
        write_atomically(page, runs_page(runs, words))
        print_lines(console, f"Written: {page}")


def open_runs(folders: Sequence[str]) -> list[Run]:
    """Open the runs in these folders, and in folders of runs, named by the part of their paths that
    distinguishes them."""
    found = []
    for folder, workdir in _workdirs(folders):
        with path_errors(f"plot {folder}", needs="use a run's folder that can be read"):
            lines = lines_of(workdir)
            if not lines:
                near = workdir.parent if isinstance(workdir, Path) else Path()
                runs_below = [str(file.parent) for file in near.glob(f"*/{METRICS_FILE}")]
                hint = did_you_mean(folder, runs_below) if runs_below else ""
                raise UserError(f"plot {folder}: no metrics there (no {METRICS_FILE}){hint}")
        found.append((str(workdir).rstrip("/").split("/"), lines))
    depth = 1
    while len({tuple(parts[-depth:]) for parts, _ in found}) < len({tuple(p) for p, _ in found}):
        depth += 1
    return [Run("/".join(parts[-depth:]), lines) for parts, lines in found]


def _workdirs(folders: Sequence[str]) -> Iterator[tuple[str, AnyPath]]:
    """Run' folders: those that are named, and those in folders that hold runs."""
    for folder in folders:
        workdir = to_path(folder)
        with path_errors(f"plot {folder}", needs="use a run's folder that can be read"):
            is_folder = isinstance(workdir, Path) and workdir.is_dir()
            is_run = not is_folder or (workdir / METRICS_FILE).is_file()
            inside = [] if is_run else runs_in(workdir, METRICS_FILE)
        yield from ((str(run), run) for run in inside) if inside else ((folder, workdir),)


def table(runs: Iterable[Run]) -> Table:
    """Each run's latest values."""
    runs = list(runs)
    names = ["step", "loss", "eval_loss", *_metrics(runs), "learning_rate"]
    shown = Table(title="Runs, at their last step", title_justify="left")
    shown.add_column("run", overflow="fold")
    for name in names:
        shown.add_column(name.replace("_", " "), justify="right")
    for run in runs:
        last = last_values(run.lines)
        cells = ["-" if last.get(name) is None else f"{last[name]:.6g}" for name in names]
        shown.add_row(escape(run.name), *cells)
    return shown


def last_values(lines: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the last value of each metric; None if that was not finite."""
    return {
        name: value
        for line in lines
        for name, value in line.items()
        if value is None or isinstance(value, int | float)
    }


def figure(runs: Sequence[Run]) -> "Picture":
    """Plot losses, the objectives' metrics and learning rates over steps, a panel each."""
    from jaxtrain.run.show.figures import Picture

    drawn = panels(runs)
    picture = Picture(8, 1 + 2.6 * len(drawn))
    several = picture.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, names) in zip(several, drawn, strict=True):
        for number, run in enumerate(runs):
            color = _LIGHTNESS[number % len(_LIGHTNESS)]
            for name in names:
                is_evaluation = name.startswith("eval_")
                steps, values = curve(run.lines, name, math.inf if is_evaluation else POINTS)
                if not len(steps):
                    continue
                mark = _MARKS[number % len(_MARKS)] if is_evaluation else ""
                dashes = _DASHES[number % len(_DASHES)]
                is_marker = is_evaluation and len(names) > 1
                axes.plot(
                    steps,
                    values,
                    color=color,
                    marker=mark,
                    markersize=4,
                    linestyle="none" if is_marker else dashes,
                    linewidth=1.3,
                    label=f"{run.name}, held out" if is_marker else run.name,
                )
        axes.set_ylabel(label)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    several[-1].set_xlabel("step")
    several[0].legend(frameon=False, fontsize="small")
    return picture


def panels(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return each panel of the figure: its label, and the metrics in it."""
    drawn: dict[str, list[str]] = {"loss": ["loss", "eval_loss"]}
    for name in _metrics(runs):
        drawn.setdefault(name.removeprefix("eval_"), []).append(name)
    labelled = [(names[0].replace("_", " "), names) for names in drawn.values()]
    return [*labelled, ("learning rate", ["learning_rate"])]


def curve(
    lines: Iterable[Mapping[str, Any]], name: str, most: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a metric; means of neighbors if there are more than `most`.

    A line has one batch's loss: means of many lines are less noisy.
    Non-finite values leave a gap.
    """
    points = [
        (line["step"], line[name] if isinstance(line[name], int | float) else math.nan)
        for line in lines
        if name in line
    ]
    steps, values = np.asarray(points, float).reshape(-1, 2).T
    together = math.ceil(len(steps) / most) if steps.size else 1
    if together > 1:
        starts = np.arange(0, len(steps), together)
        counts = np.diff([*starts, len(steps)])
        steps = np.add.reduceat(steps, starts) / counts
        values = np.add.reduceat(values, starts) / counts
    return steps, values


def _metrics(runs: Iterable[Run]) -> list[str]:
    """Return the objectives' metrics other than the loss: those of both training and evaluation
    lines, and accuracies."""
    names = {name for run in runs for line in run.lines for name in line} - {"loss", "eval_loss"}
    found = (
        name
        for name in names
        if "accuracy" in name
        or f"eval_{name}" in names
        or (name.startswith("eval_") and name.removeprefix("eval_") in names)
    )
    return sorted(found, key=lambda name: (name.removeprefix("eval_"), name.startswith("eval_")))


_READS = (
    f"A training curve has at most {POINTS} points: of more lines each point is the mean of its "
    "neighbours. Dots are measured on held-out data. Values that are not finite leave gaps."
)


def runs_page(runs: Sequence[Run], words: Sequence[str] = ()) -> bytes:
    """Return the page: the table of the terminal, and what `--png` draws, with a legend whose
    entries hide and show a run.

    Args:
      runs: at least one.
      words: the command line.
    """
    recorder = Recorder()
    recorder.print(table(runs))
    drawn = []
    for name, metrics in panels(runs):
        several = []
        for number, run in enumerate(runs):
            for metric in metrics:
                is_evaluation = metric.startswith("eval_")
                found = curve(run.lines, metric, math.inf if is_evaluation else POINTS)
                several.append(html_charts.Curve(number, *found, is_evaluation))
        drawn.append(html_charts.Panel(name, several))
    body, rules = html_charts.curves([run.name for run in runs], drawn)
    title = f"{runs[0].name}: curves" if len(runs) == 1 else f"{len(runs)} runs compared"
    return document(title, body, sections(recorder.blocks), words=words, styles=rules, reads=_READS)
