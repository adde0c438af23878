"""Optimizer construction from settings, and gradient clipping by norm, by value, adaptive (AGC)."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import ByName
from jaxtrain.nn.parameters import role_of
from jaxtrain.parallel.sharding import is_variable, logical_axes
from jaxtrain.training.optimizers import groups
from jaxtrain.training.optimizers.groups import Decay, add_penalties, scale_groups
from jaxtrain.training.optimizers.moments import Moments
from jaxtrain.training.optimizers.rule import Kept, Rule, rules
from jaxtrain.training.optimizers.rules.elementwise import AdamW
from jaxtrain.training.optimizers.unfreezing import Unfreezing


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer: the update rule, and the settings that all rules have in common.

    Attributes:
      rule: the update rule; its own settings are its own section, such as `AdamW.b2`.
      learning_rate: the peak that the schedule scales.
      weight_decay: matrices only, never norm scales and biases; times the learning rate in addition
        to the gradient or in the gradient, depending on the rule.
      learning_rates: factors of the learning rate by role or name, such as {'embedding': 0.1,
        'layers/*_norm_*': 2.0}; the first match counts. 'layers/*[0:4]' are the
        first four layers of that stack, so that rates may differ from layer to layer.
      weight_decays: weight decay by role or name, in place of weight_decay, with patterns as in
        learning_rates; vectors that a pattern names decay too.
      l1: weight of the sum of matrices' magnitudes in the objective, through its gradient;
        the reported loss excludes it.
      l2: weight of half the sum of matrices' squares, likewise.
      clip_value: gradients are clipped elementwise to between -clip_value and clip_value; None
        is off.
      clip_ratio: the gradient of each column of a matrix is clipped to this fraction of the
        column's own length (adaptive clipping, arXiv 2102.06171); None is off.
      clip_norm: gradients whose global norm is larger are scaled down to it, after the other two;
        None never clips.
      sharpness_radius: gradients are computed where the loss rises most within this distance of the
        parameters (sharpness-aware minimization, arXiv 2010.01412), such as 0.05, by a second pass;
        0 is off.
      average_decay: the decay rate of an exponential moving average of the parameters, such as
        0.999, which evaluation and generation use instead of the parameters; None keeps none.
        It costs 4 bytes per parameter, sharded like the moments.
      moments: the dtype of the rule's moments, such as adamw's two, lion's and sgd's one;
        'bfloat16' halves their bytes and their traffic, with stochastic rounding by a
        hash of the element and the update's number: the same on every mesh and after every restart.
    """

    rule: Annotated[Rule, ByName("name", rules)] = AdamW()
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    learning_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    weight_decays: dict[str, float] = dataclasses.field(default_factory=dict)
    l1: float = 0.0
    l2: float = 0.0
    clip_value: float | None = None
    clip_ratio: float | None = None
    clip_norm: float | None = 1.0
    sharpness_radius: float = 0.0
    average_decay: float | None = None
    moments: Moments = "float32"

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise UserError(f"Optimizer.learning_rate={self.learning_rate}; use a number above 0")
        for name in ("clip_value", "clip_ratio", "clip_norm"):
            if vars(self)[name] is not None and not vars(self)[name] > 0:
                raise UserError(
                    f"Optimizer.{name}={vars(self)[name]}; use None or a number above 0"
                )
        require_at_least(0, self, "weight_decay", "l1", "l2", "sharpness_radius")
        for pattern, factor in self.learning_rates.items():
            if not factor > 0:
                raise UserError(
                    f"Optimizer.learning_rates: {pattern!r} has {factor}; use a factor above 0"
                )
        for pattern, decay in self.weight_decays.items():
            if decay < 0:
                raise UserError(f"Optimizer.weight_decays: {pattern!r} has {decay}; use 0 or more")
            if not groups.part_of(pattern).is_whole:
                raise UserError(
                    f"Optimizer.weight_decays: {pattern!r} names layers; weight decay applies to "
                    f"all layers: use {groups.part_of(pattern).pattern!r}"
                )
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise UserError(
                f"Optimizer.average_decay={self.average_decay}; use None, or a number above 0 and "
                "below 1 such as 0.999"
            )
        if self.average_decay is not None and self.rule.averages:
            raise UserError(
                f"Optimizer.average_decay={self.average_decay} with Optimizer.name="
                f"{self.name!r}, which already averages the parameters; use None"
            )

        if self.moments != "float32" and self.rule.dtype is not None:
            raise UserError(
                f"Optimizer.moments={self.moments!r} with Optimizer.name={self.name!r}, which "
                f"keeps its moments in {self.rule.dtype}; use 'float32', the default"
            )

    @property
    def name(self) -> str:
        """Name of the update rule."""
        return self.rule.name

    @property
    def decay(self) -> Decay:
        """Weight decay of each parameter, before the learning rate."""
        return Decay(self.weight_decay, self.weight_decays)

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        """Return the arrays stored for a parameter: the rule's, and the average."""
        average = () if self.average_decay is None else (Kept(shape, axes, dtype="float32"),)
        return (*self.rule.keeps(shape, axes), *average)


def validate_groups(settings: Optimizer, params: Any) -> Iterator[str]:
    """Yield an error message for each group that matches none of these parameters."""
    yield from groups.validate("Optimizer.learning_rates", settings.learning_rates, params)
    yield from groups.validate("Optimizer.weight_decays", settings.weight_decays, params)


Parts = list[optax.GradientTransformation]
Joined = TypeVar("Joined")


def chain(first: Parts, rest: Parts) -> optax.GradientTransformation:
    """Chain all transformations, in order."""
    return optax.chain(*first, *rest)


def make_optimizer(
    settings: Optimizer,
    schedule: optax.Schedule,
    join: Callable[[Parts, Parts], Joined] = chain,
    scaled: Sequence[optax.GradientTransformation] = (),
    unfreezing: Unfreezing = Unfreezing(),  # noqa: B008 - frozen
) -> Joined:
    """Return the optax transformation: penalties, clipping, update rule, learning rate, and the
    average.

    Its update takes `layers` too, as `moments.keep_moments` does.

    Args:
      settings: the rule and common settings.
      schedule: steps taken -> learning rate.
      join: combines the transformation of all gradients together and that of each parameter
        own.
      scaled: transformation that scales the rule's updates.
      unfreezing: when parameters are unfrozen; the update then takes `step` too.
    """
    first: Parts = []
    if settings.l1 or settings.l2:
        first.append(add_penalties(settings.l1, settings.l2))
        if unfreezing.steps:
            first.append(unfreezing.holding_back())
    if settings.clip_value is not None:
        first.append(clip_each(settings.clip_value))
    if settings.clip_ratio is not None:
        first.append(clip_adaptively(settings.clip_ratio))
    if settings.clip_norm is not None:
        first.append(optax.clip_by_global_norm(settings.clip_norm))
    *rule, last = settings.rule.chain(schedule, decay=settings.decay, moments=settings.moments)
    if settings.learning_rates:
        rule.append(scale_groups(settings.learning_rates))
    rule.append(last)
    if unfreezing.steps:
        rule = [unfreezing.waiting(optax.chain(*rule))]
    average: Parts = []
    if settings.average_decay is not None:
        # Imported here: most runs keep no average.
        from jaxtrain.training.optimizers.parameter_averages import keep_average

        average.append(keep_average(settings.average_decay))
    return join(first, [*rule, *scaled, *average])


# Minimum norm of a unit's weights, so that zero weights can grow.
_LEAST_NORM = 1e-3


def clip_each(largest: float) -> optax.GradientTransformation:
    """Clip each gradient element to between -largest and largest."""

    def one(gradient: Any) -> Any:
        return gradient.replace(jnp.clip(gradient.get_value(), -largest, largest))

    return optax.stateless(lambda updates, params: jax.tree.map(one, updates, is_leaf=is_variable))


def clip_adaptively(ratio: float) -> optax.GradientTransformation:
    """Clip each unit's gradient to `ratio` times the norm of its weights (AGC).

    A unit is a column of a matrix, that of one output, or a whole vector; the output matrix
    is not clipped (arXiv 2102.06171, section 4.1).
    """
    # Imported here: few runs clip by unit.
    from jaxtrain.training.optimizers.matrices import each, sides

    def one(gradient: Any, param: Any) -> Any:
        if role_of(param) == "output":
            return gradient
        g, axes = gradient.get_value(), logical_axes(param)
        _, rows, columns = sides(axes)
        longest = ratio * jnp.maximum(_norm(param.get_value(), rows or columns), _LEAST_NORM)
        norm = _norm(g, rows or columns)
        return gradient.replace(g * jnp.where(norm > longest, longest / jnp.maximum(norm, 1e-6), 1))

    return optax.stateless(lambda updates, params: each(one, updates, params))


def _norm(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(dims, keepdims=True))
