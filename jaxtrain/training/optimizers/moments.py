"""Dtype of optimizer moments and parameters; stochastic rounding to bfloat16.

bfloat16 has 8 bits of precision. A second moment moves by at most (1 - b2) of itself towards a
steady gradient's square: with b2 = 0.999 that is less than half of its last bit, so that rounding
to nearest never changes it. With stochastic rounding, a value goes to
either neighbor with the probability that makes the rounding unbiased (arXiv 1502.02551,
section 2): steps far below the last bit accumulate. It is reproducible on any mesh and after a
restart.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.parallel.sharding import is_variable, logical_axes

Moments = Literal["float32", "bfloat16"]

# Why replicas' rounded moments are not averaged.
ROUNDED = (
    "the mean of the replicas' moments would be rounded to nearest, so that a slow moment "
    "would never change"
)


class Rounded(NamedTuple):
    """Optimizer state of a rule whose moments are bfloat16.

    Attributes:
      count: int32 scalar, updates so far: seeds the rounding.
      rule: the rule's own state.
    """

    count: jax.Array
    rule: Any


def keep_moments(
    rule: optax.GradientTransformation, dtype: Moments
) -> optax.GradientTransformationExtraArgs:
    """Store the moments of a rule in `dtype`, whatever the parameters'; the rule computes in
    float32.

    The update uses the moments before rounding. The random bits are a hash of the
    update's number and of the element's name and index in the whole array, so that they are the
    same on every mesh and after every restart.

    Args:
      rule: an update rule, its state a NamedTuple of moments, trees of arrays with named axes, and
        of scalars such as a count.
      dtype: of the moments at rest.
    """

    of_rule = optax.with_extra_args_support(rule)

    def init(params: Any) -> Any:
        state = rule.init(_cast(params, jnp.float32))
        if dtype == "float32":
            return state
        return Rounded(jnp.zeros((), jnp.int32), _cast(state, jnp.bfloat16))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        layers: Sequence[int] | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        """Update as in optax; `layers` is the layer at each index of stacked arrays.

        None: the index itself, as outside of a pipeline.
        """
        if dtype == "float32":
            return of_rule.update(updates, state, params, **extra)
        before = _cast(state.rule, jnp.float32)
        updates, exact = of_rule.update(updates, before, params, **extra)
        return updates, Rounded(state.count + 1, _round_all(exact, state.count, layers))

    return optax.GradientTransformationExtraArgs(init, update)


def _round_all(state: Any, count: jax.Array, layers: Sequence[int] | None) -> Any:
    """Return a rule's float32 state with its moments rounded to bfloat16."""

    def rounding(moment: int) -> Callable[[Any, Any], Any]:
        def one(path: Any, variable: Any) -> Any:
            # Two moments of an element share the halves of one hash.
            bits = hash_bits(path, variable, count, moment // 2, layers) >> 16 * (moment % 2)
            rounded = round_to_bfloat16(variable.get_value(), bits & jnp.uint32(0xFFFF))
            return variable.replace(rounded)

        return one

    moments = [name for name in state._fields if _is_moment(getattr(state, name))]
    rounded = {
        name: jax.tree_util.tree_map_with_path(
            rounding(number), getattr(state, name), is_leaf=is_variable
        )
        for number, name in enumerate(moments)
    }
    return state._replace(**rounded)


def _is_moment(field: Any) -> bool:
    return any(is_variable(leaf) for leaf in jax.tree.leaves(field, is_leaf=is_variable))


def _cast(tree: Any, dtype: Any) -> Any:
    """Return a tree with its named arrays in this dtype; scalars stay unchanged."""
    return jax.tree.map(
        lambda x: x.replace(x.get_value().astype(dtype)) if is_variable(x) else x,
        tree,
        is_leaf=is_variable,
    )


# The layer at each index of stacked arrays; None: the index itself.
Layers = Sequence[int] | jax.Array | None

# Index of the draw of a parameter itself among an update's draws for an array.
_PARAMETER = 2**20 + 2


def apply_updates(params: Any, updates: Any, count: jax.Array, layers: Layers = None) -> Any:
    """Apply updates in float32 and return the parameters; bfloat16 ones are rounded stochastically.

    Args:
      params: named arrays, float32 or bfloat16.
      updates: like them.
      count: of steps: seeds the rounding.
      layers: the layer at each index of stacked arrays; None: the index itself.
    """

    def one(path: Any, param: Any, update: Any) -> Any:
        value = param.get_value()
        if value.dtype != jnp.bfloat16:
            return param.replace(optax.apply_updates(value, update.get_value()))
        exact = value.astype(jnp.float32) + update.get_value()
        bits = hash_bits(path, param, count, _PARAMETER, layers) & jnp.uint32(0xFFFF)
        return param.replace(round_to_bfloat16(exact, bits))

    return jax.tree_util.tree_map_with_path(one, params, updates, is_leaf=is_variable)


def round_to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round stochastically to one of the two bfloat16 neighbors; unbiased over uniform bits.

    bfloat16 is the upper half of a float32. The lower half, in 65,536ths of the step between the
    neighbors, is the distance from the one nearer zero; with as many random bits added
    it carries into the upper half with that probability. Exact bfloat16 values are unchanged.

    Args:
      x: float32.
      bits: uint32 like x, uniform below 2**16.
    """
    exact = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = (exact + bits) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.float32)
    # The sum would corrupt a NaN; infinity must not carry.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def hash_bits(path: Any, variable: Any, count: jax.Array, number: int, layers: Layers) -> jax.Array:
    """Return 32 random bits for each element of a named array, uint32: the same on every mesh.

    Args:
      path: its path in the tree.
      variable: the array.
      count: of updates: seeds the random bits.
      number: index of the draw for this array in the update.
      layers: as in `keep_moments`.
    """
    name = zlib.crc32(jax.tree_util.keystr(path).encode(), number)
    stacked = logical_axes(variable)[:1] == ("layers",)
    return hash_array_bits(variable.get_value(), count, name, layers if stacked else None)


def hash_array_bits(
    x: jax.Array, count: jax.Array, number: int, layers: Layers = None
) -> jax.Array:
    """Return the same for an array without a name; `number` distinguishes it from others."""
    key = _mix(_mix(count.astype(jnp.uint32)) ^ jnp.uint32(number))
    return _mix(_index(x, layers) ^ key)


def _index(x: jax.Array, layers: Layers) -> jax.Array:
    """Return each element's row-major index modulo 2**32, sharded like the array."""
    sharding = jax.typeof(x).sharding
    layout = {} if sharding.mesh.empty else {"out_sharding": sharding}
    index = jnp.zeros((), jnp.uint32)
    for dim in range(x.ndim):
        stride = int(np.prod(x.shape[dim + 1 :], dtype=np.uint64)) % 2**32
        flat_index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim, **layout)
        if dim == 0 and layers is not None:
            order = jnp.asarray(layers).astype(jnp.uint32).reshape(-1, *(1,) * (x.ndim - 1))
            flat_index = jnp.zeros_like(flat_index) + order
        index = index + flat_index * jnp.uint32(stride)
    return index


def _mix(x: jax.Array) -> jax.Array:
    """Permute 32-bit integers so that each bit depends on all others.

    Three shifts and two multiplications, from a search for the least bias (C. Wellons, "Prospecting
    for hash functions", lowbias32 of 2022).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
