"""Classification with auxiliary heads (GoogLeNet).

Source: Szegedy et al. 2014 (arXiv 1409.4842), section 5: heads on layers in the middle of a deep
network bring gradients there, their losses weighted by 0.3.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.predictor import Predictor
from jaxtrain.training.objectives.classification import Classification, label_loss
from jaxtrain.training.objectives.losses import Loss, Sums

WEIGHT = 0.3


class AuxiliaryClassification(Classification):
    """As `Classification`, of a model whose answers are a tuple: its own, then other heads'."""

    name: ClassVar[str] = "auxiliary_classification"
    minimized: ClassVar[tuple[str, ...]] = ("loss", "auxiliary_loss")

    def of_answers(self, answers_BC: Any, batch: Batch, settings: Loss, *, train: bool) -> Sums:
        """`loss` and `accuracy` of the first, and of the others the weighted `auxiliary_loss`."""
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
        """The first head's logits, float32 [B, C]."""
        (first_BC, *_), _ = model(batch.inputs, statistics, execution, train=False)
        return first_BC.astype(jnp.float32)
