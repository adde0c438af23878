"""From settings to an optax transformation and a learning-rate schedule."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import configurable
from jaxtrain.errors import UserError
from jaxtrain.moments import Moments, keep_moments
from jaxtrain.precision import is_matrix
from jaxtrain.sharding import is_variable


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The update rule.

    Attributes:
      name: 'adamw' (arXiv 1711.05101), 'lion' (arXiv 2302.06675) or 'sgd' with Nesterov momentum.
      learning_rate: the peak that the schedule scales.
      weight_decay: decoupled for adamw and lion, added to the gradient for sgd; matrices only,
        never norm scales and biases.
      clip_norm: gradients whose global norm is larger are scaled down to it; None never clips.
      b1, b2, epsilon: adamw's decay rates and denominator; lion takes b1 and b2.
      momentum: sgd's decay rate.
      average_decay: the decay rate of an exponential moving average of the parameters, such as
        0.999, which evaluation and generation use instead of the parameters; None keeps none.
        It costs 4 bytes a parameter, sharded as the moments are.
      moments: the dtype of adamw's two moments, lion's and sgd's one; 'bfloat16' halves their
        bytes and their traffic, rounding stochastically. Which way is a hash of the element and
        the update's number: the same on every mesh and after every restart.
    """

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.9
    average_decay: float | None = None
    moments: Moments = "float32"

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise UserError(f"Optimizer.learning_rate={self.learning_rate}; use a number above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"Optimizer.clip_norm={self.clip_norm}; use None or a number above 0")
        if self.weight_decay < 0:
            raise UserError(f"Optimizer.weight_decay={self.weight_decay}; use 0 or more")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"Optimizer.{name}={getattr(self, name)}; use 0 to below 1")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise UserError(
                f"Optimizer.average_decay={self.average_decay}; use None, or a number above 0 and "
                "below 1 such as 0.999"
            )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over time, as a fraction of Optimizer.learning_rate.

    Attributes:
      name: after the warm-up: 'constant'; 'linear' or 'cosine' decay to the last step; 'wsd':
        constant, then linear decay over the last decay_steps (arXiv 2404.06395).
      warmup_steps: steps of linear growth from 0.
      final_fraction: the fraction that decay ends at.
      decay_steps: how long wsd decays.
    """

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.1
    decay_steps: int = 0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.decay_steps < 0:
            raise UserError(
                f"Schedule.warmup_steps={self.warmup_steps}, Schedule.decay_steps="
                f"{self.decay_steps}; use 0 or more"
            )
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"Schedule.final_fraction={self.final_fraction}; use 0 to 1")
        if (self.name == "wsd") != (self.decay_steps > 0):
            raise UserError(
                f"Schedule.name={self.name!r} with Schedule.decay_steps={self.decay_steps}: "
                "'wsd' wants decay_steps above 0, the others 0"
            )


def make_schedule(settings: Schedule, peak: float, steps: int) -> optax.Schedule:
    """The learning rate as a function of the steps already taken.

    Args:
      settings: the shape.
      peak: the learning rate at the end of the warm-up.
      steps: optimizer steps of the whole run.

    Raises:
      UserError: warm-up and decay do not fit into the run.
    """
    warmup, final = settings.warmup_steps, settings.final_fraction * peak
    needed = warmup + settings.decay_steps
    if needed > steps:
        decay = f" + Schedule.decay_steps={settings.decay_steps}" if settings.decay_steps else ""
        raise UserError(
            f"Schedule.warmup_steps={warmup}{decay} is more than Train.steps={steps}; use "
            f"Train.steps = {needed} or more, or a shorter warm-up"
        )
    rest = max(steps - warmup, 1)
    if settings.name == "constant":
        after = optax.constant_schedule(peak)
    elif settings.name == "linear":
        after = optax.linear_schedule(peak, final, rest)
    elif settings.name == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=settings.final_fraction)
    else:
        decay = settings.decay_steps
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay)],
            [rest - decay],
        )
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_optimizer(settings: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optax transformation: clip, update rule, learning rate, and the average behind them.

    Its update takes `layers` too, as `moments.keep_moments` does.
    """
    clip = [] if settings.clip_norm is None else [optax.clip_by_global_norm(settings.clip_norm)]
    decay = optax.add_decayed_weights(settings.weight_decay, mask=_matrices)
    if settings.name == "adamw":
        adam = optax.scale_by_adam(settings.b1, settings.b2, settings.epsilon)
        rule = [keep_moments(adam, settings.moments), decay]
    elif settings.name == "lion":
        lion = optax.scale_by_lion(settings.b1, settings.b2)
        rule = [keep_moments(lion, settings.moments), decay]
    else:
        momentum = optax.trace(settings.momentum, nesterov=True)
        rule = [decay, keep_moments(momentum, settings.moments)]
    average = [] if settings.average_decay is None else [keep_average(settings.average_decay)]
    return optax.chain(*clip, *rule, optax.scale_by_learning_rate(schedule), *average)


class Average(NamedTuple):
    """The state of `keep_average`.

    Attributes:
      count: int32 scalar, updates averaged over.
      params: the average, float32, in the form of the parameters; before the first update they
        themselves.
    """

    count: jax.Array
    params: Any


def keep_average(decay: float) -> optax.GradientTransformation:
    """Passes updates on, and averages the parameters that they lead to: the chain's last part.

    After t updates the average is sum_i decay^(t-i) p_i / sum_i decay^(t-i) over i = 1..t: Polyak
    averaging with exponential weights, debiased as Adam's moments are (arXiv 1412.6980, section 3),
    so that the first parameters, which nobody trained, have no part in it.

    Args:
      decay: above 0, below 1.
    """

    def init(params: Any) -> Average:
        return Average(jnp.zeros((), jnp.int32), _float32(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Average]:
        assert params is not None, "the average is over parameters"
        after = _float32(optax.apply_updates(params, updates))
        # (1 - decay) / (1 - decay^t), the weight of p_t: 1 for the first. Written with expm1,
        # because decay^t is next to 1 and float32 has seven digits.
        count = state.count + 1
        weight = (1 - decay) / -jnp.expm1(count * math.log(decay))
        average = jax.tree.map(lambda old, new: old + weight * (new - old), state.params, after)
        return updates, Average(count, average)

    return optax.GradientTransformation(init, update)


def averaged(opt_state: optax.OptState) -> Any | None:
    """The averaged parameters in an optimizer's state, float32, or None where none are kept."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, Average))
    return next((part.params for part in parts if isinstance(part, Average)), None)


def _float32(params):  # noqa: ANN001, ANN202
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def _matrices(params):  # noqa: ANN001, ANN202 - a tree of parameters in, one of booleans out
    return jax.tree.map(lambda v: v.replace(is_matrix(v)), params, is_leaf=is_variable)
