"""Per-replica functions and arrays: run by each replica along `data` on its own data.

Per-replica arrays have a leading "replica" dimension, sharded over `data`, so that
checkpoints contain every replica. Letter: k replicas.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import Layout, along, is_variable, logical_axes
from jaxtrain.training.setup import Setup, with_row_ids
from jaxtrain.training.step import Step

# The spec, inside and outside `jax.shard_map`, of per-replica arrays.
REPLICA = P("data")


def replicas_of(setup: Setup) -> int:
    """Return the number of replicas, k."""
    return setup.layout.mesh.shape["data"]


def rows_of_replicas(setup: Setup, batch: Batch) -> Batch:
    """Return the batch with a leading "replica" dimension: each replica's rows, on their devices.

    A dimension sharded over `data` and another axis would be gathered over that other axis on its
    way into `jax.shard_map`.
    """
    rest = setup.layout.with_manual("data")
    spec, k = P("data", rest.activation(("batch",))[0]), replicas_of(setup)

    def one(x: jax.Array) -> jax.Array:
        return jax.lax.reshape(x, (k, x.shape[0] // k, *x.shape[1:]), out_sharding=spec)

    return jax.tree.map(one, with_row_ids(batch) if setup.objective.draws else batch)


def on_each_replica(
    step: Step, function: Callable[..., Any], in_axes: Any, out_axes: Any
) -> Callable[..., Any]:
    """Run `function(step, *arguments)` on each replica with its own part of the arguments.

    Args:
      step: which the function gets rebuilt to reduce over every mesh axis but `data`: its losses
        and gradients are means over the replica's own targets.
      function: of one replica, with parameters that have no "replica" dimension.
      in_axes: as in `jax.vmap`: 0 for arrays with a leading "replica" dimension, else None.
      out_axes: the same of the results.
    """

    def run(*arguments: Any) -> Any:
        with step.setup.layout.enter_manual("data") as layout:
            arguments = jax.tree.map(_without_replica, arguments, is_leaf=is_variable)
            results = function(step.rebuild(layout=layout), *arguments)
            return jax.tree.map(_with_replica, results, is_leaf=is_variable)

    def one(*arguments: Any) -> Any:
        arguments = _where(in_axes, lambda x: jnp.squeeze(x, 0), arguments)
        results = run(*arguments)
        return _where(out_axes, lambda x: jnp.expand_dims(x, 0), results)

    def all_replicas(*arguments: Any) -> Any:
        # The results of one replica determine how they are sharded.
        shapes = jax.eval_shape(run, *_where(in_axes, _of_one, arguments))
        own = jax.tree.map(lambda shape: shape.sharding.spec, shapes)
        specs = _where(out_axes, lambda spec: P("data", *spec), own)
        return along(("data",), one, *arguments, out_specs=specs)

    return all_replicas


def _where(axes, function, tree):  # noqa: ANN001, ANN202 - any pytree in, the same out
    """Apply `function` to the arrays that have a "replica" dimension; `axes` is a prefix of the
    tree.
    """

    def one(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(function, part)

    return jax.tree.map(one, axes, tree, is_leaf=lambda x: x is None)


def _of_one(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape of one replica's part of an array [k, ...], sharded over the other axes."""
    sharding = jax.typeof(x).sharding
    return jax.ShapeDtypeStruct(
        x.shape[1:], x.dtype, sharding=NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    )


def to_replicas(tree, replicas: int):  # noqa: ANN001, ANN201 - any pytree in, the same out
    """Return each array repeated along a leading "replica" dimension; on a mesh, without a
    transfer.
    """

    def repeat(x: jax.Array) -> jax.Array:
        sharding = jax.typeof(x).sharding
        spec = None if sharding.mesh.empty else P("data", *sharding.spec)
        return jnp.broadcast_to(x, (replicas, *x.shape), out_sharding=spec)

    tree = jax.tree.map(repeat, tree)
    return jax.tree.map(_with_replica, tree, is_leaf=is_variable)


def over_replicas(function, tree):  # noqa: ANN001, ANN201
    """Reduce the "replica" dimension of each array in a tree with `function`."""
    return jax.tree.map(_without_replica, jax.tree.map(function, tree), is_leaf=is_variable)


def _with_replica(leaf):  # noqa: ANN001, ANN202 - names alone; arrays stay as they are
    return leaf.replace(axes=("replica", *logical_axes(leaf))) if is_variable(leaf) else leaf


def _without_replica(leaf):  # noqa: ANN001, ANN202
    if is_variable(leaf) and logical_axes(leaf)[0] == "replica":
        return leaf.replace(axes=logical_axes(leaf)[1:])
    return leaf


def replica_shardings(tree, spec, layout: Layout):  # noqa: ANN001, ANN201
    """Return shardings like `sharding.shardings`; unnamed leaves are split over `data` along their
    first dimension.
    """

    def one(leaf):  # noqa: ANN001, ANN202
        return layout.sharding_of(spec(logical_axes(leaf)) if is_variable(leaf) else REPLICA)

    return jax.tree.map(
        lambda leaf: leaf.replace(one(leaf)) if is_variable(leaf) else one(leaf),
        tree,
        is_leaf=is_variable,
    )


def expand_per_replica(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return one value per replica [k], shaped to be multiplied with an array [k, ...]."""
    return x.reshape(-1, *(1,) * (like.ndim - 1))


def shares(weight: jax.Array) -> jax.Array:
    """Return each replica's fraction of the total weight, float32 [k]; equal where
    nothing counts.
    """
    total = weight.sum()
    return jnp.where(total > 0, weight / jnp.maximum(total, 1.0), 1.0 / weight.size)


@jax.jit
def means(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the means over replicas of metrics [k], weighted with `weight` [k].

    It synchronizes replicas that otherwise take steps without communication, so it
    is called only for logged steps.
    """
    share = shares(metrics["weight"])
    return {
        name: (value * share).sum() if jnp.ndim(value) else value
        for name, value in metrics.items()
        if name != "weight"
    }
