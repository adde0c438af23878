"""Sophia: clipped second-order momentum."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.rule import AdamRule, zeros_like


@dataclasses.dataclass(frozen=True, kw_only=True)
class SophiaRule(AdamRule):
    """m / max(gamma h, epsilon), clipped elementwise to between -1 and 1 (arXiv 2305.14342,
    algorithm 3), neither mean debiased; decoupled decay.

    Attributes:
      b2: decay rate of the mean h of the curvature's estimates.
      epsilon: added to the denominator.
      gamma: factor of h: the larger, the fewer elements are clipped.
      every: steps between one estimate of the curvature and the next.
    """

    curvature: ClassVar[Literal["hutchinson", "gauss_newton_bartlett"]]
    gamma: float
    b2: float = 0.99
    epsilon: float = 1e-12
    every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "gamma")
        require_at_least(1, self, "every")

    def direction(self) -> optax.GradientTransformationExtraArgs:
        """Return the update direction; its update takes `curvature`.

        That is whether there is a new estimate of the Hessian's diagonal, and the estimate, with
        the structure of the gradients.
        """
        return optax.GradientTransformationExtraArgs(_init, self._update)

    def _update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        del params
        due, estimate = extra["curvature"]
        mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)

        def mean(h: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(due, self.b2 * h + (1 - self.b2) * new, h)

        def step(m: jax.Array, h: jax.Array) -> jax.Array:
            return jnp.clip(m / jnp.maximum(self.gamma * h, self.epsilon), -1.0, 1.0)

        nu = jax.tree.map(mean, state.nu, estimate)
        return jax.tree.map(step, mu, nu), optax.ScaleByAdamState(state.count + 1, mu, nu)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SophiaH(SophiaRule):
    """Sophia-H (arXiv 2305.14342): the curvature is Hutchinson's, u times the Hessian times u, for
    a random sign u per element; of the step's first microbatch, every few steps."""

    name: ClassVar[str] = "sophia_h"
    curvature: ClassVar[Literal["hutchinson", "gauss_newton_bartlett"]] = "hutchinson"
    b1: float = 0.96
    gamma: float = 0.01


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SophiaG(SophiaRule):
    """Sophia-G (arXiv 2305.14342): the curvature is Gauss-Newton-Bartlett's, n g^2 with the
    gradient g of n targets drawn from the model's distribution; of the step's first microbatch,
    whose logits are all live then, every few steps."""

    name: ClassVar[str] = "sophia_g"
    curvature: ClassVar[Literal["hutchinson", "gauss_newton_bartlett"]] = "gauss_newton_bartlett"
    b1: float = 0.965
    gamma: float = 0.05


def _init(params: Any) -> optax.ScaleByAdamState:
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), *zeros_like(params, 2))
