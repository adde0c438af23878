"""Classification of images, vectors, texts and tokens; auxiliary heads (GoogLeNet); its metrics.

Metrics are sums over examples, counted on their devices: a mesh adds them exactly, and a padded
last batch adds nothing. Auxiliary heads: Szegedy et al. 2014 (arXiv 1409.4842), section 5: heads on
layers in the middle of a deep network bring gradients there, their losses weighted by 0.3. Letters:
B batch, C classes.
"""

import abc
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.models.model import (
    Inputs,
    Model,
    TokenModel,
    reads_images,
    token_classes_of,
    vector_model,
)
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.predictor import Predictor
from jaxtrain.nn.transformer.language_model import Transformer, logits
from jaxtrain.parallel.sharding import Layout, shard
from jaxtrain.training.objectives.losses import CONFUSION, Loss, Sums, losses, validate_unread
from jaxtrain.training.objectives.objective import (
    LogitsObjective,
    Objective,
    Yardstick,
    uniform_guess,
    validate_form,
    validate_values,
)
from jaxtrain.training.objectives.tokens import TokenObjective

# -- base of objectives with one output per example ------------------------------------------------
# Letters: B batch, C classes or regression outputs.


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


# -- images and vectors ----------------------------------------------------------------------------

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


# -- texts and tokens ------------------------------------------------------------------------------
# Letters: B batch, T length, D embed, C classes.


class TokenClassification(TokenObjective):
    """Text and token classification: cross entropy of labels, and accuracy.

    A text's class is the label of one token, at whose position alone the loss mask is 1; where each
    token has a class, as in tagging, all of them count.
    """

    name: ClassVar[str] = "token_classification"
    causal: ClassVar[bool] = False
    own: ClassVar[tuple[str, ...]] = ("loss", "accuracy", f"top{TOP}_accuracy", CONFUSION)
    labels: ClassVar[bool] = True

    def validate_loss(self, settings: Loss) -> Iterator[str]:
        """Yield errors for chunking, which the few logits do not need."""
        chunks = Loss(chunk_size=settings.chunk_size)
        yield from validate_unread(chunks, f"the objective {self.name!r}")

    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Return `loss` and `accuracy` (top-1), and for held-out rows the sums of
        `evaluation_sums`.
        """
        mask_BT = batch.loss_mask
        with jax.named_scope("loss"):
            # As in `tokens.token_loss`.
            h_BTD = jnp.where(mask_BT[..., None] != 0, h_BTD, 0)
            logits_BTC = logits(model, h_BTD)
            losses_BT = losses(
                logits_BTC, batch.targets, mask_BT, settings, train=train, over="classes"
            )
            right_BT = logits_BTC.argmax(-1) == batch.targets
        sums = {"loss": losses_BT.sum(), "accuracy": (right_BT * mask_BT).sum()}
        return sums if train else sums | evaluation_sums(logits_BTC, batch.targets, mask_BT)

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Return nats per label, the accuracy, and the baseline of a uniform guess."""
        del facts
        classes = token_classes_of(model)
        assert classes is not None, "rejected before"
        return Yardstick("nats a label", ("accuracy",), uniform_guess(classes))

    def class_count(self, model: TokenModel) -> tuple[str, int]:
        """Return the setting that holds the number of classes, and that number."""
        classes = token_classes_of(model)
        assert classes is not None, "rejected before"
        return "num_classes", classes

    def more_of_evaluation(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return no further metrics."""
        del means
        return {}
