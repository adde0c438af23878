"""Adan: Nesterov's momentum from differences of gradients."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import refuse_not_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.matrices import decay_matrices
from jaxtrain.training.optimizers.moments import Moments, keep_moments
from jaxtrain.training.optimizers.rule import Kept, Rule, refuse_rate


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
class Adan(Rule):
    """Adan (arXiv 2208.06677): (m + b2 v) / (sqrt(n) + epsilon), all debiased, n the mean of (g +
    b2 (g - g of the step before))^2; decay beside it. A rate is 1 less the paper's beta, as in its
    authors' code.

    Attributes:
      b1: decay rate of the gradient's mean m.
      b2: decay rate of the mean v of its differences, and their weight.
      b3: decay rate of the mean of squares n.
      epsilon: what the denominator is at least.
    """

    name: ClassVar[str] = "adan"
    b1: float = 0.98
    b2: float = 0.92
    b3: float = 0.99
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        refuse_rate(self, "b1", "b2", "b3")
        refuse_not_positive(self, "epsilon")

    def chain(
        self, rate: optax.Schedule, *, weight_decay: float, moments: Moments
    ) -> list[optax.GradientTransformation]:
        return [
            keep_moments(optax.GradientTransformation(_init, self._update), moments),
            decay_matrices(weight_decay),
            optax.scale_by_learning_rate(rate),
        ]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),) * 4

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
    zeros = (jax.tree.map(jnp.zeros_like, params) for _ in range(4))
    return Differences(jnp.zeros((), jnp.int32), *zeros)
