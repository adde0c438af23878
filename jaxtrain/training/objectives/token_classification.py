"""Text and token classification.

Letters: B batch, T length, D embed, C classes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Model, TokenModel, token_classes_of
from jaxtrain.nn.transformer.language_model import Transformer, logits
from jaxtrain.training.objectives.classification import TOP, evaluation_sums
from jaxtrain.training.objectives.losses import CONFUSION, Loss, Sums, losses, validate_unread
from jaxtrain.training.objectives.objective import Yardstick, uniform_guess
from jaxtrain.training.objectives.tokens import TokenObjective


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
