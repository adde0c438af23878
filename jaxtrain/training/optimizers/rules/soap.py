"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.ordering import run_between
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.training.optimizers.groups import Decay, add_decay
from jaxtrain.training.optimizers.matrices import each
from jaxtrain.training.optimizers.moments import Moments, keep_moments
from jaxtrain.training.optimizers.rule import AdamRule, Kept, validate_rate, zeros_like
from jaxtrain.training.optimizers.rules import preconditioners as sided


class Bases(NamedTuple):
    """Optimizer state of SOAP.

    Attributes:
      count: int32 scalar, updates so far.
      mu: moving mean of the gradients.
      nu: that of the squares of the gradients in the bases.
      means: of either side of a matrix the moving mean of G G^T; () for a side that is too long and
        for vectors.
      bases: of either side its eigenvectors, by columns.
    """

    count: jax.Array
    mu: Any
    nu: Any
    means: Any
    bases: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SOAP(AdamRule):
    """SOAP (arXiv 2409.11321): AdamW of each matrix of each layer in the eigenbasis of the moving
    means of G G^T and G^T G, updated every few steps by one power iteration; AdamW for
    norm scales and biases. The first update initializes the bases and changes no parameter, as
    in the authors' code.

    Attributes:
      b3: decay rate of the means of G G^T and G^T G.
      every: updates between two power iterations.
      largest: sides longer than this are not preconditioned: they have no eigenbasis.
    """

    name: ClassVar[str] = "soap"
    dtype: ClassVar[str | None] = "float32"
    no_mean: ClassVar[str | None] = "the mean of the replicas' bases is not a basis"
    b1: float = 0.95
    b2: float = 0.95
    b3: float = 0.95
    every: int = 10
    largest: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_rate(self, "b3")
        require_at_least(1, self, "every", "largest")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(self._init, self._update)

    def chain(
        self, rate: optax.Schedule, *, decay: Decay, moments: Moments
    ) -> list[optax.GradientTransformation]:
        moving, decaying = keep_moments(self.direction(), moments), add_decay(decay)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            is_first = state.count == 0  # of this parameter: it may be unfrozen later
            found, after = moving.update(updates, state, params, **extra)
            decayed, _ = decaying.update(found, optax.EmptyState(), params)
            return jax.tree.map(lambda x, y: jnp.where(is_first, x, y), found, decayed), after

        # Checkpoints name the state of each by its index: the learning rate's is the third.
        return [
            optax.GradientTransformationExtraArgs(moving.init, update),
            optax.identity(),
            optax.scale_by_learning_rate(rate),
        ]

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        squares = [kept for kept in sided.of_sides(shape, axes, self.largest) if kept is not None]
        return (*super().keeps(shape, axes), *squares * 2)

    def _init(self, params: Any) -> Bases:
        def zeros(param: Any) -> Any:
            return sided.for_sides(param, self.largest, diagonal=0.0)

        squares = (each(zeros, params) for _ in range(2))
        return Bases(jnp.zeros((), jnp.int32), *zeros_like(params, 2), *squares)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        is_first, t = state.count == 0, jnp.maximum(state.count, 1).astype(jnp.float32)
        of_mu, of_nu = 1 / (1 - self.b1**t), 1 / (1 - self.b2**t)

        def mean(gradient: Any, old: Any) -> Any:
            now = self.b1 * old.get_value() + (1 - self.b1) * gradient.get_value()
            return old.replace(jnp.where(is_first, old.get_value(), now))

        def mean_square(gradient: Any, old: Any, bases: Any) -> Any:
            turned = _in_bases(gradient, bases)
            now = self.b2 * old.get_value() + (1 - self.b2) * turned * turned
            return old.replace(jnp.where(is_first, old.get_value(), now))

        def step(mu: Any, nu: Any, bases: Any) -> Any:
            adam = of_mu * _in_bases(mu, bases) / (jnp.sqrt(of_nu * nu.get_value()) + self.epsilon)
            back = _rotate(sided.out_of, mu.replace(adam), bases)
            return mu.replace(jnp.where(is_first, 0.0, back))

        def mean_of_sides(gradient: Any, old: Any) -> Any:
            if sided.are_none(old):
                return old
            m = sided.flat(gradient.get_value(), logical_axes(gradient))

            def one(side: int, old: Any) -> Any:
                now = sided.gram(m, side)
                return old.replace(self.b3 * old.get_value() + (1 - self.b3) * now)

            return tuple(
                old if sided.is_none(old) else one(side, old) for side, old in enumerate(old)
            )

        mu = each(mean, updates, state.mu)
        nu = each(mean_square, updates, state.nu, state.bases)
        found = each(step, mu, nu, state.bases)
        means = each(mean_of_sides, updates, state.means)
        turn = jnp.where(is_first, 1, jnp.where(state.count % self.every == 0, 2, 0))
        branches = [
            lambda updates, nu, means, bases: (nu, bases),
            lambda updates, nu, means, bases: (nu, _first_bases(updates, means)),
            lambda updates, nu, means, bases: _refresh_bases(nu, means, bases),
        ]
        turned = functools.partial(jax.lax.switch, turn, branches)
        found, (nu, bases) = run_between(turned, found, updates, nu, means, state.bases)
        return found, Bases(state.count + 1, mu, nu, means, bases)


def _in_bases(variable: Any, bases: Any) -> jax.Array:
    return _rotate(sided.into, variable, bases)


def _rotate(move: Any, variable: Any, bases: Any) -> jax.Array:
    """Return a variable's array with each side of its matrices transformed by that side's basis."""
    x = variable.get_value()
    if sided.are_none(bases):
        return x
    m = sided.flat(x, logical_axes(variable))
    for side, basis in enumerate(bases):
        m = m if sided.is_none(basis) else move(basis.get_value(), m, side)
    return sided.like(m, x)


def _first_bases(params: Any, means: Any) -> Any:
    def one(_: Any, means: Any) -> Any:
        return tuple(
            mean if sided.is_none(mean) else mean.replace(sided.eigenbasis(mean.get_value()))
            for mean in means
        )

    return each(one, params, means)


def _refresh_bases(nu: Any, means: Any, bases: Any) -> tuple[Any, Any]:
    """Return the second moment and the bases after a power iteration.

    Where the columns of a basis are permuted, the statistics measured in it are permuted alike.
    """

    def one(nu: Any, means: Any, bases: Any) -> Any:
        if sided.are_none(bases):
            return nu, bases
        m, after = sided.flat(nu.get_value(), logical_axes(nu)), []
        for side, (mean, basis) in enumerate(zip(means, bases, strict=True)):
            if sided.is_none(basis):
                after.append(())
                continue
            turned, order = sided.power_iterate(mean.get_value(), basis.get_value())
            m = sided.permute(order, m, side)
            after.append(basis.replace(turned))
        return nu.replace(sided.like(m, nu.get_value())), tuple(after)

    both = each(one, nu, means, bases)
    return tuple(each(lambda nu, pair, i=i: pair[i], nu, both) for i in (0, 1))
