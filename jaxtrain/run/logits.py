"""What a trained model says of inputs of one's own: logits on the host."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Model
from jaxtrain.run.generation.decoding import for_one_text
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.objectives.objective import TellsLogits
from jaxtrain.training.step import Program, TrainState


def logits(program: Program, model: Model, state: TrainState, inputs: Any) -> np.ndarray:
    """The logits of inputs, float32 [B, T, V] of tokens or [B, C] of images.

    Every device computes with all rows, split over `tensor` and `expert` alone: any number of rows
    is taken, and any length that the model's context has room for.

    Args:
      program: the synchronous program.
      model: the model's settings.
      state: from `consensus`.
      inputs: integer tokens [B, T], each row one text; images [B, H, W, C]; or a `Batch`, whose
        documents do not see each other.

    Raises:
      UserError: the model cannot read them, or gives no logits.
    """
    objective, layout = program.objective, for_one_text(program.layout)
    if not isinstance(objective, TellsLogits):
        raise UserError(f"Trainer.logits: a model of objective {objective.name!r} gives none")
    batch = inputs if isinstance(inputs, Batch) else objective.reading(np.asarray(inputs))
    found = list(objective.refuse(batch, model, Loss(), layout))
    if found:
        raise UserError("\n".join(f"Trainer.logits: {line}" for line in found))
    # The reference kernel takes any length, and documents.
    execution = dataclasses.replace(program.execution, kernel="reference")
    program = dataclasses.replace(program, layout=layout, execution=execution)
    with layout.active(), program.precision.products():
        return np.array(_logits(program, state, batch))


@functools.partial(jax.jit, static_argnums=0)
def _logits(program: Program, state: TrainState, batch: Batch) -> jax.Array:
    assert isinstance(program.objective, TellsLogits), "asked before"
    model = program.model(state)
    found = program.objective.logits(model, state.statistics, batch, program.execution)
    # Whole on every device, so that each process can read them.
    return jax.sharding.reshard(found, P())
