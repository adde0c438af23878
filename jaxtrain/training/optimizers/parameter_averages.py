"""EMA of the parameters (`Optimizer.average_decay`), and schedule-free AdamW's average."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.groups import Decay, add_decay
from jaxtrain.training.optimizers.moments import Moments, keep_moments
from jaxtrain.training.optimizers.rule import EvaluationParams, Kept, Rule, validate_rate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Average(EvaluationParams):
    """Optimizer state of `keep_average`.

    Attributes:
      count: int32 scalar, number of averaged updates.
      params: the average, float32, in the form of the parameters; before the first update they
        themselves.
    """

    count: jax.Array
    params: Any

    def eval_params(self, params: Any) -> Any:
        """Return the average."""
        del params
        return self.params

    def restart(self, params: Any) -> "Average":
        """Return an average over no updates."""
        return Average(jnp.zeros_like(self.count), copy_float32(params))


def keep_average(decay: float) -> optax.GradientTransformation:
    """Average the parameters after each update (EMA); the last part of the chain, which keeps
    updates.

    After t updates the average is sum_i decay^(t-i) p_i / sum_i decay^(t-i) over i = 1..t: Polyak
    averaging with exponential weights, debiased as Adam's moments are (arXiv 1412.6980, section 3),
    so that the initial parameters do not contribute.

    Args:
      decay: above 0, below 1.
    """

    def init(params: Any) -> Any:
        return Average(jnp.zeros((), jnp.int32), _float32(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        assert params is not None, "the average is over parameters"
        # From the unrounded parameters: stored bfloat16 ones equal these on average.
        after = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, params, updates)
        # (1 - decay) / (1 - decay^t), the weight of p_t: 1 for the first. Written with expm1,
        # because decay^t is next to 1 and float32 has seven digits.
        count = state.count + 1
        weight = (1 - decay) / -jnp.expm1(count * math.log(decay))
        average = jax.tree.map(lambda old, new: old + weight * (new - old), state.params, after)
        return updates, Average(count, average)

    return optax.GradientTransformation(init, update)


def _float32(params):  # noqa: ANN001, ANN202
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def copy_float32(params):  # noqa: ANN001, ANN201
    """Return float32 copies: a step donates its state's buffers, each only once."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["taken", "weight", "largest", "z"],
    meta_fields=["b1"],
)
@dataclasses.dataclass(frozen=True)
class Iterates(EvaluationParams):
    """Optimizer state of schedule-free AdamW, besides the second moment.

    Attributes:
      taken: the updates so far.
      weight: float32 scalar, sum of the weights of the iterates averaged.
      largest: float32 scalar, the largest learning rate so far.
      z: the iterates, float32, with the structure of the parameters.
      b1: interpolation of the parameters from z towards the average.
    """

    taken: optax.ScaleByScheduleState
    weight: jax.Array
    largest: jax.Array
    z: Any
    b1: float

    def eval_params(self, params: Any) -> Any:
        """Return the average x of the iterates; the parameters are (1 - b1) z + b1 x."""

        def one(y: jax.Array, z: jax.Array) -> jax.Array:
            return _average(_as(y.astype(jnp.float32), z), z, self.b1)

        return jax.tree.map(one, params, self.z)

    def restart(self, params: Any) -> "Iterates":
        """Return a new average with its first iterate, at the current learning rate."""
        return dataclasses.replace(self, weight=jnp.zeros_like(self.weight), z=copy_float32(params))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFree(Rule):
    """Schedule-free AdamW (arXiv 2405.15682): gradients are taken between the iterates z, which
    move by AdamW without its mean, and their average x, which is evaluated and generated with. For
    Schedule.name = 'constant' with a warm-up.

    Attributes:
      b1: the parameters that gradients are taken at are (1 - b1) z + b1 x.
      b2: decay rate of the mean of the gradient's square.
      epsilon: added to the denominator.
    """

    name: ClassVar[str] = "schedule_free"
    averages: ClassVar[bool] = True
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        validate_rate(self, "b1", "b2")
        require_positive(self, "b1", "epsilon")

    def chain(
        self, rate: optax.Schedule, *, decay: Decay, moments: Moments
    ) -> list[optax.GradientTransformation]:
        scaled = optax.scale_by_rms(self.b2, self.epsilon, eps_in_sqrt=False, bias_correction=True)
        return [
            keep_moments(scaled, moments),
            add_decay(decay),
            _average_iterates(rate, self.b1),
        ]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return Kept(shape, axes), Kept(shape, axes, dtype="float32")


def _average_iterates(rate: optax.Schedule, b1: float) -> optax.GradientTransformation:
    """Turn a direction, taken at the parameters y, into the update of y."""

    def init(params: Any) -> Any:
        z = jax.tree.map(lambda y: y.astype(jnp.float32), params)
        taken = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))
        return Iterates(taken, jnp.zeros(()), jnp.zeros(()), z, b1)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        assert params is not None, "the parameters lie between the iterates and their average"
        now = rate(state.taken.count)
        largest = jnp.maximum(state.largest, now)
        weight = state.weight + largest**2
        share = jnp.where(weight > 0, largest**2 / jnp.where(weight > 0, weight, 1.0), 0.0)

        def move(direction: jax.Array, z: jax.Array, y: jax.Array) -> jax.Array:
            y = y.astype(jnp.float32)
            x, after = _average(y, z, b1), z - now * direction
            return (1 - b1) * after + b1 * ((1 - share) * x + share * after) - y

        z = jax.tree.map(lambda z, direction: z - now * direction, state.z, updates)
        taken = optax.ScaleByScheduleState(state.taken.count + 1)
        moved = jax.tree.map(move, updates, state.z, params)
        return moved, Iterates(taken, weight, largest, z, b1)

    return optax.GradientTransformation(init, update)


@functools.partial(jax.jit, static_argnums=2)  # b1 need not come from the host at evaluations
def _average(y: jax.Array, z: jax.Array, b1: float) -> jax.Array:
    return (y - (1 - b1) * z) / b1


def _as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return x with the sharding of another array."""
    sharding = jax.typeof(like).sharding
    return x if sharding.mesh.empty else jax.sharding.reshard(x, sharding)
