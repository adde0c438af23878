"""Order of collectives on simulated devices: those of a branch after those before it.

XLA's CPU client starts the collectives of a program in order, each when the one before has ended,
but it counts a conditional as ended as soon as it has started. A collective that does not depend on
a conditional with collectives then runs at the same time as they do, in another thread of a pool
that has as many threads as there are devices or cores: with every thread in a collective that waits
for another thread, none of them ends. The order has to be one of values. An optimization barrier
gives none, since XLA removes it before it chooses the order. TPUs and GPUs need no order: there the
two overlap, which is why streaming DiLoCo keeps them independent.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import current_layout, on_each_device

_HOST = jax.memory.Space.Host


def run_after(results: Any, tree: Any) -> Any:
    """Return the tree, which on simulated devices is only available after the results are.

    Its values do not change. On TPUs, GPUs and a single device nothing is done.

    Args:
      results: any pytree; its floating-point arrays are waited for.
      tree: any pytree; its arrays on the devices wait.
    """
    layout = current_layout()
    if layout is None or layout.mesh.size == 1 or platform_of(layout.mesh) != "cpu":
        return tree
    waited = [x for x in jax.tree.leaves(results) if _is_on_device(x, jnp.floating) and x.size]
    leaves, structure = jax.tree.flatten(tree)
    where = [index for index, x in enumerate(leaves) if _is_on_device(x, jnp.number)]
    if not waited or not where:
        return tree
    waiting = [leaves[index] for index in where]
    specs = [[jax.typeof(x).sharding.spec for x in group] for group in (waited, waiting)]
    done = on_each_device(_wait, tuple(specs), specs[1])(waited, waiting)
    for index, x in zip(where, done, strict=True):
        leaves[index] = x
    return structure.unflatten(leaves)


def run_between(function: Callable[..., Any], before: Any, *arguments: Any) -> tuple[Any, Any]:
    """Return `before` and `function(*arguments)`, which on simulated devices runs after it.

    What is computed from the `before` returned runs after the function.
    """
    found = function(*run_after(before, arguments))
    return run_after(found, before), found


def _wait(results: list[jax.Array], tree: list[jax.Array]) -> list[jax.Array]:
    # `x != x` is true of NaN alone, and `x == x` of all else: never both, which XLA does not see.
    firsts = [x.reshape(-1)[0] for x in results]
    never = jnp.any(jnp.stack([(x != x) & (x == x) for x in firsts]))
    return [jnp.where(never, jnp.zeros_like(x), x) for x in tree]


def _is_on_device(x: Any, kind: Any) -> bool:
    return jnp.issubdtype(x.dtype, kind) and jax.typeof(x).memory_space != _HOST
