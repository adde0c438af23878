"""Matrix parameters: sides, norms, trust ratios, and gathers for rules that need them whole."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.precision import is_matrix
from jaxtrain.parallel.sharding import is_variable, logical_axes, parts_of

# Leading dimensions that only stack parameters: norms and sides are per parameter.
_STACKED = ("layers", "qkv", "experts")


class Sides(NamedTuple):
    """Dimensions of stacked matrices.

    Attributes:
      stack: leading ones that count matrices.
      rows: those of a matrix's inputs; none if the parameter is not a matrix.
      columns: those of its outputs: the last, or heads and head_dim together.
    """

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def sides(axes: tuple[str, ...]) -> Sides:
    """Return the matrix dimensions of a parameter with these logical axes."""
    stack = next((i for i, axis in enumerate(axes) if axis not in _STACKED), len(axes))
    own = tuple(range(stack, len(axes)))
    width = 2 if axes[-1:] == ("head_dim",) else 1
    return Sides(tuple(range(stack)), own[:-width], own[-width:])


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """Scale each matrix's update by |w| / |update| (arXiv 1904.00962, algorithm 2, phi the
    identity).

    Norm scales and biases are not scaled, as in the authors' code.
    """

    def one(update: Any, param: Any) -> Any:
        value, w = update.get_value(), param.get_value().astype(jnp.float32)
        if not is_matrix(param):
            return update
        axes = logical_axes(param)
        return update.replace(value * ratio(norm(w, axes), norm(value, axes)))

    return optax.stateless(lambda updates, params: each(one, updates, params))


def norm(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the Euclidean norm of each parameter in a stack, its dimensions kept with size 1."""
    return jnp.sqrt(jnp.square(x).sum(_own(axes), keepdims=True))


def root_mean_square(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the root mean square of each parameter in a stack, its dimensions kept with size 1."""
    return jnp.sqrt(jnp.square(x).mean(_own(axes), keepdims=True))


def ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """Return above / below, 1 where either is 0."""
    defined = (above > 0) & (below > 0)
    return jnp.where(defined, above / jnp.where(defined, below, 1.0), 1.0)


def each(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to each parameter and its counterparts in other trees."""
    return jax.tree.map(function, tree, *others, is_leaf=is_variable)


def _own(axes: tuple[str, ...]) -> tuple[int, ...]:
    return sides(axes).rows + sides(axes).columns


def on_whole(function: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Sides) -> jax.Array:
    """Apply `function` to whole matrices, and return the result sharded like `x`.

    If the layers divide over the axes that split a matrix, all-to-alls give each device its own
    layers and return them. If not, a loop gathers layer by layer.

    Args:
      function: maps unsharded matrices [..., rows, columns] to matrices of the same shape.
      x: stacked matrices, a side perhaps of several dimensions.
      dims: which dimensions count matrices and which are a matrix's sides.
    """
    rows, columns = (math.prod(x.shape[i] for i in part) for part in (dims.rows, dims.columns))
    stack = len(dims.stack)

    def apply_flat(x: jax.Array) -> jax.Array:
        """Apply the function to matrices that are not sharded."""
        flat = x.reshape(*x.shape[: x.ndim - len(dims.rows + dims.columns)], rows, columns)
        return function(flat).reshape(x.shape)

    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or not any(sharding.spec[stack:]):
        return apply_flat(x)
    spec = sharding.spec
    moves = _moves(x.shape, spec, stack, sharding.mesh.shape)
    for to in moves:
        x = jax.sharding.reshard(x, to)
    spec_now = moves[-1] if moves else spec
    if stack and not any(spec_now[:1]) and any(spec_now[stack:]):

        def one_layer(_: None, layer: jax.Array) -> tuple[None, jax.Array]:
            gathered = P(*spec_now[1:stack], *(None,) * (x.ndim - stack))
            found = apply_flat(jax.sharding.reshard(layer, gathered))
            return None, jax.sharding.reshard(found, P(*spec_now[1:]))

        x = jax.lax.scan(one_layer, None, x)[1]
    else:
        gathered = P(*spec_now[:stack], *(None,) * (x.ndim - stack))
        x = jax.sharding.reshard(apply_flat(jax.sharding.reshard(x, gathered)), spec_now)
    for to in (*moves[-2::-1], spec) if moves else ():
        x = jax.sharding.reshard(x, to)
    return x


def _moves(shape: tuple[int, ...], spec: P, stack: int, mesh: Any) -> list[P]:
    """Return the shardings that gather matrices, one mesh axis after the other: from a side to
    layers.

    Moving one axis between dimensions is an all-to-all; each device ends with whole layers.
    """
    found, now = [], list(spec)
    if not stack:
        return found
    for dim in range(stack, len(shape)):
        for axis in parts_of(spec[dim]):
            layers = (*parts_of(now[0]), axis)
            if shape[0] % math.prod(mesh[name] for name in layers):
                continue
            remaining = tuple(name for name in parts_of(now[dim]) if name != axis)
            now[0], now[dim] = layers, remaining or None
            found.append(P(*now))
    return found
