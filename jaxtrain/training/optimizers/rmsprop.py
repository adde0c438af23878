"""RMSprop."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import DirectionRule
from jaxtrain.training.optimizers.rule import Kept, validate_rate


class Squares(NamedTuple):
    """The state.

    Attributes:
      nu: moving mean of the gradients' squares.
      trace: momentum of the updates; () without.
    """

    nu: Any
    trace: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSprop(DirectionRule):
    """RMSprop (Hinton, Coursera lecture 6e, 2012): g / (sqrt(v) + epsilon), v not debiased; decay
    in the gradient.

    Attributes:
      decay: decay rate of the mean v of squares.
      momentum: decay rate of a sum of the updates; 0 keeps none.
      epsilon: what the denominator is at least.
    """

    name: ClassVar[str] = "rmsprop"
    decay_in_gradient: ClassVar[bool] = True
    decay: float = 0.99
    momentum: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        validate_rate(self, "decay", "momentum")
        require_positive(self, "epsilon")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(self._init, self._update)

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),) * (2 if self.momentum else 1)

    def _init(self, params: Any) -> Squares:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Squares(zeros, jax.tree.map(jnp.zeros_like, params) if self.momentum else ())

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        nu = jax.tree.map(lambda v, g: self.decay * v + (1 - self.decay) * g * g, state.nu, updates)
        updates = jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + self.epsilon), updates, nu)
        if not self.momentum:
            return updates, Squares(nu, ())
        trace = jax.tree.map(lambda t, u: self.momentum * t + u, state.trace, updates)
        return trace, Squares(nu, trace)
