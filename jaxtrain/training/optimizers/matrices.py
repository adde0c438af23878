"""Matrix parameters: selection, sides, norms, trust ratios."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.nn.precision import is_matrix
from jaxtrain.parallel.sharding import is_variable, logical_axes

# Leading dimensions that only stack parameters: each has its own norm, each matrix its own sides.
_STACKED = ("layers", "qkv", "experts")


class Sides(NamedTuple):
    """The dimensions of stacked matrices.

    Attributes:
      stack: leading ones that count matrices.
      rows: those of a matrix's inputs; none where the parameter is no matrix.
      columns: those of its outputs: the last, or heads and head_dim together.
    """

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def sides(axes: tuple[str, ...]) -> Sides:
    """The dimensions of a parameter whose dimensions mean `axes`."""
    stack = next((i for i, axis in enumerate(axes) if axis not in _STACKED), len(axes))
    own = tuple(range(stack, len(axes)))
    width = 2 if axes[-1:] == ("head_dim",) else 1
    return Sides(tuple(range(stack)), own[:-width], own[-width:])


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """Each matrix's update times |w| / |update| (arXiv 1904.00962, algorithm 2, phi the identity).

    Norm scales and biases are left alone, as in the authors' code.
    """

    def one(update: Any, param: Any) -> Any:
        value, w = update.get_value(), param.get_value().astype(jnp.float32)
        if not is_matrix(param):
            return update
        axes = logical_axes(param)
        return update.replace(value * ratio(norm(w, axes), norm(value, axes)))

    return optax.stateless(lambda updates, params: each(one, updates, params))


def norm(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The Euclidean norm of each parameter in a stack, its dimensions kept with size 1."""
    return jnp.sqrt(jnp.square(x).sum(_own(axes), keepdims=True))


def root_mean_square(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The same of the mean in place of the sum."""
    return jnp.sqrt(jnp.square(x).mean(_own(axes), keepdims=True))


def ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """above / below, 1 where either is 0."""
    defined = (above > 0) & (below > 0)
    return jnp.where(defined, above / jnp.where(defined, below, 1.0), 1.0)


def each(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`function` of each parameter and what stands in its place in other trees."""
    return jax.tree.map(function, tree, *others, is_leaf=is_variable)


def _own(axes: tuple[str, ...]) -> tuple[int, ...]:
    return sides(axes).rows + sides(axes).columns
