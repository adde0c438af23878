"""Stochastic gradient descent with Nesterov momentum."""

import dataclasses
from typing import ClassVar

import optax

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.matrices import decay_matrices
from jaxtrain.training.optimizers.moments import Moments, keep_moments
from jaxtrain.training.optimizers.rule import Kept, Rule, refuse_rate


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """SGD with Nesterov momentum: m = momentum m + g, then momentum m + g; decay in the gradient.

    Attributes:
      momentum: the decay rate of m.
    """

    name: ClassVar[str] = "sgd"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        refuse_rate(self, "momentum")

    def chain(
        self, rate: optax.Schedule, *, weight_decay: float, moments: Moments
    ) -> list[optax.GradientTransformation]:
        return [
            decay_matrices(weight_decay),
            keep_moments(optax.trace(self.momentum, nesterov=True), moments),
            optax.scale_by_learning_rate(rate),
        ]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),)
