"""Calibration of predicted step times by one measured step of the same stack on the same chip."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Calibration:
    """One measured step, and what the closed forms predict for it.

    Attributes:
      measured: seconds of the step.
      predicted: seconds by the closed forms, for its own layout on that chip.
      source: where the measured step is from, in words.
      family: of its model, as in `fitted.family_of`.
    """

    measured: float
    predicted: float
    source: str
    family: str

    @property
    def factor(self) -> float:
        """What predicted times are multiplied by."""
        return self.measured / self.predicted
