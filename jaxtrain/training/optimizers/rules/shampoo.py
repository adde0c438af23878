"""Shampoo."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.training.optimizers.matrices import each
from jaxtrain.training.optimizers.rule import DirectionRule, Kept, validate_rate
from jaxtrain.training.optimizers.rules import preconditioners as sided


class Statistics(NamedTuple):
    """Optimizer state of Shampoo.

    Attributes:
      count: int32 scalar, updates so far.
      total: of a matrix, for either side the sum of G G^T, () for one that is too long; of others,
        and of matrices with two such sides, the sum of squares.
      roots: of either side the inverse root of that, from some updates ago.
      trace: momentum of the updates.
    """

    count: jax.Array
    total: Any
    roots: Any
    trace: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shampoo(DirectionRule):
    """Shampoo (Gupta et al., arXiv 1802.09568): L^(-1/4) G R^(-1/4) of each matrix of each layer,
    L the sum of G G^T and R of G^T G, both from epsilon times the identity; its momentum; Adagrad
    for norm scales and biases; decoupled decay. The roots are computed in float32, every few steps.

    Attributes:
      momentum: decay rate of a sum of the updates.
      every: updates between one inverse root and the next.
      largest: a longer side has no preconditioner, and the other its inverse square root.
      epsilon: initial value of the sums.
    """

    name: ClassVar[str] = "shampoo"
    dtype: ClassVar[str | None] = "float32"
    momentum: float = 0.9
    every: int = 10
    largest: int = 4096
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        validate_rate(self, "momentum")
        require_at_least(1, self, "every", "largest")
        require_positive(self, "epsilon")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(self._init, self._update)

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        squares = [kept for kept in sided.of_sides(shape, axes, self.largest) if kept is not None]
        return (Kept(shape, axes), *(squares * 2 or [Kept(shape, axes)]))

    def _init(self, params: Any) -> Statistics:
        def total(param: Any) -> Any:
            rows, columns = sided.for_sides(param, self.largest, diagonal=self.epsilon)
            if sided.are_none((rows, columns)):
                return param.replace(jnp.full_like(param.get_value(), self.epsilon))
            return rows, columns

        def roots(param: Any) -> Any:
            return sided.for_sides(param, self.largest, diagonal=0.0)

        trace = jax.tree.map(jnp.zeros_like, params)
        return Statistics(jnp.zeros((), jnp.int32), each(total, params), each(roots, params), trace)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params

        def accumulate(gradient: Any, old: Any) -> Any:
            g = gradient.get_value()
            if not isinstance(old, tuple):
                return old.replace(old.get_value() + g * g)
            m = sided.flat(g, logical_axes(gradient))
            return tuple(
                one if sided.is_none(one) else one.replace(one.get_value() + sided.gram(m, side))
                for side, one in enumerate(old)
            )

        def inverse_roots(total: Any) -> Any:
            """Return the inverse root of each side's statistics; the sides share the power."""

            def one(_: Any, of: Any) -> Any:
                if not isinstance(of, tuple):
                    return (), ()
                order = 2 * sum(not sided.is_none(side) for side in of)
                root = functools.partial(sided.inverse_root, order=order, least=self.epsilon)
                return tuple(
                    side if sided.is_none(side) else side.replace(root(side.get_value()))
                    for side in of
                )

            return each(one, updates, total)

        def step(gradient: Any, total: Any, roots: Any) -> Any:
            g = gradient.get_value()
            if not isinstance(total, tuple):
                return gradient.replace(g * jax.lax.rsqrt(total.get_value()))
            m = sided.flat(g, logical_axes(gradient))
            for side, root in enumerate(roots):
                m = m if sided.is_none(root) else sided.out_of(root.get_value(), m, side)
            return gradient.replace(sided.like(m, g))

        total = each(accumulate, updates, state.total)
        due = state.count % self.every == 0
        roots = jax.lax.cond(due, lambda: inverse_roots(total), lambda: state.roots)
        scaled = each(step, updates, total, roots)
        trace = jax.tree.map(lambda t, u: self.momentum * t + u, state.trace, scaled)
        return trace, Statistics(state.count + 1, total, roots, trace)
