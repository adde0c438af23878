"""Base of objectives with one output per example.

Letters: B batch, C classes or regression outputs.
"""

import abc
from collections.abc import Iterator
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Inputs, Model, reads_images, vector_model
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.predictor import Predictor
from jaxtrain.parallel.sharding import Layout, shard
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.objective import Objective
from jaxtrain.training.objectives.own_batch import validate_form


class AnswerObjective(Objective[Predictor]):
    """Base of objectives over a `Predictor`'s output for each image or vector."""

    inputs: ClassVar[tuple[Inputs, ...]] = ("images", "vectors")
    draws: ClassVar[bool] = True

    @abc.abstractmethod
    def of_answers(self, answers_BC: Any, batch: Batch, settings: Loss, *, train: bool) -> Sums:
        """Return the sums of the model's outputs; finite, and 0 where nothing counts."""

    @final
    def counts(self, batch: Batch) -> Sums:
        """Return `weight`, the number of examples that count."""
        return {"weight": batch.loss_mask.sum()}

    @final
    def over(self, name: str) -> str:
        """Return `weight`, the denominator of all sums."""
        del name
        return "weight"

    @final
    def sums(
        self,
        model: Predictor,
        statistics: Any,
        batch: Batch,
        execution: Execution,
        settings: Loss,
        *,
        train: bool,
    ) -> tuple[Sums, Any]:
        """Return the sums over a batch and the running statistics, as in `Objective`."""
        answers_BC, statistics = model(countable(batch), statistics, execution, train=train)
        return self.of_predicted(answers_BC, batch, settings, train=train), statistics

    @final
    def of_predicted(self, answers_BC: Any, batch: Batch, settings: Loss, *, train: bool) -> Sums:
        """Return the sums of a model's outputs for a `countable` batch, like `sums`."""
        mask_B = _examples(batch)

        def mask_rows(x_BC: jax.Array) -> jax.Array:
            # Replicated: few values, of which the losses look one up.
            return jnp.where(mask_B[:, None] != 0, shard(x_BC, ("batch", "classes")), 0)

        answers_BC = jax.tree.map(mask_rows, answers_BC)
        return self.of_answers(answers_BC, batch, settings, train=train)

    def validate(self, batch: Batch, model: Model, settings: Loss, layout: Layout) -> Iterator[str]:
        """Yield errors unless inputs are images [B, H, W, C] or vectors [B, D] of the model's
        sizes.
        """
        del settings, layout
        shape = (
            ("B", "H", "W", model.channels)
            if reads_images(model)
            else ("B", vector_model(model).features)
        )
        found = list(validate_form(batch, "inputs", "float32", shape))
        if not found:
            rows = batch.inputs.shape[0]
            found += self.validate_answers(batch, model, rows)
            found += validate_form(batch, "loss_mask", "float32", self.count_shape(batch, rows))
        found += [
            f"Batch.{name} is not None; {model.inputs} have no documents"
            for name in ("segment_ids", "positions")
            if getattr(batch, name) is not None
        ]
        if not found:
            found += self.validate_numbers(batch, model)
        yield from found

    def count_shape(self, batch: Batch, rows: int) -> tuple[int, ...]:
        """Return the shape of the loss mask: one value per example."""
        del batch
        return (rows,)

    @abc.abstractmethod
    def validate_answers(self, batch: Batch, model: Model, rows: int) -> Iterator[str]:
        """Yield errors for targets of an invalid dtype or shape."""

    @abc.abstractmethod
    def validate_numbers(self, batch: Batch, model: Model) -> Iterator[str]:
        """Yield errors for targets out of bounds, in a batch with valid shapes."""


def countable(batch: Batch) -> jax.Array:
    """Return a batch's inputs for the model, with non-finite values of zero-weight examples set to
    0.

    Batch norms include zero-weight examples, so they are kept, except non-finite values:
    0 x NaN is NaN in every gradient.
    """
    counts = (_examples(batch) != 0).reshape(-1, *(1,) * (batch.inputs.ndim - 1))
    return jnp.where(counts | jnp.isfinite(batch.inputs), batch.inputs, 0)


def _examples(batch: Batch) -> jax.Array:
    """Return the weight of each example, [B]; with several labels, nonzero if any of them
    counts.
    """
    return batch.loss_mask if batch.loss_mask.ndim == 1 else batch.loss_mask.max(-1)
