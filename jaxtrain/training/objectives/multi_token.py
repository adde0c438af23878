"""Multi-token prediction (DeepSeek-V3).

Source: arXiv 2412.19437, section 2.2, equations 21 to 25. Letters: B batch, T length, D embed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Model, MultiTokenModel
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.transformer.language_model import PredictsMore
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.next_token import NextToken
from jaxtrain.training.objectives.tokens import add_sums, token_loss
from jaxtrain.training.objectives.yardstick import Yardstick


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiToken(NextToken):
    """Cross entropy of the next token, and in `multi_token_loss` of those after it: the mean over
    modules, times the weight.

    All are divided by the one count of next tokens, as in equation 24: a module's loss is summed
    over fewer, since no module looks beyond a document's end.

    Attributes:
      further_tokens: modules, the k-th of which predicts the token after the next k.
      further_weight: what their mean loss is multiplied by.
    """

    further_tokens: int = 1
    further_weight: float = 0.3

    name: ClassVar[str] = "multi_token"
    minimized: ClassVar[tuple[str, ...]] = (*NextToken.minimized, "multi_token_loss")
    own: ClassVar[tuple[str, ...]] = (*NextToken.own, "multi_token_loss")
    tells_further: ClassVar[bool] = True

    def of(self, model: Model) -> "MultiToken":
        """Return the objective with the model's number of tokens and weight."""
        assert isinstance(model, MultiTokenModel), f"{type(model).__name__} names this objective"
        return dataclasses.replace(
            self,
            further_tokens=model.predicted_tokens - 1,
            further_weight=model.prediction_weight,
        )

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """That of the next token, and what is minimized with it."""
        whole = super().yardstick(model, facts)
        return dataclasses.replace(whole, metrics=("multi_token_loss",))

    def in_order(self, batch: Batch) -> Batch:
        """With the rows further on beside it."""
        if batch.further is not None:
            return batch
        further = tuple(further_on(batch, k) for k in range(1, self.further_tokens + 1))
        return dataclasses.replace(batch, further=further)

    def of_more_layers(
        self,
        model: PredictsMore,
        h_BTD: jax.Array,
        batch: Batch,
        execution: Execution,
        settings: Loss,
        *,
        train: bool,
    ) -> Sums:
        """`multi_token_loss`, and what the modules' layers sum."""
        assert batch.further is not None, "as `in_order` gives it"
        assert batch.positions is not None, "a batch of text has positions"
        total, of_layers = jnp.zeros(()), {}
        for module, further in zip(model.predicting, batch.further, strict=True):
            token_BTD = model.embed(further.inputs, batch.positions)
            h_BTD, sums = module(h_BTD, token_BTD, batch.positions, self.mask(further), execution)
            total += token_loss(model, h_BTD, further, settings, train=train)
            of_layers = add_sums(of_layers, sums)
        return {"multi_token_loss": self.further_weight / self.further_tokens * total, **of_layers}


def further_on(batch: Batch, places: int) -> Batch:
    """Return the rows of a batch shifted by `places` positions, in the order of their text.

    Where a place has no such token in its document, no target counts and the place is padding.
    """

    def later(x_BT: jax.Array) -> jax.Array:
        T = x_BT.shape[1]
        return jnp.where(jnp.arange(T) < T - places, jnp.roll(x_BT, -places, axis=1), 0)

    ids_BT, loss_mask = batch.segment_ids, later(batch.loss_mask)
    if ids_BT is not None:
        same_BT = ids_BT == later(ids_BT)
        ids_BT, loss_mask = jnp.where(same_BT, ids_BT, 0), jnp.where(same_BT, loss_mask, 0)
    return Batch(later(batch.inputs), later(batch.targets), loss_mask, ids_BT)
