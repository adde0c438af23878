"""Calibration: activations that a model's weights read on sample text.

Letters: B rows, T length, L layers, N tokens that are kept, I what a product sums over.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.matmul.input_capture import Watched
from jaxtrain.nn.remat import POLICIES
from jaxtrain.nn.transformer.language_model import hidden_states
from jaxtrain.parallel.sharding import by_name, logical_axes, shard
from jaxtrain.run.generation.decoding import ROWS, for_one_text
from jaxtrain.training.finetune.few_bits import sides_of
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

ROWS_MOST, LENGTH_MOST = 8, 512  # of the text that is read
EVERY = 4  # of how many of its tokens one is kept


def rows_of(tokens: list[int], context_length: int) -> np.ndarray:
    """Rows int32 [B, T] of a text, evenly taken over it; at least one, of all of a short one."""
    length = min(len(tokens), LENGTH_MOST, context_length)
    rows = min(ROWS_MOST, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, rows).astype(int)
    return np.stack([tokens[start : start + length] for start in starts]).astype(np.int32)


def read_by(
    setup: Setup, state: TrainState, tokens_BT: np.ndarray, names: list[str]
) -> dict[str, np.ndarray]:
    """What these weights read, float32 [L, N, I], by their names below `layers/`.

    Args:
      setup: the synchronous program, of a model that reads tokens.
      state: its state.
      tokens_BT: the text, each row one of its own.
      names: of weights, such as `query`.
    """
    execution = dataclasses.replace(setup.execution, kernel="reference", remat=POLICIES["full"])
    precision = dataclasses.replace(setup.precision, compute="float32")
    setup = dataclasses.replace(
        setup, layout=for_one_text(setup.layout), execution=execution, precision=precision
    )
    with setup.layout.active(), setup.precision.products():
        found = _read_by(setup, state, tokens_BT, tuple(names))
        return {name: np.asarray(x) for name, x in found.items()}


@functools.partial(jax.jit, static_argnames=("setup", "names"))
def _read_by(
    setup: Setup, state: TrainState, tokens_BT: jax.Array, names: tuple[str, ...]
) -> dict[str, jax.Array]:
    graphdef, params, rest = nnx.split(setup.model(state), nnx.Param, ...)
    variables = by_name(params)
    kept = tokens_BT.shape[0] * -(-tokens_BT.shape[1] // EVERY)

    def probe(name: str) -> jax.Array:
        weight = variables[f"layers/{name}"]
        shape = weight.get_value().shape
        summed = math.prod(shape[i] for i in sides_of(logical_axes(weight))[0])
        return jnp.zeros((shape[0], kept, summed))

    def total(probes: dict[str, jax.Array]) -> jax.Array:
        watched: dict[Any, Any] = dict(nnx.to_flat_state(params))
        for name, one in probes.items():
            weight = watched["layers", name]
            watched["layers", name] = weight.replace(Watched(weight.get_value(), one, EVERY))
        model = nnx.merge(graphdef, nnx.from_flat_state(watched), rest)
        places_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        rows = shard(tokens_BT, ROWS), shard(places_BT, ROWS)
        return hidden_states(model, *rows, Mask(), setup.execution)[0].sum()

    return jax.grad(total)({name: probe(name) for name in names})
