"""Dtype of optimizer moments; bfloat16 with stochastic rounding.

bfloat16 has 8 bits of precision. A second moment moves by at most (1 - b2) of itself towards a
steady gradient's square: with b2 = 0.999 that is less than half of its last bit, so that rounding
to the nearest number leaves it where it is indefinitely.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.parallel.sharding import is_variable
from jaxtrain.training.optimizers.rounding import hash_bits, round_to_bfloat16

Moments = Literal["float32", "bfloat16"]

# Why replicas' rounded moments are not averaged.
ROUNDED = (
    "the mean of replicas' moments would be rounded to the nearest number, which a slow moment "
    "never leaves"
)


class Rounded(NamedTuple):
    """The state of a rule whose moments are kept in bfloat16.

    Attributes:
      count: int32 scalar, updates so far: no two round alike.
      rule: the rule's own state.
    """

    count: jax.Array
    rule: Any


def keep_moments(
    rule: optax.GradientTransformation, dtype: Moments
) -> optax.GradientTransformationExtraArgs:
    """The rule with its moments kept in `dtype`, whatever the parameters'; it computes in float32.

    The update is that of the moments before they are rounded. The random bits are a hash of the
    update's number and of the element's name and place in the whole array, so that they are the
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
        """As optax's; `layers` says which layer stands at each place of stacked arrays, if not the
        place's own (in a pipeline)."""
        if dtype == "float32":
            return of_rule.update(updates, state, params, **extra)
        before = _cast(state.rule, jnp.float32)
        updates, exact = of_rule.update(updates, before, params, **extra)
        return updates, Rounded(state.count + 1, _round_all(exact, state.count, layers))

    return optax.GradientTransformationExtraArgs(init, update)


def _round_all(state: Any, count: jax.Array, layers: Sequence[int] | None) -> Any:
    """A rule's float32 state with its moments in bfloat16."""

    def rounding(moment: int) -> Callable[[Any, Any], Any]:
        def one(path: Any, variable: Any) -> Any:
            # Two moments of an element take their halves of one number: hashed once for the two.
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
    """The named arrays of a tree in this dtype; scalars beside them stay as they are."""
    return jax.tree.map(
        lambda x: x.replace(x.get_value().astype(dtype)) if is_variable(x) else x,
        tree,
        is_leaf=is_variable,
    )
