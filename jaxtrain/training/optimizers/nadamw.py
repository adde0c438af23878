"""NAdamW: AdamW with Nesterov momentum."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import AdamRule, zeros_like


class NesterovMoments(NamedTuple):
    """The state.

    Attributes:
      count: int32 scalar, updates so far.
      product: float32 scalar, of the momentum's decay rates so far.
      mu, nu: moving means of the gradients and of their squares.
    """

    count: jax.Array
    product: jax.Array
    mu: Any
    nu: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class NAdamW(AdamRule):
    """NAdam (Dozat, ICLR 2016 workshop) with decay beside it: Adam whose mean is one step ahead.
    Its momentum grows to b1: at update t it is b1 (1 - 0.96^(t momentum_decay) / 2).

    Attributes:
      momentum_decay: how fast the momentum grows.
    """

    name: ClassVar[str] = "nadamw"
    momentum_decay: float = 4e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "momentum_decay")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init, self._update)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, self.b2, 2)
        now, ahead = self._momentum(count), self._momentum(count + 1)
        product = state.product * now
        of_gradient, of_mean = (1 - now) / (1 - product), ahead / (1 - product * ahead)
        debias = 1 / (1 - self.b2 ** count.astype(jnp.float32))

        def step(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return (of_gradient * g + of_mean * m) / (jnp.sqrt(v * debias) + self.epsilon)

        return jax.tree.map(step, updates, mu, nu), NesterovMoments(count, product, mu, nu)

    def _momentum(self, update: jax.Array) -> jax.Array:
        """The decay rate of the mean at an update, from 1 on."""
        return self.b1 * (1 - 0.5 * 0.96 ** (update * self.momentum_decay))


def _init(params: Any) -> NesterovMoments:
    return NesterovMoments(jnp.zeros((), jnp.int32), jnp.ones(()), *zeros_like(params, 2))
