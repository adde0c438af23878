"""Adafactor: factored second moments."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.training.optimizers.matrices import each, root_mean_square, sides
from jaxtrain.training.optimizers.rule import DirectionRule, Kept

# Added to the squares, so that a row of zeros is not divided by 0 (the paper's epsilon 1).
_LEAST_SQUARE = 1e-30


class Factors(NamedTuple):
    """Optimizer state of Adafactor.

    Attributes:
      count: int32 scalar, updates so far.
      means: for each matrix its rows' and its columns' mean squares, for others all mean squares.
    """

    count: jax.Array
    means: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(DirectionRule):
    """Adafactor (arXiv 1804.04235) without momentum: the second moment of a matrix is the product
    of its rows' and its columns' means; steps are relative to the parameter's size; decoupled
    decay.

    Attributes:
      decay_power: the means decay with 1 - t^-decay_power at update t.
      clip: maximum root mean square of an update.
      epsilon: minimum of a parameter's root mean square.
    """

    name: ClassVar[str] = "adafactor"
    decay_power: float = 0.8
    clip: float = 1.0
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        require_positive(self, "decay_power", "clip", "epsilon")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(self._init, self._update)

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        stack, rows, columns = sides(axes)
        if not rows:
            return (Kept(shape, axes),)
        return tuple(
            Kept(tuple(shape[i] for i in part), tuple(axes[i] for i in part))
            for part in (stack + rows, stack + columns)
        )

    def _init(self, params: Any) -> Factors:
        def one(param: Any) -> tuple[Any, ...]:
            kept = self.keeps(param.get_value().shape, logical_axes(param))
            return tuple(param.replace(jnp.zeros(one.shape), axes=one.axes) for one in kept)

        return Factors(jnp.zeros((), jnp.int32), each(one, params))

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        new = count.astype(jnp.float32) ** -self.decay_power

        def mean(gradient: Any, old: tuple[Any, ...]) -> tuple[Any, ...]:
            axes = logical_axes(gradient)
            square = jnp.square(gradient.get_value()) + _LEAST_SQUARE
            _, rows, columns = sides(axes)
            now = (square.mean(columns), square.mean(rows)) if rows else (square,)
            return tuple(
                mean.replace(mean.get_value() + new * (value - mean.get_value()))
                for mean, value in zip(old, now, strict=True)
            )

        def step(gradient: Any, means: tuple[Any, ...], param: Any) -> Any:
            axes = logical_axes(gradient)
            _, rows, columns = sides(axes)
            second = means[0].get_value()
            if rows:
                # A rank-one matrix with the same means: rows x columns / their common mean.
                row = jnp.expand_dims(second, columns)
                column = jnp.expand_dims(means[1].get_value(), rows)
                second = row / row.mean(rows, keepdims=True) * column
            update = gradient.get_value() * jax.lax.rsqrt(second)
            update /= jnp.maximum(1.0, root_mean_square(update, axes) / self.clip)
            size = root_mean_square(param.get_value().astype(jnp.float32), axes)
            return gradient.replace(update * jnp.maximum(size, self.epsilon))

        means = each(mean, updates, state.means)
        return each(step, updates, means, params), Factors(count, means)
