"""What one measured step is worth: error bars of predictions that are calibrated by another run.

Of each stack's published runs of a family on a chip every one is taken in turn for the run that was
measured (`plan --measured`, `plan --calibrate`), and the others are predicted with its factor. The
efficiency factors are fitted without the stack. `python -m benchmarks.predictions` prints it.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from benchmarks.fitting import Prediction, two_of_three


def by_one_run(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return every run's prediction by each other run of its stack, chip and family.

    Args:
      predictions: of runs, by a fit without their stacks (`fitting.left_out`).
    """
    found = []
    for known, other in itertools.permutations(predictions, 2):
        a, b = known.point, other.point
        if (a.stack, a.chip, a.family) == (b.stack, b.chip, b.family):
            found.append(dataclasses.replace(other, ratio=other.ratio / known.ratio))
    return found


def calibrated_bars(predictions: Sequence[Prediction]) -> str:
    """Errors with one measured run, beside those of the same runs without, as Markdown.

    In the median each run counts once, as its median pair; in two of three each stack counts alike.
    """
    lines = [
        "| family | chips | runs | stacks | median error | with one run | two of three "
        "| with one run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pairs = by_one_run(predictions)
    for family, kind in itertools.product(("dense", "mixture", "image", None), ("tpu", "gpu")):
        some = [
            one for one in pairs
            if one.point.kind == kind and family in (None, one.point.family)
        ]  # fmt: skip
        names = {one.point.name for one in some}
        before = [one for one in predictions if one.point.name in names]
        if not some:
            continue
        lines.append(
            f"| {family or 'all'} | {kind.upper()} | {len(before)} | "
            f"{len({one.point.stack for one in some})} | "
            f"{np.median([one.error for one in before]):.1%} | {_median(some):.1%} | "
            f"{two_of_three(before):.1%} | {two_of_three(some):.1%} |"
        )
    return "\n".join(lines)


def _median(pairs: Sequence[Prediction]) -> float:
    """The median over runs of their median pair: a stack of many runs has many more pairs."""
    errors: dict[str, list[float]] = {}
    for one in pairs:
        errors.setdefault(one.point.name, []).append(one.error)
    return float(np.median([np.median(some) for some in errors.values()]))
