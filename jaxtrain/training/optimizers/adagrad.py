"""Adagrad."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import DirectionRule


class Squares(NamedTuple):
    """The state.

    Attributes:
      total: sum of the gradients' squares.
    """

    total: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(DirectionRule):
    """Adagrad (Duchi et al., JMLR 12, 2011): g / (sqrt(sum of g^2) + epsilon), decay in the
    gradient.

    Attributes:
      epsilon: what the denominator is at least.
    """

    name: ClassVar[str] = "adagrad"
    decay_in_gradient: ClassVar[bool] = True
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        require_positive(self, "epsilon")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init, self._update)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        total = jax.tree.map(lambda s, g: s + g * g, state.total, updates)
        updates = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + self.epsilon), updates, total)
        return updates, Squares(total)


def _init(params: Any) -> Squares:
    return Squares(jax.tree.map(jnp.zeros_like, params))
