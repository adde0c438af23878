"""Base of elementwise update rules: direction, weight decay, learning rate."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.training.optimizers.groups import Decay, add_decay
from jaxtrain.training.optimizers.moments import Moments, keep_moments
from jaxtrain.training.optimizers.rule import Kept, Rule, validate_rate


class DirectionRule(Rule):
    """A rule that makes a direction of the gradients.

    Attributes:
      kept: how many arrays like itself it keeps for a parameter.
      decay_in_gradient: whether decay is added to the gradient, or to the direction.
    """

    kept: ClassVar[int] = 1
    decay_in_gradient: ClassVar[bool] = False

    @abc.abstractmethod
    def direction(self) -> optax.GradientTransformation:
        """From gradients to what the learning rate scales; its state as `keep_moments` wants it."""

    def chain(
        self, rate: optax.Schedule, *, decay: Decay, moments: Moments
    ) -> list[optax.GradientTransformation]:
        parts = [keep_moments(self.direction(), moments), add_decay(decay)]
        if self.decay_in_gradient:
            parts.reverse()
        return [*parts, optax.scale_by_learning_rate(rate)]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),) * self.kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamRule(DirectionRule):
    """A rule of Adam's family: moving means of the gradient and of its square.

    Attributes:
      b1: decay rate of the gradient's mean m.
      b2: decay rate of its square's mean v.
      epsilon: what the denominator is at least.
    """

    kept: ClassVar[int] = 2
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        validate_rate(self, "b1", "b2")
        require_positive(self, "epsilon")

    def direction(self) -> optax.GradientTransformation:
        """Adam's: m / (sqrt(v) + epsilon), both debiased (arXiv 1412.6980)."""
        return optax.scale_by_adam(self.b1, self.b2, self.epsilon)


def zeros_like(params: Any, count: int) -> list[Any]:
    """Return `count` trees of zeros in the form of the parameters: the arrays of a first state."""
    return [jax.tree.map(jnp.zeros_like, params) for _ in range(count)]
