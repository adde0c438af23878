"""Classification of images and vectors. Letters: B batch, C classes."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.models.model import Model, reads_images, vector_model
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.predictor import Predictor
from jaxtrain.training.objectives.answers import AnswerObjective
from jaxtrain.training.objectives.confusion import evaluation_sums
from jaxtrain.training.objectives.losses import Loss, Sums, losses
from jaxtrain.training.objectives.objective import TellsLogits
from jaxtrain.training.objectives.own_batch import validate_form, validate_values
from jaxtrain.training.objectives.yardstick import Yardstick, uniform_guess


class Classification(AnswerObjective, TellsLogits[Predictor]):
    """Cross entropy of an example's label, and accuracy."""

    name: ClassVar[str] = "classification"

    def dataset(self, dataset: Dataset, model: Model) -> Dataset:
        """The same.

        Raises:
          UserError: the data have more classes than the model.
        """
        (name, classes), found = classes_of(model), int(dataset.facts.get("classes", 0))
        if found > classes:
            raise UserError(
                f"{type(model).__name__}.{name}={classes} is smaller than the data's {found} "
                f"classes; use at least {found}"
            )
        return dataset

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Nats an example, the accuracy, and a uniform guess."""
        del facts
        _, classes = classes_of(model)
        return Yardstick("nats an example", ("accuracy",), uniform_guess(classes))

    def of_answers(
        self, answers_BC: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """`loss` and `accuracy`, the examples whose label has the highest logit; of held-out ones
        what `confusion` counts too."""
        told_B = answers_BC.argmax(-1)
        right = [(told_B == label_B) * mask_B for label_B, mask_B in labels(batch)]
        sums = {
            "loss": label_loss(answers_BC, batch, settings, train=train),
            "accuracy": sum(right, jnp.zeros(())).sum(),
        }
        if not train:
            of_labels = [evaluation_sums(answers_BC, *one) for one in labels(batch)]
            sums |= jax.tree.map(lambda *x: sum(x[1:], x[0]), *of_labels)
        return sums

    def validate_targets(self, targets: Any, model: Model) -> Iterator[str]:
        """Numbers, which have no class."""
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            name = type(model).__name__
            yield (
                f"{name}.objective={self.name!r} predicts labels, but the data's targets are "
                f"numbers; use data with labels, or an objective of numbers"
            )

    def reading(self, inputs: Any) -> Batch:
        """Images or vectors, none of them with a label."""
        rows = inputs.shape[:1]
        return Batch(inputs, np.zeros(rows, np.int32), np.zeros(rows, np.float32))

    def logits(
        self, model: Predictor, statistics: Any, batch: Batch, execution: Execution
    ) -> jax.Array:
        """Of the classes: float32 [B, C]."""
        answers_BC, _ = model(batch.inputs, statistics, execution, train=False)
        return answers_BC.astype(jnp.float32)

    def validate_answers(self, batch: Batch, model: Model, rows: int) -> Iterator[str]:
        """Labels [B], or several of each example [B, labels]."""
        several = np.ndim(batch.targets) == 2
        yield from validate_form(
            batch, "targets", "int32", (rows, "labels") if several else (rows,)
        )

    def count_shape(self, batch: Batch, rows: int) -> tuple[int, ...]:
        """One number a label: by how much it counts."""
        return np.shape(batch.targets)

    def validate_numbers(self, batch: Batch, model: Model) -> Iterator[str]:
        """Labels of the model's classes."""
        name, classes = classes_of(model)
        why = f" ({type(model).__name__}.{name}={classes})"
        yield from validate_values(batch, "loss_mask", 0, None)
        yield from validate_values(batch, "targets", 0, classes - 1, why=why, counted=True)


def labels(batch: Batch) -> list[tuple[jax.Array, jax.Array]]:
    """Each label of the examples and how much it counts, [B]; of images that are mixed several."""
    if batch.targets.ndim == 1:
        return [(batch.targets, batch.loss_mask)]
    return [
        (batch.targets[:, place], batch.loss_mask[:, place])
        for place in range(batch.targets.shape[1])
    ]


def label_loss(answers_BC: jax.Array, batch: Batch, settings: Loss, *, train: bool) -> jax.Array:
    """The sum of the cross entropies of all labels, each times how much it counts.

    Of labels that count 1 together it is the cross entropy of their mixture: -sum_c q_c log p_c.
    """
    of_labels = [
        losses(answers_BC, label_B, mask_B, settings, train=train).sum()
        for label_B, mask_B in labels(batch)
    ]
    return sum(of_labels, jnp.zeros(()))


def classes_of(model: Model) -> tuple[str, int]:
    """Return the name of a model's number of classes, and the number."""
    if reads_images(model):
        return "num_classes", model.num_classes
    return "outputs", vector_model(model).outputs
