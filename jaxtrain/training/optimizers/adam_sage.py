"""AdamW-SAGE: sensitivity-adaptive learning rates."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import AdamRule, zeros_like
from jaxtrain.training.optimizers.rule import validate_rate


class Sensitivities(NamedTuple):
    """The state.

    Attributes:
      count: int32 scalar, updates so far.
      mu, nu: moving means of the gradients and of their squares.
      sensitivity: moving mean of |w g|.
    """

    count: jax.Array
    mu: Any
    nu: Any
    sensitivity: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamSAGE(AdamRule):
    """AdamW-SAGE (arXiv 2202.02664): AdamW's step times |I - s| / (s + epsilon^2), where I = |w g|
    is what the loss would lose without the parameter, to first order, and s its debiased moving
    mean. For going on from trained parameters: one that is 0, as biases are at first, stays 0.

    Attributes:
      b3: decay rate of the sensitivity's mean s.
      epsilon: what AdamW's denominator is at least; its square, what the sensitivity's is.
    """

    name: ClassVar[str] = "adam_sage"
    kept: ClassVar[int] = 3
    b3: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_rate(self, "b3")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init, self._update)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        now = jax.tree.map(lambda w, g: jnp.abs(w.astype(jnp.float32) * g), params, updates)
        mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, self.b2, 2)
        mean = optax.tree.update_moment(now, state.sensitivity, self.b3, 1)
        t = count.astype(jnp.float32)
        of_mu, of_nu, of_mean = (1 / (1 - b**t) for b in (self.b1, self.b2, self.b3))

        def step(m: jax.Array, v: jax.Array, sensitivity: jax.Array, s: jax.Array) -> jax.Array:
            adam = of_mu * m / (jnp.sqrt(of_nu * v) + self.epsilon)
            return adam * jnp.abs(sensitivity - of_mean * s) / (of_mean * s + self.epsilon**2)

        return jax.tree.map(step, mu, nu, now, mean), Sensitivities(count, mu, nu, mean)


def _init(params: Any) -> Sensitivities:
    return Sensitivities(jnp.zeros((), jnp.int32), *zeros_like(params, 3))
