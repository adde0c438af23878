"""Fits the factors of `timing.efficiency_factors` on published runs, and holds them against
stacks that they have not seen.

Leave-one-stack-out: for each stack, on TPUs and on GPUs apart, the factors are fitted on all other
rows and predict the stack's. What a prediction for yet another stack may be off by is the spread of
those errors.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize

from jaxtrain.analysis.planning.machines.calibration import StepProfile
from jaxtrain.analysis.planning.timing.efficiency_factors import (
    BARE_MATMUL,
    EfficiencyFactors,
    generation_of,
)
from jaxtrain.analysis.planning.timing.timing import StepCosts
from jaxtrain.parallel import chips


@dataclasses.dataclass(frozen=True)
class Point:
    """A published run and what `plan` counts of it.

    Attributes:
      name: its id.
      stack: what trained it: "MaxText", "Megatron-LM".
      family: "dense", "mixture" or "image".
      chip: as in a target.
      published: seconds of a step.
      model_flops: that the model needs on one device, for its efficiency.
      counted: the pieces of the formula.
      fits: whether the run is expressed well enough to be fitted on.
      error_bar: that `plan` prints.
      alike: what it has in common with other layouts of the same: chips, model, data, precision.
      profile: by which a measured run is similar to it.
    """

    name: str
    stack: str
    family: str
    chip: str
    published: float
    model_flops: float
    counted: StepCosts
    fits: bool
    error_bar: float
    alike: tuple[str, ...]
    profile: StepProfile

    @property
    def kind(self) -> str:
        """Of its chip: "tpu" or "gpu"."""
        return chips.CHIPS[self.chip].kind

    def ratio(self, shares: EfficiencyFactors) -> float:
        """Predicted over published seconds."""
        return self.counted.seconds(shares) / self.published


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a fit without a run's stack makes of it.

    Attributes:
      point: the run.
      ratio: predicted over published seconds.
    """

    point: Point
    ratio: float

    @property
    def error(self) -> float:
        """Relative."""
        return abs(self.ratio - 1)


# Where a factor is expected, how far it may go from there at the price of a 15 % error, bounds.
# None of these is a fit: half the traffic hides, products reach nine tenths of bare ones, attention
# on Hopper is as we measured it (benchmarks/history/gpu.md).
_EXPECTED = {
    "in step, tpu": (0.92, 0.1, 0.3, 1.1), "in step, gpu": (0.85, 0.1, 0.3, 1.1),
    "scores tpu": (0.43, 0.1, 0.1, 0.8), "scores ampere": (0.4, 0.1, 0.1, 0.8),
    "scores hopper": (0.6, 0.02, 0.1, 0.8), "portable hopper": (0.155, 0.02, 0.1, 0.8),
    "shown tpu": (0.6, 0.4, 0.0, 1.0), "shown gpu": (0.6, 0.4, 0.0, 1.0),
    "activations tpu": (0.7, 0.3, 0.0, 1.0), "activations gpu": (0.7, 0.3, 0.0, 1.0),
    "passes": (3.0, 1.0, 0.0, 8.0), "memory": (0.85, 0.05, 0.6, 0.95),
    "slices": (0.02, 0.02, 0.0, 0.1),
}  # fmt: skip


def _factors(values: Sequence[float]) -> Callable[[str], EfficiencyFactors]:
    """The factors of each chip that these values make."""
    found = dict(zip(_EXPECTED, values, strict=True))

    def of(name: str) -> EfficiencyFactors:
        chip = chips.CHIPS[name]
        generation = generation_of(chip)
        return EfficiencyFactors(
            products=BARE_MATMUL[name] * found[f"in step, {chip.kind}"],
            scores=found[f"scores {generation}"],
            shown=found[f"shown {chip.kind}"],
            activations=found[f"activations {chip.kind}"],
            passes=found["passes"],
            memory=found["memory"],
            slices=found["slices"],
            portable=found["portable hopper"] if generation == "hopper" else None,
        )

    return of


def fit(points: Sequence[Point]) -> tuple[Callable[[str], EfficiencyFactors], dict[str, float]]:
    """The factors by which these points are predicted best; outliers count little."""
    expected, wide, low, high = np.array(list(_EXPECTED.values())).T
    names = sorted({point.chip for point in points})

    def residuals(values: np.ndarray) -> np.ndarray:
        of = _factors(values)
        factors = {name: of(name) for name in names}
        errors = [np.log(point.ratio(factors[point.chip])) for point in points]
        return np.concatenate([errors, 0.15 * (values - expected) / wide])

    inside = np.clip(expected, low + 1e-3, high - 1e-3)
    found = optimize.least_squares(
        residuals, inside, bounds=(low, high), loss="soft_l1", f_scale=0.05
    )
    return _factors(found.x), dict(zip(_EXPECTED, found.x.round(3).tolist(), strict=True))


def left_out(
    points: Sequence[Point],
    group: Callable[[Point], object] = lambda point: (point.stack, point.kind),
) -> list[Prediction]:
    """Every group's points as a fit on the others predicts them; a group is a stack on TPUs or on
    GPUs, unless another is requested."""
    found = []
    for left in dict.fromkeys(group(point) for point in points):
        factors, _ = fit([one for one in points if one.fits and group(one) != left])
        mine = [point for point in points if group(point) == left]
        found += [Prediction(point, point.ratio(factors(point.chip))) for point in mine]
    return found


def two_of_three(predictions: Sequence[Prediction]) -> float:
    """The error within which two of three runs lie, each stack counting alike."""
    stacks = [one.point.stack for one in predictions]
    weights = np.array([1 / stacks.count(stack) for stack in stacks])
    errors = np.array([one.error for one in predictions])
    order = np.argsort(errors)
    share = np.cumsum(weights[order]) / weights.sum()
    return float(errors[order][np.searchsorted(share, 2 / 3 - 1e-9)])
