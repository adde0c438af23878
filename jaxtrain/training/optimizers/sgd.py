"""Stochastic gradient descent with Nesterov momentum."""

import dataclasses
from typing import ClassVar

import optax

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import DirectionRule
from jaxtrain.training.optimizers.rule import validate_rate


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(DirectionRule):
    """SGD with Nesterov momentum: m = momentum m + g, then momentum m + g; decay in the gradient.

    Attributes:
      momentum: the decay rate of m.
    """

    name: ClassVar[str] = "sgd"
    decay_in_gradient: ClassVar[bool] = True
    momentum: float = 0.9

    def __post_init__(self) -> None:
        validate_rate(self, "momentum")

    def direction(self) -> optax.GradientTransformation:
        return optax.trace(self.momentum, nesterov=True)
