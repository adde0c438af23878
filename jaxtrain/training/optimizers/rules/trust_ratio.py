"""Update rules with layer-wise trust ratios, for large batches: LAMB, LARS."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.nn.precision import is_matrix
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.training.optimizers.groups import Decay, each_named
from jaxtrain.training.optimizers.matrices import norm, ratio, scale_by_trust_ratio
from jaxtrain.training.optimizers.moments import Moments, keep_moments
from jaxtrain.training.optimizers.rule import AdamRule, Kept, Rule, validate_rate


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LAMB(AdamRule):
    """LAMB (arXiv 1904.00962): AdamW's update, decay included, times |w| / |update| of each matrix
    of each layer."""

    name: ClassVar[str] = "lamb"
    epsilon: float = 1e-6

    def chain(
        self, rate: optax.Schedule, *, decay: Decay, moments: Moments
    ) -> list[optax.GradientTransformation]:
        *update, scale = super().chain(rate, decay=decay, moments=moments)
        return [*update, scale_by_trust_ratio(), scale]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LARS(Rule):
    """LARS (arXiv 1708.03888): momentum over (g + decay w) times the learning rate and, of a
    matrix, times trust |w| / (|g| + decay |w|).

    Attributes:
      momentum: decay rate of the sum of updates.
      trust: how far a matrix moves in a step, relative to its size and before the learning rate.
    """

    name: ClassVar[str] = "lars"
    momentum: float = 0.9
    trust: float = 0.001

    def __post_init__(self) -> None:
        validate_rate(self, "momentum")
        require_positive(self, "trust")

    def chain(
        self, rate: optax.Schedule, *, decay: Decay, moments: Moments
    ) -> list[optax.GradientTransformation]:
        def one(name: str, param: Any, gradient: Any) -> Any:
            g, w = gradient.get_value(), param.get_value().astype(jnp.float32)
            part, axes = decay.of(name, param), logical_axes(param)
            if not is_matrix(param):
                return gradient.replace(g + part * w)
            size = norm(w, axes)
            local = ratio(self.trust * size, norm(g, axes) + part * size)
            return gradient.replace(local * (g + part * w))

        # The learning rate first: the momentum includes past rates.
        return [
            optax.stateless(lambda updates, params: each_named(one, params, updates)),
            optax.scale_by_learning_rate(rate),
            keep_moments(optax.trace(self.momentum), moments),
        ]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),)
