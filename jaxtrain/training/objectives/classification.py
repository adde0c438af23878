"""The class of each image: classifiers. Letters: B batch, C classes."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset
from jaxtrain.models.model import Inputs, Model, reads_images
from jaxtrain.nn.classifier import Classifier
from jaxtrain.nn.execution import Execution
from jaxtrain.parallel.sharding import Layout
from jaxtrain.training.objectives.losses import Loss, Sums, losses
from jaxtrain.training.objectives.objective import Objective
from jaxtrain.training.objectives.own_batch import refuse_form, refuse_values


class Classification(Objective[Classifier]):
    """Cross entropy of an image's label, and the part of labels that are told right."""

    name: ClassVar[str] = "classification"
    inputs: ClassVar[Inputs] = "images"

    def refuse_model(self, model: Model) -> Iterator[str]:
        """One that does not read images."""
        yield from self.refuse_inputs(model)

    def dataset(self, dataset: Dataset, model: Model) -> Dataset:
        """The same."""
        del model
        return dataset

    def counts(self, batch: Batch) -> Sums:
        """`weight`: the images that count."""
        return {"weight": batch.loss_mask.sum()}

    def over(self, name: str) -> str:
        """`weight`, for all sums."""
        del name
        return "weight"

    def sums(
        self,
        model: Classifier,
        statistics: Any,
        batch: Batch,
        execution: Execution,
        settings: Loss,
        *,
        train: bool,
    ) -> tuple[Sums, Any]:
        """`loss` and `accuracy`, the images whose label has the highest logit."""
        del execution  # layers of a CNN differ in shape: there is no loop over them
        mask_B = batch.loss_mask
        # A batch norm sees the images that do not count too, so they stay, but for what is no
        # number: 0 x NaN is NaN in every gradient.
        images_BHWC = batch.inputs
        kept = (mask_B[:, None, None, None] != 0) | jnp.isfinite(images_BHWC)
        images_BHWC = jnp.where(kept, images_BHWC, 0)
        logits_BC, statistics = model(images_BHWC, statistics, train=train)
        logits_BC = jnp.where(mask_B[:, None] != 0, logits_BC, 0)
        right_B = logits_BC.argmax(-1) == batch.targets
        sums = {
            "loss": losses(logits_BC, batch.targets, mask_B, settings, train=train).sum(),
            "accuracy": (right_B * mask_B).sum(),
        }
        return sums, statistics

    def refuse(self, batch: Batch, model: Model, settings: Loss, layout: Layout) -> Iterator[str]:
        """Images [B, H, W, C] with the model's channels, and labels of its classes."""
        del settings, layout
        assert reads_images(model), "a model that is trained to something else"
        found = list(refuse_form(batch, "inputs", "float32", ("B", "H", "W", model.channels)))
        if not found:
            rows = batch.inputs.shape[0]
            found += refuse_form(batch, "targets", "int32", (rows,))
            found += refuse_form(batch, "loss_mask", "float32", (rows,))
        found += [
            f"Batch.{name} is not None; images have no documents"
            for name in ("segment_ids", "positions")
            if getattr(batch, name) is not None
        ]
        if not found:
            why = f" ({type(model).__name__}.num_classes={model.num_classes})"
            most = model.num_classes - 1
            found += refuse_values(batch, "loss_mask", 0, None)
            found += refuse_values(batch, "targets", 0, most, why=why, counted=True)
        yield from found

    def evaluation(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`eval_loss` and `eval_accuracy`."""
        weight = sums["weight"]
        return {"eval_loss": sums["loss"] / weight, "eval_accuracy": sums["accuracy"] / weight}
