"""Sharded initialization of the train state, in place."""

import contextlib
import math
from typing import Any

import jax
from flax import nnx

from jaxtrain.config.errors import UserError

MOST_BYTES = 2**44  # of a device: a misprint's model, whose creation would never come to an end


def init_sharded(program: Any, seed: int, params: nnx.State | None) -> Any:
    """What is in memory of a fresh `TrainState`.

    Args:
      program: a `Program`, or what is put around one.
      seed: of what is drawn.
      params: the parameters to start from, as of `Program.init`, which are taken away.
    """

    def init(key: jax.Array, params: nnx.State | None) -> Any:
        return program.plain.in_memory(program.init(key, params))

    shapes = program.plain.in_memory(program.shapes())
    out = program.state_shardings(shapes)
    _validate_more_than_any_holds(shapes, out)
    made = jax.jit(init, out_shardings=out, donate_argnums=1)
    # Traced without an ambient mesh: XLA then spreads the drawing of random numbers itself.
    with contextlib.nullcontext() if params is None else program.layout.active():
        return made(jax.random.key(seed), params)


def _validate_more_than_any_holds(shapes: Any, shardings: Any) -> None:
    """Raises UserError for a state of which a device's part is more than any device holds.

    What is too much for these devices alone, XLA says when it has tried.
    """
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    count = sum(math.prod(to.shard_shape(x.shape)) * x.dtype.itemsize for x, to in pairs)
    if count > MOST_BYTES:
        raise UserError(
            f"the model's state takes {count / 2**40:,.0f} TiB of each device, and none holds more "
            f"than {MOST_BYTES // 2**40}; use fewer layers, or smaller ones"
        )
