"""Language modeling: next token, masked tokens (BERT), multi-token prediction (DeepSeek-V3).

Sources: Devlin et al. 2018 (arXiv 1810.04805), section 3.1 and appendix A.1; DeepSeek-V3 (arXiv
2412.19437), section 2.2, equations 21 to 25. Letters: B batch, T length, D embed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, Examples
from jaxtrain.models.model import Model, token_model, tokens_per_position
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.transformer.language_model import PredictsMore, Transformer
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.objective import Yardstick
from jaxtrain.training.objectives.tokens import TokenObjective, add_sums, token_loss


class NextToken(TokenObjective):
    """Next-token prediction (causal language modeling): cross entropy in nats per target, and
    perplexity.
    """

    name: ClassVar[str] = "next_token"
    causal: ClassVar[bool] = True

    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Return the sum of `loss`."""
        return {"loss": token_loss(model, h_BTD, batch, settings, train=train)}


CHOSEN = 0.15  # fraction of tokens that are targets
HIDDEN, RANDOM = (
    0.8,
    0.1,
)  # of those: replaced by the mask token, by a random one; the rest are unchanged
EVALUATION_SEED = 0  # held-out examples have the same masks in every evaluation of every run


class MaskedToken(TokenObjective):
    """Masked language modeling (BERT): cross entropy of the masked tokens in nats, and perplexity.

    The last token of the model's vocabulary is the mask token, which does not occur in the data.
    """

    name: ClassVar[str] = "masked_token"
    causal: ClassVar[bool] = False
    reserved: ClassVar[int] = 1

    def dataset(self, dataset: Dataset, model: Model) -> Dataset:
        """Return the dataset with new masks in each epoch.

        Raises:
          UserError: the vocabulary has no room for the mask's token.
        """
        taken, name = dataset.facts.get("vocab_size", 0), type(model).__name__
        vocab_size = token_model(model).vocab_size
        if int(taken) >= vocab_size:
            raise UserError(
                f"{name}.vocab_size={vocab_size} has no slot for the mask token after the data's "
                f"{taken}; use at least {int(taken) + 1}"
            )
        return dataclasses.replace(
            dataset,
            train=Masked(dataset.train, vocab_size),
            heldout=Masked(dataset.heldout, vocab_size),
        )

    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Return the sum of `loss`."""
        return {"loss": token_loss(model, h_BTD, batch, settings, train=train)}


@dataclasses.dataclass(frozen=True)
class Masked:
    """Rows of text with masked tokens; implements Examples.

    Attributes:
      rows: the text.
      vocab_size: of the model; its last token is the mask token.
    """

    rows: Examples
    vocab_size: int

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return row `index`, masked by `rng`, which depends on the seed and the position in the
        stream of rows."""
        if rng is None:
            rng = np.random.default_rng((EVALUATION_SEED, index))
        return mask_tokens(self.rows.example(index, None), rng, self.vocab_size)


def mask_tokens(row: Batch, rng: np.random.Generator, vocab_size: int) -> Batch:
    """Mask tokens of a row [T]; the targets are its own tokens, and the masked positions count.

    Each token of a document is selected independently; of those, 8 of 10 become the mask token, 1
    of 10 any other token, and 1 of 10 is unchanged.

    Args:
      row: one row of text.
      rng: the random generator.
      vocab_size: of the model; its last token is the mask token.
    """
    tokens_T = row.inputs
    drawn_T, kind_T = rng.random((2, *tokens_T.shape))
    others_T = rng.integers(0, vocab_size - 1, tokens_T.shape)
    # Rows of one text mark padding in their loss mask.
    real_T = row.loss_mask if row.segment_ids is None else row.segment_ids
    chosen_T = (drawn_T < CHOSEN) & (real_T != 0)
    inputs_T = np.where(chosen_T & (kind_T < HIDDEN), vocab_size - 1, tokens_T)
    replaced_T = chosen_T & (kind_T >= 1 - RANDOM)
    return dataclasses.replace(
        row,
        inputs=np.where(replaced_T, others_T, inputs_T).astype(np.int32),
        targets=tokens_T,
        loss_mask=chosen_T.astype(np.float32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiToken(NextToken):
    """Multi-token prediction: cross entropy of the next token and, in `multi_token_loss`, of those
    after it: the mean over modules, times the weight.

    All are divided by the one count of next tokens, as in equation 24: a module's loss is summed
    fewer, since no module looks beyond a document's end.

    Attributes:
      further_tokens: number of modules; the k-th predicts the token after the next k.
      further_weight: weight of their mean loss.
    """

    further_tokens: int = 1
    further_weight: float = 0.3

    name: ClassVar[str] = "multi_token"
    minimized: ClassVar[tuple[str, ...]] = (*NextToken.minimized, "multi_token_loss")
    own: ClassVar[tuple[str, ...]] = (*NextToken.own, "multi_token_loss")
    multi_token_prediction: ClassVar[bool] = True

    def of(self, model: Model) -> "MultiToken":
        """Return the objective with the model's number of tokens and weight."""
        sizes: Any = model  # which names this objective
        return dataclasses.replace(
            self,
            further_tokens=tokens_per_position(model) - 1,
            further_weight=sizes.prediction_weight,
        )

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Return that of the next token, with the minimized loss."""
        whole = super().yardstick(model, facts)
        return dataclasses.replace(whole, metrics=("multi_token_loss",))

    def in_order(self, batch: Batch) -> Batch:
        """Return the batch with its shifted rows in `further`."""
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
        """Return `multi_token_loss`, and the sums of the modules' layers."""
        assert batch.further is not None, "as `in_order` gives it"
        assert batch.positions is not None, "a batch of text has positions"
        total, of_layers = jnp.zeros(()), {}
        for module, further in zip(model.predicting, batch.further, strict=True):
            token_BTD = model.embed(further.inputs, batch.positions)
            h_BTD, sums = module(h_BTD, token_BTD, batch.positions, self.mask(further), execution)
            total += token_loss(model, h_BTD, further, settings, train=train)
            of_layers = add_sums(of_layers, sums)
        return {"multi_token_loss": self.further_weight / self.further_tokens * total, **of_layers}


def further_on(batch: Batch, distance: int) -> Batch:
    """Return the rows of a batch shifted by `distance` positions, in the order of their text.

    Where a position has no such token in its document, no target counts and the position is
    padding.
    """

    def later(x_BT: jax.Array) -> jax.Array:
        T = x_BT.shape[1]
        return jnp.where(jnp.arange(T) < T - distance, jnp.roll(x_BT, -distance, axis=1), 0)

    ids_BT, loss_mask = batch.segment_ids, later(batch.loss_mask)
    if ids_BT is not None:
        same_BT = ids_BT == later(ids_BT)
        ids_BT, loss_mask = jnp.where(same_BT, ids_BT, 0), jnp.where(same_BT, loss_mask, 0)
    return Batch(later(batch.inputs), later(batch.targets), loss_mask, ids_BT)
