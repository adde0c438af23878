"""Calibration of predicted step times by one measured step of the same stack on the same chip."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A measured step time and its closed-form prediction.

    Attributes:
      measured: measured seconds of the step.
      predicted: closed-form prediction for its own layout on that chip, in seconds.
      source: origin of the measurement, in words.
      family: family of its model, as in `efficiency_factors.family_of`.
    """

    measured: float
    predicted: float
    source: str
    family: str

    @property
    def factor(self) -> float:
        """The factor by which predicted times are multiplied."""
        return self.measured / self.predicted
