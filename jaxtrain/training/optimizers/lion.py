"""Lion: the sign of a momentum."""

import dataclasses
from typing import ClassVar

import optax

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.matrices import decay_matrices
from jaxtrain.training.optimizers.moments import Moments, keep_moments
from jaxtrain.training.optimizers.rule import Kept, Rule, refuse_rate


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Rule):
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
        refuse_rate(self, "b1", "b2")

    def chain(
        self, rate: optax.Schedule, *, weight_decay: float, moments: Moments
    ) -> list[optax.GradientTransformation]:
        return [
            keep_moments(optax.scale_by_lion(self.b1, self.b2), moments),
            decay_matrices(weight_decay),
            optax.scale_by_learning_rate(rate),
        ]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),)
