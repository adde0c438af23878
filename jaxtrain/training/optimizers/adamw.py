"""AdamW: Adam with decay beside the gradient, not in it."""

import dataclasses
from typing import ClassVar

import optax

from jaxtrain.config.errors import refuse_not_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.matrices import decay_matrices
from jaxtrain.training.optimizers.moments import Moments, keep_moments
from jaxtrain.training.optimizers.rule import Kept, Rule, refuse_rate


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Rule):
    """AdamW (arXiv 1711.05101): m / (sqrt(v) + epsilon), both moments debiased; decay beside it.

    Attributes:
      b1: decay rate of the gradient's mean m.
      b2: decay rate of its square's mean v.
      epsilon: what the denominator is at least.
    """

    name: ClassVar[str] = "adamw"
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        refuse_rate(self, "b1", "b2")
        refuse_not_positive(self, "epsilon")

    def chain(
        self, rate: optax.Schedule, *, weight_decay: float, moments: Moments
    ) -> list[optax.GradientTransformation]:
        adam = optax.scale_by_adam(self.b1, self.b2, self.epsilon)
        return [
            keep_moments(adam, moments),
            decay_matrices(weight_decay),
            optax.scale_by_learning_rate(rate),
        ]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),) * 2
