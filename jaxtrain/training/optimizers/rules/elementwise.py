"""Elementwise update rules: SGD, Adam and its relatives, Adagrad, RMSprop, Lion."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.rule import (
    AdamRule,
    DirectionRule,
    Kept,
    validate_rate,
    zeros_like,
)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(DirectionRule):
    """SGD with Nesterov momentum: m = momentum m + g, then momentum m + g; decay in the gradient.

    Attributes:
      momentum: the decay rate of m.
    """

    name: ClassVar[str] = "sgd"
    decay_in_gradient: ClassVar[bool] = True
    momentum: float = 0.9

    def __post_init__(self) -> None:
        validate_rate(self, "momentum")

    def direction(self) -> optax.GradientTransformation:
        return optax.trace(self.momentum, nesterov=True)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(AdamRule):
    """Adam (arXiv 1412.6980): m / (sqrt(v) + epsilon), both moments debiased; decay in the
    gradient."""

    name: ClassVar[str] = "adam"
    decay_in_gradient: ClassVar[bool] = True


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(AdamRule):
    """AdamW (arXiv 1711.05101): m / (sqrt(v) + epsilon), both moments debiased; decoupled decay."""

    name: ClassVar[str] = "adamw"
    b2: float = 0.95


class NesterovMoments(NamedTuple):
    """Optimizer state of NAdamW.

    Attributes:
      count: int32 scalar, updates so far.
      product: float32 scalar, of the momentum's decay rates so far.
      mu, nu: moving means of the gradients and of their squares.
    """

    count: jax.Array
    product: jax.Array
    mu: Any
    nu: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class NAdamW(AdamRule):
    """NAdam (Dozat, ICLR 2016 workshop) with decoupled decay: Adam whose mean is one step ahead.
    Its momentum grows to b1: at update t it is b1 (1 - 0.96^(t momentum_decay) / 2).

    Attributes:
      momentum_decay: how fast the momentum grows.
    """

    name: ClassVar[str] = "nadamw"
    momentum_decay: float = 4e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "momentum_decay")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init_nadamw, self._update)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, self.b2, 2)
        now, ahead = self._momentum(count), self._momentum(count + 1)
        product = state.product * now
        of_gradient, of_mean = (1 - now) / (1 - product), ahead / (1 - product * ahead)
        debias = 1 / (1 - self.b2 ** count.astype(jnp.float32))

        def step(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return (of_gradient * g + of_mean * m) / (jnp.sqrt(v * debias) + self.epsilon)

        return jax.tree.map(step, updates, mu, nu), NesterovMoments(count, product, mu, nu)

    def _momentum(self, update: jax.Array) -> jax.Array:
        """Return the decay rate of the mean at an update, counted from 1."""
        return self.b1 * (1 - 0.5 * 0.96 ** (update * self.momentum_decay))


def _init_nadamw(params: Any) -> NesterovMoments:
    return NesterovMoments(jnp.zeros((), jnp.int32), jnp.ones(()), *zeros_like(params, 2))


# Below this effective length the variance of 1 / sqrt(v) is intractable.
_SHORTEST = 5.0


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RAdam(AdamRule):
    """RAdam (arXiv 1908.03265): Adam times a rectification, and the debiased mean alone while the
    second moment has seen too little (5 updates at b2 = 0.999); decoupled decay."""

    name: ClassVar[str] = "radam"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "b2")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init_radam, self._update)

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
    """Return the effective length of a moving average after t updates, in updates (RAdam's rho_t).

    It is r - 2 t b2^t / (1 - b2^t), at most r = 2 / (1 - b2) - 1.

    It is about t at first, as the difference of two numbers near r, which float32 would lose. With
    x = -t log b2 the second is 2 t / (e^x - 1), whose series begins 2 t / x - t.
    """
    longest, forgets = 2 / (1 - b2) - 1, -math.log(b2)
    x = t * forgets
    series = -(x**2) / 12 + x**4 / 720 - x**6 / 30240 + x**8 / 1209600
    early = longest - 2 / forgets + t + 2 / forgets * series
    return jnp.where(x < 1, early, longest - 2 * t / jnp.expm1(jnp.maximum(x, 1.0)))


def _init_radam(params: Any) -> Any:
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), *zeros_like(params, 2))


class Differences(NamedTuple):
    """Optimizer state of Adan.

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
class Adan(AdamRule):
    """Adan (arXiv 2208.06677): (m + b2 v) / (sqrt(n) + epsilon), all debiased, n the mean of (g +
    b2 (g - g of the step before))^2; decoupled decay. A rate is 1 less the paper's beta, as in its
    authors' code.

    Attributes:
      b2: decay rate of the mean v of its differences, and their weight.
      b3: decay rate of the mean of squares n.
    """

    name: ClassVar[str] = "adan"
    kept: ClassVar[int] = 4
    b1: float = 0.98
    b2: float = 0.92
    b3: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_rate(self, "b3")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init_adan, self._update)

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


def _init_adan(params: Any) -> Differences:
    return Differences(jnp.zeros((), jnp.int32), *zeros_like(params, 4))


class Sensitivities(NamedTuple):
    """Optimizer state of AdamSAGE.

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
    mean. Meant for continuing from trained parameters: a parameter that is 0, such as a newly
    initialized bias, stays 0.

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
        return optax.GradientTransformation(_init_adam_sage, self._update)

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


def _init_adam_sage(params: Any) -> Sensitivities:
    return Sensitivities(jnp.zeros((), jnp.int32), *zeros_like(params, 3))


class SummedSquares(NamedTuple):
    """Optimizer state of Adagrad.

    Attributes:
      total: sum of the gradients' squares.
    """

    total: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(DirectionRule):
    """Adagrad (Duchi et al., JMLR 12, 2011): g / (sqrt(sum of g^2) + epsilon), decay in the
    gradient.

    Attributes:
      epsilon: added to the denominator.
    """

    name: ClassVar[str] = "adagrad"
    decay_in_gradient: ClassVar[bool] = True
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        require_positive(self, "epsilon")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init_adagrad, self._update)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        total = jax.tree.map(lambda s, g: s + g * g, state.total, updates)
        updates = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + self.epsilon), updates, total)
        return updates, SummedSquares(total)


def _init_adagrad(params: Any) -> SummedSquares:
    return SummedSquares(jax.tree.map(jnp.zeros_like, params))


class MeanSquares(NamedTuple):
    """Optimizer state of RMSprop.

    Attributes:
      nu: moving mean of the gradients' squares.
      trace: momentum of the updates; () without.
    """

    nu: Any
    trace: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSprop(DirectionRule):
    """RMSprop (Hinton, Coursera lecture 6e, 2012): g / (sqrt(v) + epsilon), v not debiased; decay
    in the gradient.

    Attributes:
      decay: decay rate of the mean v of squares.
      momentum: decay rate of a sum of the updates; 0 is none.
      epsilon: added to the denominator.
    """

    name: ClassVar[str] = "rmsprop"
    decay_in_gradient: ClassVar[bool] = True
    decay: float = 0.99
    momentum: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        validate_rate(self, "decay", "momentum")
        require_positive(self, "epsilon")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(self._init, self._update)

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),) * (2 if self.momentum else 1)

    def _init(self, params: Any) -> MeanSquares:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return MeanSquares(zeros, jax.tree.map(jnp.zeros_like, params) if self.momentum else ())

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        nu = jax.tree.map(lambda v, g: self.decay * v + (1 - self.decay) * g * g, state.nu, updates)
        updates = jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + self.epsilon), updates, nu)
        if not self.momentum:
            return updates, MeanSquares(nu, ())
        trace = jax.tree.map(lambda t, u: self.momentum * t + u, state.trace, updates)
        return trace, MeanSquares(nu, trace)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(DirectionRule):
    """Lion (arXiv 2302.06675): sign(b1 m + (1 - b1) g), decoupled decay. The paper takes a third to
    a tenth of AdamW's learning rate, and as many times its decay.

    Attributes:
      b1: weight of the momentum m in the update.
      b2: decay rate of the momentum.
    """

    name: ClassVar[str] = "lion"
    b1: float = 0.9
    b2: float = 0.95

    def __post_init__(self) -> None:
        validate_rate(self, "b1", "b2")

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)
