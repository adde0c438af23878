"""The HTML page of `jaxtrain plot --html`: curves of runs under a legend, and their last values."""

import math
from collections.abc import Sequence

from jaxtrain.run.show.compare import POINTS, Run, curve, panels, table
from jaxtrain.run.show.html import charts
from jaxtrain.run.show.html.page import Recorder, document, sections

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
                several.append(charts.Curve(number, *found, is_evaluation))
        drawn.append(charts.Panel(name, several))
    body, rules = charts.curves([run.name for run in runs], drawn)
    title = f"{runs[0].name}: curves" if len(runs) == 1 else f"{len(runs)} runs compared"
    return document(title, body, sections(recorder.blocks), words=words, styles=rules, reads=_READS)
