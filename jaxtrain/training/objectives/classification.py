"""Classification of images and vectors, with auxiliary heads (GoogLeNet) and its metrics.

Metrics are sums over examples, counted on their devices: a mesh adds them exactly, and a padded
last batch adds nothing. Auxiliary heads: Szegedy et al. 2014 (arXiv 1409.4842), section 5: heads on
layers in the middle of a deep network bring gradients there, their losses weighted by 0.3. Letters:
B batch, C classes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.models.model import Model, reads_images, vector_model
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.predictor import Predictor
from jaxtrain.training.objectives.answers import AnswerObjective
from jaxtrain.training.objectives.losses import CONFUSION, Loss, Sums, losses
from jaxtrain.training.objectives.objective import LogitsObjective, Yardstick, uniform_guess
from jaxtrain.training.objectives.own_batch import validate_form, validate_values

MOST_COUNTED = 1024  # classes: a matrix of 4 MB; not counted for more
MOST_REPORTED = 100  # classes: more are left out of the metrics; some 30 kB per line
TOP = 5


def evaluation_sums(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> Sums:
    """Return `top5_accuracy`, if there are more than 5 classes, and `confusion`.

    Args:
      logits: [..., C].
      targets: int32 [...]; anything where the mask is 0.
      mask: float32 [...], a loss mask.
    """
    classes, found = logits.shape[-1], Sums()
    if classes > TOP:
        within = _before(logits, jnp.where(mask != 0, targets, 0)) < TOP
        found[f"top{TOP}_accuracy"] = (within * mask).sum()
    if classes <= MOST_COUNTED:
        found[CONFUSION] = confusion(logits.argmax(-1), targets, mask, classes)
    return found


def _before(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the rank of the target class: the number of classes before it, int32 [...].

    Of equal logits the first class comes first, as in argmax.
    """
    class_ids = jnp.arange(logits.shape[-1])
    is_target = targets[..., None] == class_ids
    own = jnp.where(is_target, logits, 0).sum(-1, keepdims=True)
    before = (logits > own) | ((logits == own) & (class_ids < targets[..., None]))
    return before.sum(-1)


def confusion(predicted: jax.Array, targets: jax.Array, mask: jax.Array, classes: int) -> jax.Array:
    """Count how often each label (row) was predicted as each class (column): int32 [C, C], on every
    device.

    Labels are counted with their weight.

    Args:
      predicted: int32 [...], the predicted class.
      targets: int32 [...], the labels.
      mask: float32 [...]; 0: not counted.
      classes: C.
    """
    class_ids = jnp.arange(classes)
    label = (targets[..., None] == class_ids) & (mask != 0)[..., None]
    is_predicted = predicted[..., None] == class_ids
    letters = "bt"[: predicted.ndim]
    # Zeros and ones: exact in float32, and on a GPU or TPU in the passes of its float32 matmuls,
    # up to 2^24 of a kind in one batch.
    counts = jnp.einsum(
        f"{letters}c,{letters}d->cd",
        label.astype(jnp.float32),
        is_predicted.astype(jnp.float32),
        out_sharding=None if jax.sharding.get_abstract_mesh().empty else P(None, None),
    )
    return counts.astype(jnp.int32)


def metrics_of(counts: np.ndarray) -> dict[str, Any]:
    """Return `macro_f1` and, with few classes, the matrix itself, `confusion`.

    Args:
      counts: [C, C], as in `confusion`, of all held-out examples.
    """
    found: dict[str, Any] = {"macro_f1": macro_f1(counts)}
    if len(counts) <= MOST_REPORTED:
        found[CONFUSION] = counts.tolist()
    return found


def macro_f1(counts: np.ndarray) -> float:
    """Return the mean over classes of F1, the harmonic mean of precision and recall.

    For a class it is 2 correct / (labels + predictions). A class without labels and
    predictions is excluded.
    """
    either = counts.sum(0) + counts.sum(1)
    return float(np.mean(2 * np.diagonal(counts)[either > 0] / either[either > 0]))


class Classification(AnswerObjective, LogitsObjective[Predictor]):
    """Classification: cross entropy of an example's label, and accuracy."""

    name: ClassVar[str] = "classification"

    def dataset(self, dataset: Dataset, model: Model) -> Dataset:
        """Return the dataset unchanged.

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
        """Return nats per example, the accuracy, and the baseline of a uniform guess."""
        del facts
        _, classes = classes_of(model)
        return Yardstick("nats an example", ("accuracy",), uniform_guess(classes))

    def of_answers(
        self, answers_BC: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Return `loss` and `accuracy` (top-1), and for held-out examples the sums of
        `evaluation_sums`.
        """
        predicted_B = answers_BC.argmax(-1)
        right = [(predicted_B == label_B) * mask_B for label_B, mask_B in labels(batch)]
        sums = {
            "loss": label_loss(answers_BC, batch, settings, train=train),
            "accuracy": sum(right, jnp.zeros(())).sum(),
        }
        if not train:
            of_labels = [evaluation_sums(answers_BC, *one) for one in labels(batch)]
            sums |= jax.tree.map(lambda *x: sum(x[1:], x[0]), *of_labels)
        return sums

    def validate_targets(self, targets: Any, model: Model) -> Iterator[str]:
        """Yield errors for regression targets, which have no class."""
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            name = type(model).__name__
            yield (
                f"{name}.objective={self.name!r} predicts labels, but the data's targets are "
                "real values; use data with labels, or a regression objective"
            )

    def reading(self, inputs: Any) -> Batch:
        """Return a batch of images or vectors without labels."""
        rows = inputs.shape[:1]
        return Batch(inputs, np.zeros(rows, np.int32), np.zeros(rows, np.float32))

    def logits(
        self, model: Predictor, statistics: Any, batch: Batch, execution: Execution
    ) -> jax.Array:
        """Return the class logits, float32 [B, C]."""
        answers_BC, _ = model(batch.inputs, statistics, execution, train=False)
        return answers_BC.astype(jnp.float32)

    def validate_answers(self, batch: Batch, model: Model, rows: int) -> Iterator[str]:
        """Yield errors unless labels are [B], or [B, labels] for several per example."""
        several = np.ndim(batch.targets) == 2
        yield from validate_form(
            batch, "targets", "int32", (rows, "labels") if several else (rows,)
        )

    def count_shape(self, batch: Batch, rows: int) -> tuple[int, ...]:
        """Return the shape of the weights in the loss: one element per label."""
        return np.shape(batch.targets)

    def validate_numbers(self, batch: Batch, model: Model) -> Iterator[str]:
        """Yield errors for labels that are not classes of the model."""
        name, classes = classes_of(model)
        why = f" ({type(model).__name__}.{name}={classes})"
        yield from validate_values(batch, "loss_mask", 0, None)
        yield from validate_values(batch, "targets", 0, classes - 1, why=why, counted=True)


def labels(batch: Batch) -> list[tuple[jax.Array, jax.Array]]:
    """Return pairs of labels and weights, [B] each: one, or several for mixed images."""
    if batch.targets.ndim == 1:
        return [(batch.targets, batch.loss_mask)]
    return [
        (batch.targets[:, index], batch.loss_mask[:, index])
        for index in range(batch.targets.shape[1])
    ]


def label_loss(answers_BC: jax.Array, batch: Batch, settings: Loss, *, train: bool) -> jax.Array:
    """Return the sum of the cross entropies of all labels, weighted.

    For labels whose weights sum to 1 it is the cross entropy of their mixture: -sum_c q_c log p_c.
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


WEIGHT = 0.3


class AuxiliaryClassification(Classification):
    """Classification with auxiliary heads: the model returns a tuple, its own logits first."""

    name: ClassVar[str] = "auxiliary_classification"
    minimized: ClassVar[tuple[str, ...]] = ("loss", "auxiliary_loss")

    def of_answers(self, answers_BC: Any, batch: Batch, settings: Loss, *, train: bool) -> Sums:
        """Return `loss` and `accuracy` of the first head, and the weighted `auxiliary_loss` of the
        others.
        """
        first, *others = answers_BC
        sums = super().of_answers(first, batch, settings, train=train)
        if others:
            of_others = [
                label_loss(logits_BC, batch, settings, train=train) for logits_BC in others
            ]
            sums["auxiliary_loss"] = WEIGHT * sum(of_others, jnp.zeros(()))
        return sums

    def logits(
        self, model: Predictor, statistics: Any, batch: Batch, execution: Execution
    ) -> jax.Array:
        """Return the first head's logits, float32 [B, C]."""
        (first_BC, *_), _ = model(batch.inputs, statistics, execution, train=False)
        return first_BC.astype(jnp.float32)
