"""Next-token prediction: language modeling."""

from typing import ClassVar

import jax

from jaxtrain.data.batch import Batch
from jaxtrain.nn.transformer.language_model import Transformer
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.tokens import TokenObjective, token_loss


class NextToken(TokenObjective):
    """Cross entropy of the next token: nats a target, and their perplexity."""

    name: ClassVar[str] = "next_token"
    causal: ClassVar[bool] = True

    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """`loss`."""
        return {"loss": token_loss(model, h_BTD, batch, settings, train=train)}
