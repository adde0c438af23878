"""A fresh state, made in place: no device ever holds more than its shards."""

import contextlib
from typing import Any

import jax
from flax import nnx


def created(program: Any, seed: int, params: nnx.State | None) -> Any:
    """What is in memory of a fresh `TrainState`.

    Args:
      program: a `Program`, or what is put around one.
      seed: of what is drawn.
      params: the parameters to start from, as of `Program.init`, which are taken away.
    """

    def init(key: jax.Array, params: nnx.State | None) -> Any:
        return program.plain.in_memory(program.init(key, params))

    out = program.state_shardings(program.plain.in_memory(program.shapes()))
    made = jax.jit(init, out_shardings=out, donate_argnums=1)
    # Traced without an ambient mesh: XLA then spreads the drawing of random numbers itself.
    with contextlib.nullcontext() if params is None else program.layout.active():
        return made(jax.random.key(seed), params)
