"""Base of objectives with one output per example.

Letters: B batch, C classes or numbers.
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
    """An objective over what a `Predictor` makes of each image or vector."""

    inputs: ClassVar[tuple[Inputs, ...]] = ("images", "vectors")
    draws: ClassVar[bool] = True

    @abc.abstractmethod
    def of_answers(self, answers_BC: Any, batch: Batch, settings: Loss, *, train: bool) -> Sums:
        """The sums of what the model gave; it is finite, and 0 where nothing counts."""

    @final
    def counts(self, batch: Batch) -> Sums:
        """`weight`: the examples that count."""
        return {"weight": batch.loss_mask.sum()}

    @final
    def over(self, name: str) -> str:
        """`weight`, for all sums."""
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
        """The sums of what a model gave of a batch that is `countable`; as of `sums`."""
        mask_B = _examples(batch)

        def mask_rows(x_BC: jax.Array) -> jax.Array:
            # Whole: few numbers, of which the losses look one up.
            return jnp.where(mask_B[:, None] != 0, shard(x_BC, ("batch", "classes")), 0)

        answers_BC = jax.tree.map(mask_rows, answers_BC)
        return self.of_answers(answers_BC, batch, settings, train=train)

    def validate(self, batch: Batch, model: Model, settings: Loss, layout: Layout) -> Iterator[str]:
        """Images [B, H, W, C] with the model's channels, or vectors [B, D] of its features."""
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
        """The shape of the loss mask: one number an example."""
        del batch
        return (rows,)

    @abc.abstractmethod
    def validate_answers(self, batch: Batch, model: Model, rows: int) -> Iterator[str]:
        """Targets of another form."""

    @abc.abstractmethod
    def validate_numbers(self, batch: Batch, model: Model) -> Iterator[str]:
        """Targets out of bounds, in a batch of the right form."""


def countable(batch: Batch) -> jax.Array:
    """A batch's inputs, as models are given them.

    A batch norm sees the examples that do not count too, so they stay, but for what is no number:
    0 x NaN is NaN in every gradient.
    """
    counts = (_examples(batch) != 0).reshape(-1, *(1,) * (batch.inputs.ndim - 1))
    return jnp.where(counts | jnp.isfinite(batch.inputs), batch.inputs, 0)


def _examples(batch: Batch) -> jax.Array:
    """By how much each example counts, [B]; of several labels it does where one of them does."""
    return batch.loss_mask if batch.loss_mask.ndim == 1 else batch.loss_mask.max(-1)
