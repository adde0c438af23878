"""Dropout whose random mask depends only on an element's global position, not on the mesh.

Which elements are dropped is a function of the run's seed, the step, the row in the global batch
and the dropout's index in the model. So every mesh, every number of microbatches, every exchange
and every resume drops the same ones.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """Source of a step's dropout masks.

    Attributes:
      key: of the run's seed and the step.
      rows: int32 [B]; which row of the global batch each row is.
    """

    key: jax.Array
    rows: jax.Array

    @classmethod
    def of_step(cls, seed: int, step: jax.Array, rows: jax.Array) -> "Draws":
        """Those of one step; `rows` as above."""
        return cls(jax.random.fold_in(jax.random.key(seed), step), rows)


def dropout(
    x: jax.Array,
    rate: float,
    draws: Draws | None,
    site: int,
    layer: jax.Array | int | None = None,
) -> jax.Array:
    """Set each element of x to 0 with probability `rate`, divide the others by 1 - rate.

    Srivastava et al. 2014, "Dropout", scaled in training as `torch.nn.Dropout` does.

    Args:
      x: [B, ...].
      rate: the dropped fraction, 0 to below 1.
      draws: of this step; None is evaluation, without dropout.
      site: index of the dropout layer in the model: each has its own mask.
      layer: index of the layer that it is in, for stacked layers.
    """
    if draws is None or rate == 0:
        return x
    key = jax.random.fold_in(draws.key, site)
    if layer is not None:
        key = jax.random.fold_in(key, layer)

    def of_row(row: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, row), 1 - rate, x.shape[1:])

    kept = jax.vmap(of_row)(draws.rows)
    if not jax.sharding.get_abstract_mesh().empty:
        kept = jax.sharding.reshard(kept, jax.typeof(x).sharding.spec)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The dropout layers of a part of a model.

    Attributes:
      rate: as in `dropout`.
      first: index of the first of them.
    """

    rate: float = 0.0
    first: int = 0

    def __call__(
        self,
        x: jax.Array,
        draws: Draws | None,
        layer: jax.Array | int | None = None,
        *,
        number: int = 0,
    ) -> jax.Array:
        """Apply dropout layer `number` of the part, counted from 0."""
        return dropout(x, self.rate, draws, self.first + number, layer)


def validate_rate(model: object, name: str, rate: float) -> None:
    """Raise UserError for a rate that is not a probability below 1."""
    if not 0 <= rate < 1:
        raise UserError(f"{type(model).__name__}.{name}={rate}; use 0 to below 1, such as 0.5")
