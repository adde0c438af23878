"""`TrainState`, and the results of a step's gradient pass and update."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from jaxtrain.training.finetune.tuning import Weights
from jaxtrain.training.objectives.losses import Sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Train state: everything that is saved and updated.

    Attributes:
      step: int32 scalar, optimizer steps taken.
      params: the master parameters that are trained.
      opt_state: the optimizer's state.
      statistics: running statistics; empty for models that have none.
      loss_scale: the loss scale, and good steps since it last changed; float32 [2].
      exchange: state of an exchange over `data` other than the synchronous one, or the
        noise scale's running means.
      guard: the last good steps' metrics for spike detection: `guard.History`, else ().
      frozen: the parameters without a gradient, unchanged except routers' biases.
    """

    step: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    statistics: nnx.State
    loss_scale: jax.Array
    exchange: Any = ()
    guard: Any = ()
    frozen: nnx.State = dataclasses.field(default_factory=lambda: nnx.State({}))

    @property
    def weights(self) -> Weights:
        """Pair of all parameters: trained and frozen."""
        return self.params, self.frozen

    def replace(self, **changes: Any) -> "TrainState":
        """Return the state with other fields."""
        return dataclasses.replace(self, **changes)


class Gradient(NamedTuple):
    """Result of a gradient pass, the input of the update.

    Attributes:
      grads: float32, with the structure of the trained parameters.
      metrics: the step's metrics so far.
      statistics: the new running statistics.
      exchange: the new value of `TrainState.exchange`.
      extra: further arguments of the optimizer: `curvature`.
      good: bool scalar, whether the update counts; None: it does. If it is false the update
        keeps the old values of everything except the step count.
    """

    grads: nnx.State
    metrics: Sums
    statistics: nnx.State
    exchange: Any = ()
    extra: Mapping[str, Any] = {}  # noqa: RUF012 - a default that nobody changes
    good: jax.Array | None = None


class Updated(NamedTuple):
    """Result of a step.

    Attributes:
      state: the new state.
      metrics: the step's metrics.
      pending: remaining work of the host (`Files`); () is none.
    """

    state: TrainState
    metrics: Sums
    pending: Any = ()


class Applied(NamedTuple):
    """Result of an optimizer update: parameters, optimizer state, and `pending` as in `Updated`."""

    params: nnx.State
    opt_state: optax.OptState
    pending: Any = ()


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return a tree of shapes with these shardings."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes, shardings,
    )  # fmt: skip
