"""Reconstruction loss of autoencoders."""

from collections.abc import Iterator
from typing import Any, ClassVar

import jax

from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Model
from jaxtrain.training.objectives.regression import Regression


class Reconstruction(Regression):
    """As `Regression`, of the numbers that went in; the data's targets are not read."""

    name: ClassVar[str] = "reconstruction"

    def labels_of(self, batch: Batch) -> jax.Array:
        """The inputs."""
        return batch.inputs

    def validate_targets(self, targets: Any, model: Model) -> Iterator[str]:
        """Nothing."""
        del targets, model
        yield from ()

    def validate_answers(self, batch: Batch, model: Model, rows: int) -> Iterator[str]:
        """Nothing."""
        del batch, model, rows
        yield from ()
