"""Base of programs with replicas along `data`."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.parallel.sharding import Layout, along, is_variable, logical_axes
from jaxtrain.training.creation import init_sharded
from jaxtrain.training.microbatches import with_row_ids
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.step import Program, TrainState, with_shardings

# The spec, inside and outside `jax.shard_map`, of what every replica has its own of.
REPLICA = P("data")


@dataclasses.dataclass(frozen=True)
class ExchangeProgram(abc.ABC):
    """A program's step with another exchange over `data`; creates, shards and compiles the state.

    What each replica has its own of carries a leading "replica" dimension, sharded over `data`, so
    that checkpoints hold every replica.

    Attributes:
      plain: the synchronous program. It evaluates and generates with what `consensus` returns.
    """

    plain: Program

    @property
    def layout(self) -> Layout:
        """Where everything goes."""
        return self.plain.layout

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return self.layout.mesh.shape["data"]

    @property
    def layer_order(self) -> list[int] | None:
        """The layer at each place of the state's stacked arrays; None: 0, 1, ..."""
        return self.plain.layer_order

    @abc.abstractmethod
    def init(self, key: jax.Array, params: nnx.State | None = None) -> TrainState:
        """A fresh state, all replicas alike; the same parameters as the synchronous program's.

        Arguments as of `Program.init`.
        """

    @abc.abstractmethod
    def state_shardings(self, state: TrainState) -> TrainState:
        """A NamedSharding for every array of a state."""

    @abc.abstractmethod
    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        """One optimizer step; metrics are scalars, or vectors with one number for each replica."""

    @abc.abstractmethod
    def consensus(self, state: TrainState) -> TrainState:
        """The state that evaluation and generation use: one model, the mean of the replicas'."""

    @abc.abstractmethod
    def trained(self, state: TrainState) -> TrainState:
        """The synchronous program's state with the parameters that training resumes from: one
        model, the mean of the replicas'. The optimizer's state may be left out."""

    @abc.abstractmethod
    def with_weights(
        self, state: TrainState, params: nnx.State, statistics: nnx.State
    ) -> TrainState:
        """The state with the same weights for every replica; moments stay, averages and what the
        exchange keeps of the parameters restart.

        Args:
          state: the state.
          params: in the form of the synchronous program's state.
          statistics: likewise.
        """

    @final
    def shapes(self) -> TrainState:
        """The state's shapes and dtypes."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    @final
    def abstract_state(self) -> TrainState:
        """The state's shapes, dtypes and shardings; no array is made."""
        shapes = self.shapes()
        return with_shardings(shapes, self.state_shardings(shapes))

    @final
    def create(self, seed: int, params: nnx.State | None = None) -> TrainState:
        """A fresh state, created in place: no device ever holds more than its shards.

        Arguments as of `Program.create`.
        """
        return self.plain.filed(init_sharded(self, seed, params))

    @final
    def batch_shardings(self, batch: Batch) -> Batch:
        """A NamedSharding for every array of a batch: each replica's rows are consecutive."""
        return self.plain.batch_shardings(batch)

    @final
    def rows_of_replicas(self, batch: Batch) -> Batch:
        """The batch with a leading "replica" dimension: each replica's rows, on their devices.

        A dimension sharded over `data` and another axis would be gathered over that other axis on
        its way into `jax.shard_map`.
        """
        rest = self.layout.with_manual("data")
        spec = P("data", rest.activation(("batch",))[0])

        def one(x: jax.Array) -> jax.Array:
            shape = (self.replicas, x.shape[0] // self.replicas, *x.shape[1:])
            return jax.lax.reshape(x, shape, out_sharding=spec)

        return jax.tree.map(one, with_row_ids(batch) if self.plain.objective.draws else batch)

    @final
    def on_each_replica(
        self, function: Callable[..., Any], in_axes: Any, out_axes: Any
    ) -> Callable[..., Any]:
        """`function(program, *arguments)` run by every replica on its own part of the arguments.

        The program it gets reduces over every mesh axis but `data`: its losses and gradients are
        means over the replica's own targets.

        Args:
          function: what one replica does, with parameters that have no "replica" dimension.
          in_axes: as of `jax.vmap`: 0 for what has a leading "replica" dimension, else None.
          out_axes: the same of the results.
        """

        def run(*arguments: Any) -> Any:
            with self.layout.enter_manual("data") as layout:
                program = dataclasses.replace(self.plain, layout=layout)
                arguments = jax.tree.map(_without_replica, arguments, is_leaf=is_variable)
                results = function(program, *arguments)
                return jax.tree.map(_with_replica, results, is_leaf=is_variable)

        def one(*arguments: Any) -> Any:
            arguments = _where(in_axes, lambda x: jnp.squeeze(x, 0), arguments)
            results = run(*arguments)
            return _where(out_axes, lambda x: jnp.expand_dims(x, 0), results)

        def all_replicas(*arguments: Any) -> Any:
            # What one replica alone makes of its part says how the results are laid out.
            shapes = jax.eval_shape(run, *_where(in_axes, _of_one, arguments))
            own = jax.tree.map(lambda shape: shape.sharding.spec, shapes)
            specs = _where(out_axes, lambda spec: P("data", *spec), own)
            return along(("data",), one, *arguments, out_specs=specs)

        return all_replicas


def _where(axes, function, tree):  # noqa: ANN001, ANN202 - any pytree in, the same out
    """`function` of the arrays that have a "replica" dimension; `axes` is a prefix of the tree."""

    def one(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(function, part)

    return jax.tree.map(one, axes, tree, is_leaf=lambda x: x is None)


def _of_one(x: jax.Array) -> jax.ShapeDtypeStruct:
    """One replica's part of an array [k, ...]: its shape, laid out over the other axes."""
    sharding = jax.typeof(x).sharding
    return jax.ShapeDtypeStruct(
        x.shape[1:], x.dtype, sharding=NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    )


def to_replicas(tree, replicas: int):  # noqa: ANN001, ANN201 - any pytree in, the same out
    """Every array repeated along a leading "replica" dimension; on a mesh, without a transfer."""

    def repeat(x: jax.Array) -> jax.Array:
        sharding = jax.typeof(x).sharding
        spec = None if sharding.mesh.empty else P("data", *sharding.spec)
        return jnp.broadcast_to(x, (replicas, *x.shape), out_sharding=spec)

    tree = jax.tree.map(repeat, tree)
    return jax.tree.map(_with_replica, tree, is_leaf=is_variable)


def over_replicas(function, tree):  # noqa: ANN001, ANN201
    """The same tree without the "replica" dimension, which `function` takes from each array."""
    return jax.tree.map(_without_replica, jax.tree.map(function, tree), is_leaf=is_variable)


def _with_replica(leaf):  # noqa: ANN001, ANN202 - names alone; arrays stay as they are
    return leaf.replace(axes=("replica", *logical_axes(leaf))) if is_variable(leaf) else leaf


def _without_replica(leaf):  # noqa: ANN001, ANN202
    if is_variable(leaf) and logical_axes(leaf)[0] == "replica":
        return leaf.replace(axes=logical_axes(leaf)[1:])
    return leaf


def replica_shardings(tree, spec, layout: Layout):  # noqa: ANN001, ANN201
    """As `sharding.shardings`; unnamed leaves are split over `data` along their first dimension."""

    def one(leaf):  # noqa: ANN001, ANN202
        return layout.named(spec(logical_axes(leaf)) if is_variable(leaf) else REPLICA)

    return jax.tree.map(
        lambda leaf: leaf.replace(one(leaf)) if is_variable(leaf) else one(leaf),
        tree,
        is_leaf=is_variable,
    )


def spread_out(x: jax.Array, like: jax.Array) -> jax.Array:
    """A number for each replica [k], shaped to be multiplied with an array [k, ...]."""
    return x.reshape(-1, *(1,) * (like.ndim - 1))
