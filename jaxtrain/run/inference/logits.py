"""Logits, embeddings and regression outputs of a trained model, on the host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch, on_host
from jaxtrain.models.model import Model, pooling_of
from jaxtrain.nn.layers import pool
from jaxtrain.nn.transformer.language_model import hidden_states
from jaxtrain.run.generation.decoding import for_one_text
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.objectives.objective import TellsLogits
from jaxtrain.training.objectives.tokens import TokenObjective
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState


def logits(setup: Setup, model: Model, state: TrainState, inputs: Any) -> np.ndarray:
    """The logits of inputs, float32 [B, T, V] of tokens or [B, C] of images.

    Every device computes with all rows, split over `tensor` and `expert` alone: any number of rows
    is taken, and any length that the model's context has room for.

    Args:
      setup: the synchronous program.
      model: the model's settings.
      state: from `Step.eval_state`.
      inputs: integer tokens [B, T], each row one text; images [B, H, W, C]; or a `Batch`, whose
        documents do not see each other.

    Raises:
      UserError: the model cannot read them, or gives no logits.
    """
    objective = setup.objective
    if not isinstance(objective, TellsLogits):
        raise UserError(
            f"Trainer.logits: a model of objective {objective.name!r} gives none; Trainer.predict "
            "returns its outputs"
        )
    is_batch = isinstance(inputs, Batch)
    batch = on_host(inputs) if is_batch else objective.reading(np.asarray(inputs))
    setup = _of_any_rows(setup)
    found = list(objective.validate(batch, model, Loss(), setup.layout))
    if found:
        raise UserError("\n".join(f"Trainer.logits: {line}" for line in found))
    with setup.layout.active(), setup.precision.products():
        return np.array(_logits(setup, state, batch))


def embeddings(setup: Setup, model: Model, state: TrainState, batch: Batch) -> np.ndarray:
    """The vector of each text, float32 [B, D], computed as `logits` is.

    Args:
      setup: the synchronous program.
      model: the model's settings.
      state: from `Step.eval_state`.
      batch: one text in a row, and padding behind it.
    """
    setup = _of_any_rows(setup)
    with setup.layout.active(), setup.precision.products():
        return np.array(_embeddings(setup, model, state, batch))


def numbers(setup: Setup, state: TrainState, vectors_BD: np.ndarray) -> np.ndarray:
    """Return the regression outputs for vectors, float32 [B, K], computed like `logits`."""
    setup = _of_any_rows(setup)
    with setup.layout.active(), setup.precision.products():
        return np.array(_numbers(setup, state, vectors_BD))


def _of_any_rows(setup: Setup) -> Setup:
    """With all rows on every device, and the reference kernel: it takes any length, and
    documents."""
    execution = dataclasses.replace(setup.execution, kernel="reference")
    layout = for_one_text(setup.layout)
    return dataclasses.replace(setup, layout=layout, execution=execution)


@functools.partial(jax.jit, static_argnums=0)
def _logits(setup: Setup, state: TrainState, batch: Batch) -> jax.Array:
    assert isinstance(setup.objective, TellsLogits), "asked before"
    model = setup.model(state)
    found = setup.objective.logits(model, state.statistics, batch, setup.execution)
    # Whole on every device, so that each process can read them.
    return jax.sharding.reshard(found, P())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _embeddings(setup: Setup, model: Model, state: TrainState, batch: Batch) -> jax.Array:
    objective, ids_BT = setup.objective, batch.segment_ids
    assert isinstance(objective, TokenObjective), "of hidden states"
    pooling = pooling_of(model)
    assert pooling is not None, "asked before"
    assert ids_BT is not None, "texts have padding"
    assert batch.positions is not None, "and places"
    h_BTD, _, _ = hidden_states(
        setup.model(state), batch.inputs, batch.positions, objective.mask(batch),
        setup.execution,
    )  # fmt: skip
    found_BD = pool(h_BTD, ids_BT, pooling[0], normalized=pooling[1])
    return jax.sharding.reshard(found_BD, P())


@functools.partial(jax.jit, static_argnums=0)
def _numbers(setup: Setup, state: TrainState, vectors_BD: jax.Array) -> jax.Array:
    model: Any = setup.model(state)
    found_BK, _ = model(vectors_BD, state.statistics, setup.execution, train=False)
    return jax.sharding.reshard(found_BK.astype(jnp.float32), P())
