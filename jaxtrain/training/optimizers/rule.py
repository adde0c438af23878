"""`Rule`: the interface of update rules, the base of elementwise ones, and their lookup."""

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxtrain.training.optimizers
from jaxtrain.config.errors import UserError, require_positive
from jaxtrain.config.registry import Named
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.optimizers.groups import Decay, add_decay
from jaxtrain.training.optimizers.moments import Moments, keep_moments


class Kept(NamedTuple):
    """Array that a rule stores for a parameter.

    Attributes:
      shape: of the array.
      axes: its logical axes, by which it is sharded like a parameter
        from ZeRO 1 on. A mean over a dimension drops that dimension's name, and nothing else.
      dtype: of its elements; None: `Optimizer.moments`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: Literal["float32", "uint8"] | None = None

    def bytes(self, moments: Moments) -> int:
        """Return the size of the whole array in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype or moments).itemsize


class Rule(abc.ABC):
    """Update rule: a frozen dataclass with the rule's own settings.

    Attributes:
      name: its value of `Optimizer.name`.
      averages: whether it averages the parameters by itself.
      dtype: fixed dtype of its moments; None: the settings' dtype.
      no_mean: why the mean of two of its states is invalid; None if it is valid.
    """

    name: ClassVar[str]
    averages: ClassVar[bool] = False
    dtype: ClassVar[str | None] = None
    no_mean: ClassVar[str | None] = None

    @abc.abstractmethod
    def chain(
        self, rate: optax.Schedule, *, decay: Decay, moments: Moments
    ) -> list[optax.GradientTransformation]:
        """Return the transformation from clipped gradients to updates of the parameters.

        Per-parameter learning rate factors are applied before the last part.

        Args:
          rate: updates taken -> learning rate.
          decay: of each parameter.
          moments: the dtype of `keeps`.
        """

    @abc.abstractmethod
    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        """Return the arrays stored for a parameter of this shape with the logical axes `axes`."""

    def validate_layout(self, params: Any, layout: Layout) -> Iterator[str]:
        """Yield an error message for each reason why the rule does not support this layout.

        Args:
          params: the parameters; shapes suffice.
          layout: how they and the rule's state are sharded.
        """
        del params, layout
        return iter(())


class EvaluationParams(abc.ABC):
    """Part of the optimizer state with other parameters for evaluation and generation."""

    @abc.abstractmethod
    def eval_params(self, params: Any) -> Any:
        """Return the parameters for evaluation, float32, sharded like the optimizer state."""

    @abc.abstractmethod
    def restart(self, params: Any) -> "EvaluationParams":
        """Return this part after the parameters were replaced: the new ones are evaluated.

        Args:
          params: the new parameters, sharded like the optimizer's state.
        """


def rules() -> Mapping[str, type[Rule]]:
    """Return all update rules by name: this package's, and those of modules imported so far."""
    return Named(Rule, jaxtrain.training.optimizers)


def validate_rate(rule: Rule, *fields: str) -> None:
    """Raise UserError for decay rates of a rule that are out of range."""
    for name in fields:
        value = vars(rule)[name]
        if not 0 <= value < 1:
            raise UserError(f"{type(rule).__name__}.{name}={value}; use 0 to below 1")


class DirectionRule(Rule):
    """Rule that turns gradients into a direction.

    Attributes:
      kept: number of arrays of a parameter's shape that it stores.
      decay_in_gradient: whether decay is added to the gradient instead of the direction.
    """

    kept: ClassVar[int] = 1
    decay_in_gradient: ClassVar[bool] = False

    @abc.abstractmethod
    def direction(self) -> optax.GradientTransformation:
        """Return the transformation from gradients to the direction, which the learning rate
        scales.

        Its state has the form that `keep_moments` needs.
        """

    def chain(
        self, rate: optax.Schedule, *, decay: Decay, moments: Moments
    ) -> list[optax.GradientTransformation]:
        parts = [keep_moments(self.direction(), moments), add_decay(decay)]
        if self.decay_in_gradient:
            parts.reverse()
        return [*parts, optax.scale_by_learning_rate(rate)]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),) * self.kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamRule(DirectionRule):
    """Base of Adam's family: moving means of the gradient and of its square.

    Attributes:
      b1: decay rate of the gradient's mean m.
      b2: decay rate of its square's mean v.
      epsilon: added to the denominator.
    """

    kept: ClassVar[int] = 2
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        validate_rate(self, "b1", "b2")
        require_positive(self, "epsilon")

    def direction(self) -> optax.GradientTransformation:
        """Return Adam's direction: m / (sqrt(v) + epsilon), both debiased (arXiv 1412.6980)."""
        return optax.scale_by_adam(self.b1, self.b2, self.epsilon)


def zeros_like(params: Any, count: int) -> list[Any]:
    """Return `count` trees of zeros in the form of the parameters: the arrays of a first state."""
    return [jax.tree.map(jnp.zeros_like, params) for _ in range(count)]
