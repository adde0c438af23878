"""RAdam: rectified Adam."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import AdamRule, zeros_like

# Below this many updates' worth of memory the variance of 1 / sqrt(v) has no bound worth a name.
_SHORTEST = 5.0


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RAdam(AdamRule):
    """RAdam (arXiv 1908.03265): Adam times a rectification, and the debiased mean alone while the
    second moment has seen too little (5 updates at b2 = 0.999); decay beside it."""

    name: ClassVar[str] = "radam"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "b2")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init, self._update)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, self.b2, 2)
        t = count.astype(jnp.float32)
        of_mu, of_nu = 1 / (1 - self.b1**t), -1 / jnp.expm1(t * math.log(self.b2))
        longest = 2 / (1 - self.b2) - 1
        length = memory_length(t, self.b2)
        trusted = length > _SHORTEST
        length = jnp.maximum(length, _SHORTEST)
        rectified = (length - 4) * (length - 2) * longest
        rectification = jnp.sqrt(rectified / ((longest - 4) * (longest - 2) * length))

        def step(m: jax.Array, v: jax.Array) -> jax.Array:
            adam = rectification * m / (jnp.sqrt(of_nu * v) + self.epsilon)
            return of_mu * jnp.where(trusted, adam, m)

        return jax.tree.map(step, mu, nu), optax.ScaleByAdamState(count, mu, nu)


def memory_length(t: jax.Array, b2: float) -> jax.Array:
    """How many updates' worth of memory a mean has after t: r - 2 t b2^t / (1 - b2^t), of at most
    r = 2 / (1 - b2) - 1.

    It is about t at first, as the difference of two numbers near r, which float32 would lose. With
    x = -t log b2 the second is 2 t / (e^x - 1), whose series begins 2 t / x - t.
    """
    longest, forgets = 2 / (1 - b2) - 1, -math.log(b2)
    x = t * forgets
    series = -(x**2) / 12 + x**4 / 720 - x**6 / 30240 + x**8 / 1209600
    early = longest - 2 / forgets + t + 2 / forgets * series
    return jnp.where(x < 1, early, longest - 2 * t / jnp.expm1(jnp.maximum(x, 1.0)))


def _init(params: Any) -> Any:
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), *zeros_like(params, 2))
