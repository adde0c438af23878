"""Adan: adaptive Nesterov momentum."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import AdamRule, zeros_like
from jaxtrain.training.optimizers.rule import validate_rate


class Differences(NamedTuple):
    """The state.

    Attributes:
      count: int32 scalar, updates so far.
      mu, change, nu: moving means of gradients, of their differences, of squares.
      last: the gradients of the update before.
    """

    count: jax.Array
    mu: Any
    change: Any
    nu: Any
    last: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adan(AdamRule):
    """Adan (arXiv 2208.06677): (m + b2 v) / (sqrt(n) + epsilon), all debiased, n the mean of (g +
    b2 (g - g of the step before))^2; decay beside it. A rate is 1 less the paper's beta, as in its
    authors' code.

    Attributes:
      b2: decay rate of the mean v of its differences, and their weight.
      b3: decay rate of the mean of squares n.
    """

    name: ClassVar[str] = "adan"
    kept: ClassVar[int] = 4
    b1: float = 0.98
    b2: float = 0.92
    b3: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_rate(self, "b3")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init, self._update)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        change = jax.tree.map(
            lambda g, last: jnp.where(state.count == 0, 0.0, g - last), updates, state.last
        )
        ahead = jax.tree.map(lambda g, d: g + self.b2 * d, updates, change)
        mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)
        changes = optax.tree.update_moment(change, state.change, self.b2, 1)
        nu = optax.tree.update_moment(ahead, state.nu, self.b3, 2)
        t = count.astype(jnp.float32)
        of_mu, of_change, of_nu = (1 / (1 - b**t) for b in (self.b1, self.b2, self.b3))

        def step(m: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
            above = of_mu * m + self.b2 * of_change * v
            return above / (jnp.sqrt(of_nu * n) + self.epsilon)

        last = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        after = Differences(count, mu, changes, nu, last)
        return jax.tree.map(step, mu, changes, nu), after


def _init(params: Any) -> Differences:
    return Differences(jnp.zeros((), jnp.int32), *zeros_like(params, 4))
