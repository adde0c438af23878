"""Regression by least squares, and reconstruction by autoencoders. Letters: B batch, K outputs."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Inputs, Model, vector_model
from jaxtrain.training.objectives.classification import AnswerObjective
from jaxtrain.training.objectives.losses import Loss, Sums, validate_unread
from jaxtrain.training.objectives.objective import Yardstick, validate_form, validate_values


class Regression(AnswerObjective):
    """Regression: mean squared error over an example's outputs, and the mean absolute error."""

    name: ClassVar[str] = "regression"
    inputs: ClassVar[tuple[Inputs, ...]] = ("vectors",)

    def labels_of(self, batch: Batch) -> jax.Array:
        """Return the regression targets [B, K]."""
        return batch.targets

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Return squared errors, on a log axis, and absolute ones."""
        del model, facts
        return Yardstick("squared error", ("absolute_error",), scale="log")

    def of_answers(
        self, answers_BC: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Return `loss`, the squared errors, and `absolute_error`; both in float32."""
        del settings, train
        counts_B1 = batch.loss_mask[:, None] != 0
        off_BK = jnp.where(counts_B1, answers_BC.astype(jnp.float32) - self.labels_of(batch), 0)
        return {
            "loss": (jnp.square(off_BK).mean(-1) * batch.loss_mask).sum(),
            "absolute_error": (jnp.abs(off_BK).mean(-1) * batch.loss_mask).sum(),
        }

    def validate_loss(self, settings: Loss) -> Iterator[str]:
        """Yield errors for cross-entropy settings; `chunk_size` is ignored, as there are no
        positions.
        """
        unchunked = dataclasses.replace(settings, chunk_size=None)
        yield from validate_unread(unchunked, f"the objective {self.name!r}")

    def validate_targets(self, targets: Any, model: Model) -> Iterator[str]:
        """Yield errors for labels, or for another number of regression outputs."""
        name, outputs = type(model).__name__, vector_model(model).outputs
        if jnp.issubdtype(targets.dtype, jnp.integer):
            yield (
                f"{name}.objective={self.name!r} is a regression, but the data's targets are "
                "labels; use data with real-valued targets, or a classification objective"
            )
        elif targets.shape[-1] != outputs:
            yield (
                f"{name} predicts {outputs} values, but the data have {targets.shape[-1]} "
                f"targets; set the last of {name}.widths to {targets.shape[-1]}"
            )

    def validate_answers(self, batch: Batch, model: Model, rows: int) -> Iterator[str]:
        """Yield why targets are not [B, K] with the model's number of outputs."""
        yield from validate_form(batch, "targets", "float32", (rows, vector_model(model).outputs))

    def validate_numbers(self, batch: Batch, model: Model) -> Iterator[str]:
        """Yield errors for masks that are negative or not finite."""
        del model
        yield from validate_values(batch, "loss_mask", 0, None)


class Reconstruction(Regression):
    """Regression of the inputs themselves (autoencoders); the data's targets are not read."""

    name: ClassVar[str] = "reconstruction"

    def labels_of(self, batch: Batch) -> jax.Array:
        """Return the inputs as targets."""
        return batch.inputs

    def validate_targets(self, targets: Any, model: Model) -> Iterator[str]:
        """Accept any targets, as they are not read."""
        del targets, model
        yield from ()

    def validate_answers(self, batch: Batch, model: Model, rows: int) -> Iterator[str]:
        """Accept any targets, as they are not read."""
        del batch, model, rows
        yield from ()
