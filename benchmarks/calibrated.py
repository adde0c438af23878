"""What one measured step is worth: error bars of predictions that are calibrated by another run.

Of each stack's published runs of a family on a chip every one is taken in turn for the run that was
measured (`plan --measured`, `plan --calibrate`), and the others are predicted with its factor, to
the power that `machines.calibration` states. The efficiency factors are fitted without the stack,
and so are the two constants of that exponent. `python -m benchmarks.predictions` prints it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize

from benchmarks.fitting import Prediction, two_of_three
from jaxtrain.analysis.planning.machines.calibration import PER_DIFFERENCE, PER_DISTANCE

# (per_distance, per_difference) of `StepProfile.exponent`.
Constants = tuple[float, float]
_MOST: Constants = (100.0, 20.0)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A run that was measured and another one that it predicts.

    Attributes:
      known: the measured run, as predicted by a fit without its stack.
      other: another run of its stack, chip and family, predicted by the same fit.
    """

    known: Prediction
    other: Prediction

    def predict(self, constants: Constants | None) -> Prediction:
        """Return the other run's prediction with the measured factor; None: the factor in full."""
        exponent = 1.0
        if constants is not None:
            exponent = self.known.point.profile.exponent(self.other.point.profile, *constants)
        ratio = self.other.ratio / self.known.ratio**exponent
        return dataclasses.replace(self.other, ratio=ratio)


def pairs_of(predictions: Sequence[Prediction]) -> list[Pair]:
    """Return all pairs of runs of the same stack, chip and family.

    Args:
      predictions: of runs, by a fit without their stacks (`fitting.left_out`).
    """
    return [
        Pair(known, other)
        for known, other in itertools.permutations(predictions, 2)
        if (known.point.stack, known.point.chip, known.point.family)
        == (other.point.stack, other.point.chip, other.point.family)
    ]


def fit_exponents(pairs: Sequence[Pair]) -> Constants:
    """Return the constants with the smallest mean absolute error; each run counts alike."""
    names = [pair.other.point.name for pair in pairs]
    weights = np.array([1 / names.count(name) for name in names])
    known = np.log([pair.known.ratio for pair in pairs])
    other = np.log([pair.other.ratio for pair in pairs])
    profiles = [(pair.known.point.profile, pair.other.point.profile) for pair in pairs]
    distance = np.array([a.distance(b) for a, b in profiles])
    differences = np.array([a.differences(b) for a, b in profiles])

    def loss(constants: np.ndarray) -> float:
        left = other - known / (1 + constants[0] * distance + constants[1] * differences)
        # Absolute errors, rounded at zero for the optimizer.
        return float(np.average(np.sqrt(left**2 + 0.02**2), weights=weights))

    bounds = [(0.0, most) for most in _MOST]
    found = optimize.minimize(loss, (PER_DISTANCE, PER_DIFFERENCE), bounds=bounds)
    return float(found.x[0]), float(found.x[1])


def by_one_run(
    predictions: Sequence[Prediction], constants_of: Callable[[str], Constants | None] | None = None
) -> list[Prediction]:
    """Return every run's prediction by each other run of its stack, chip and family.

    Args:
      predictions: of runs, by a fit without their stacks (`fitting.left_out`).
      constants_of: of a stack; None: fitted on the pairs of all other stacks.
    """
    pairs = pairs_of(predictions)
    found = []
    for stack in dict.fromkeys(pair.other.point.stack for pair in pairs):
        mine = [pair for pair in pairs if pair.other.point.stack == stack]
        others = [pair for pair in pairs if pair.other.point.stack != stack]
        constants = fit_exponents(others) if constants_of is None else constants_of(stack)
        found += [pair.predict(constants) for pair in mine]
    return found


def calibrated_bars(predictions: Sequence[Prediction]) -> str:
    """Errors with one measured run, beside those of the same runs without, as Markdown.

    In the median each run counts once, as its median pair; in two of three each stack counts alike.
    "In full" is the factor without an exponent.
    """
    lines = [
        "| family | chips | runs | stacks | median error | with one run | in full "
        "| two of three | with one run | in full |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    shrunk, full = by_one_run(predictions), by_one_run(predictions, lambda stack: None)
    families = ((name, kind) for name in (*_FAMILIES, None) for kind in ("tpu", "gpu"))
    for family, kind in (*families, ("dense", None)):
        chosen = [_of(some, family, kind) for some in (shrunk, full)]
        names = {one.point.name for one in chosen[0]}
        before = [one for one in predictions if one.point.name in names]
        if not before:
            continue
        medians = [_median(some) for some in (before, *chosen)]
        bars = [two_of_three(some) for some in (before, *chosen)]
        cells = [f"{value:.1%}" for value in (*medians, *bars)]
        lines.append(
            f"| {family or 'all'} | {(kind or 'all').upper()} | {len(before)} | "
            f"{len({one.point.stack for one in before})} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


_FAMILIES = ("dense", "mixture", "image")


def _of(
    predictions: Sequence[Prediction], family: str | None, kind: str | None
) -> list[Prediction]:
    return [
        one
        for one in predictions
        if kind in (None, one.point.kind) and family in (None, one.point.family)
    ]


def _median(pairs: Sequence[Prediction]) -> float:
    """The median over runs of their median pair: a stack of many runs has many more pairs."""
    errors: dict[str, list[float]] = {}
    for one in pairs:
        errors.setdefault(one.point.name, []).append(one.error)
    return float(np.median([np.median(some) for some in errors.values()]))
