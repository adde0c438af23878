"""Calibration of predicted step times by one measured step of the same stack on the same chip.

    time = predicted (measured / its prediction) ** exponent
    exponent = 1 / (1 + 5.0 d + 5.4 n)

d is the distance between the steps' compositions: the part of the predicted time that they do not
spend on the same things. n counts the differences between the steps: another family of models or
another kind of mixture, and each of the mesh axes `tensor`, `context`, `pipe` and `expert` that one
of them uses alone. The measured step has d = n = 0 and takes the measured time.

This is empirical-Bayes shrinkage (Efron and Morris, 1973): the logarithm of a step's measured over
predicted time is the sum of a part that all steps of a stack share and a part of its own. The
exponent is the fraction of the variance that another step shares with the measured one. Both
constants are fitted on pairs of published runs (`python -m benchmarks.predictions`).
"""

import dataclasses
from collections.abc import Mapping

# How fast the variance that two steps do not share grows, in units of the variance that they share:
# with the distance of their compositions, and with each difference between the steps.
PER_DISTANCE = 5.0
PER_DIFFERENCE = 5.4


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """The properties of a step by which a measured step is similar to it.

    Attributes:
      model: the kind of model: the class of a mixture of experts, else the family. Dense models of
        a stack share their kernels, whatever their class; mixtures route in different ways.
      axes: the mesh axes of `tensor`, `context`, `pipe` and `expert` that are larger than 1.
      composition: part of the step -> its fraction of the predicted time; the sum is 1.
    """

    model: str
    axes: frozenset[str]
    composition: Mapping[str, float]

    def distance(self, other: "StepProfile") -> float:
        """Return d: half of the sum of the differences of the compositions, from 0 to 1."""
        names = {*self.composition, *other.composition}
        return 0.5 * sum(
            abs(self.composition.get(name, 0.0) - other.composition.get(name, 0.0))
            for name in names
        )

    def differences(self, other: "StepProfile") -> int:
        """Return n: whether the models differ, plus the number of axes that one of them has."""
        return (self.model != other.model) + len(self.axes ^ other.axes)

    def exponent(
        self,
        other: "StepProfile",
        per_distance: float = PER_DISTANCE,
        per_difference: float = PER_DIFFERENCE,
    ) -> float:
        """Return the exponent of a measured factor between two steps; 1 if they are alike."""
        distance, differences = self.distance(other), self.differences(other)
        return 1 / (1 + per_distance * distance + per_difference * differences)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A measured step time and its closed-form prediction.

    Attributes:
      measured: measured seconds of the step.
      predicted: closed-form prediction for its own layout on that chip, in seconds.
      source: origin of the measurement, in words.
      family: family of its model, as in `efficiency_factors.family_of`.
      profile: of the measured step.
    """

    measured: float
    predicted: float
    source: str
    family: str
    profile: StepProfile

    @property
    def ratio(self) -> float:
        """The measured step's time over its prediction."""
        return self.measured / self.predicted

    def factor(self, profile: StepProfile) -> float:
        """Return the factor by which the predicted time of a step is multiplied."""
        return self.ratio ** self.profile.exponent(profile)

    def least_factor(self, model: str, axes: frozenset[str]) -> float:
        """Return a lower bound of `factor` for all steps of a model with these axes.

        Their distances are between 0 and 1: a factor below 1 is the smallest at 0, others at 1.
        """
        known = self.profile.composition
        alike = StepProfile(model, axes, known)
        unlike = StepProfile(model, axes, {"another": 1.0})
        return min(self.factor(alike), self.factor(unlike))
