"""Muon: orthogonalized momentum for matrices (Newton-Schulz), AdamW for the rest."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.reader import configurable
from jaxtrain.parallel.sharding import logical_axes
from jaxtrain.training.optimizers.matrices import Sides, each, on_whole, sides
from jaxtrain.training.optimizers.rule import AdamRule, Kept, validate_rate

# The quintic a x + b x^3 + c x^5 of the authors' code, steepest at 0: five iterations bring
# singular values from 0.002 on to between 0.7 and 1.2.
_A, _B, _C, _TURNS = 3.4445, -4.7750, 2.0315, 5
# An AdamW update's root mean square, to which updates are scaled (arXiv 2502.16982, section 2.2):
# learning rate and decay then are AdamW's, the same for matrices and the rest.
_ROOT_MEAN_SQUARE = 0.2
# Embeddings and heads are not maps between hidden states: AdamW, as in both papers.
_TABLES = ("vocab", "positions", "classes")


class Momenta(NamedTuple):
    """Optimizer state of Muon.

    Attributes:
      count: int32 scalar, updates so far.
      mu: moving mean of the gradients.
      nu: that of their squares; of the matrices that are orthogonalized ().
    """

    count: jax.Array
    mu: Any
    nu: Any


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(AdamRule):
    """Muon (Jordan et al., 2024; arXiv 2502.16982): the Nesterov momentum of each matrix,
    orthogonalized by five Newton-Schulz iterations and scaled to 0.2 root mean square; AdamW for
    embeddings, heads, norm scales and biases; decoupled decay for both. Queries, keys and values,
    layers and experts are separate matrices; a convolution kernel is one of height width
    channels_in x channels. Whole matrices are orthogonalized: layers are moved to the devices that
    share them, or gathered one by one if their number does not divide.

    Attributes:
      momentum: decay rate of a matrix's mean gradient.
      b1: AdamW's decay rate of the gradient's mean.
      b2: AdamW's decay rate of its square's mean.
      epsilon: what AdamW's denominator is at least.
    """

    name: ClassVar[str] = "muon"
    momentum: float = 0.95
    b2: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_rate(self, "momentum")

    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(_init, self._update)

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        return (Kept(shape, axes),) * (1 if _is_orthogonalized(axes) else 2)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        t = count.astype(jnp.float32)

        def mean(gradient: Any, old: Any) -> Any:
            b1 = self.momentum if _is_orthogonalized(logical_axes(gradient)) else self.b1
            return old.replace(b1 * old.get_value() + (1 - b1) * gradient.get_value())

        def mean_square(gradient: Any, old: Any) -> Any:
            if isinstance(old, tuple):
                return old
            square = jnp.square(gradient.get_value())
            return old.replace(self.b2 * old.get_value() + (1 - self.b2) * square)

        def step(gradient: Any, mu: Any, nu: Any) -> Any:
            g, m, axes = gradient.get_value(), mu.get_value(), logical_axes(gradient)
            if _is_orthogonalized(axes):
                ahead = self.momentum * m + (1 - self.momentum) * g
                return gradient.replace(orthogonalize(ahead, sides(axes)))
            denominator = jnp.sqrt(nu.get_value() / (1 - self.b2**t)) + self.epsilon
            return gradient.replace(m / (1 - self.b1**t) / denominator)

        mu = each(mean, updates, state.mu)
        nu = each(mean_square, updates, state.nu)
        return each(step, updates, mu, nu), Momenta(count, mu, nu)


def orthogonalize(x: jax.Array, dims: Sides) -> jax.Array:
    """Orthogonalize matrices: bring singular values near 1, times 0.2 sqrt(their longer side).

    Args:
      x: float32, sharded like the optimizer's state; so is the result.
      dims: which dimensions count matrices and which are a matrix's sides.
    """
    longer = max(math.prod(x.shape[i] for i in part) for part in (dims.rows, dims.columns))
    scale = _ROOT_MEAN_SQUARE * math.sqrt(longer)
    return on_whole(lambda matrices: scale * newton_schulz(matrices), x, dims)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Bring the singular values of matrices [..., rows, columns] to between 0.7 and 1.2."""
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    size = jnp.sqrt(jnp.square(x).sum((-2, -1), keepdims=True))
    x /= jnp.maximum(size, 1e-7)

    def turn(_: int, x: jax.Array) -> jax.Array:
        gram = jnp.einsum("...mn,...kn->...mk", x, x)
        squared = jnp.einsum("...mk,...kl->...ml", gram, gram)
        return _A * x + jnp.einsum("...mk,...kn->...mn", _B * gram + _C * squared, x)

    # A loop: unrolled, the matrices of all iterations would be live at once.
    x = jax.lax.fori_loop(0, _TURNS, turn, x)
    return jnp.swapaxes(x, -1, -2) if tall else x


def _is_orthogonalized(axes: tuple[str, ...]) -> bool:
    return bool(sides(axes).rows) and not any(axis in _TABLES for axis in axes)


def _init(params: Any) -> Momenta:
    def second(param: Any) -> Any:
        empty = _is_orthogonalized(logical_axes(param))
        return () if empty else param.replace(jnp.zeros_like(param.get_value()))

    return Momenta(
        jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), each(second, params)
    )
