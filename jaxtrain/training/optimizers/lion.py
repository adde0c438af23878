"""Lion: sign momentum."""

import dataclasses
from typing import ClassVar

import optax

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import DirectionRule
from jaxtrain.training.optimizers.rule import validate_rate


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(DirectionRule):
    """Lion (arXiv 2302.06675): sign(b1 m + (1 - b1) g), decay beside it. The paper takes a third to
    a tenth of AdamW's learning rate, and as many times its decay.

    Attributes:
      b1: weight of the momentum m in the update.
      b2: decay rate of the momentum.
    """

    name: ClassVar[str] = "lion"
    b1: float = 0.9
    b2: float = 0.95

    def __post_init__(self) -> None:
        validate_rate(self, "b1", "b2")

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)
