"""Masked language modeling (BERT).

Source: Devlin et al. 2018 (arXiv 1810.04805), section 3.1 and appendix A.1. Letter: T length.
"""

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, Examples
from jaxtrain.models.model import Model, token_model
from jaxtrain.nn.transformer.language_model import Transformer
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.tokens import TokenObjective, token_loss

CHOSEN = 0.15  # of the tokens are targets
HIDDEN, RANDOM = 0.8, 0.1  # of those: replaced by the mask's token, by any other; the rest stay
EVALUATION_SEED = 0  # held-out examples are masked alike in every evaluation of every run


class MaskedToken(TokenObjective):
    """Cross entropy of the chosen tokens: nats a token, and their perplexity.

    The last token of the model's vocabulary is the mask's, which the data do not have.
    """

    name: ClassVar[str] = "masked_token"
    causal: ClassVar[bool] = False
    reserved: ClassVar[int] = 1

    def dataset(self, dataset: Dataset, model: Model) -> Dataset:
        """The same text, masked anew in every epoch.

        Raises:
          UserError: the vocabulary has no room for the mask's token.
        """
        taken, name = dataset.facts.get("vocab_size", 0), type(model).__name__
        vocab_size = token_model(model).vocab_size
        if int(taken) >= vocab_size:
            raise UserError(
                f"{name}.vocab_size={vocab_size} has no room for the mask's token beside the "
                f"data's {taken}; use at least {int(taken) + 1}"
            )
        return dataclasses.replace(
            dataset,
            train=Masked(dataset.train, vocab_size),
            heldout=Masked(dataset.heldout, vocab_size),
        )

    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """`loss`."""
        return {"loss": token_loss(model, h_BTD, batch, settings, train=train)}


@dataclasses.dataclass(frozen=True)
class Masked:
    """Rows of text with some of their tokens hidden; implements Examples.

    Attributes:
      rows: the text.
      vocab_size: of the model; its last token is the mask's.
    """

    rows: Examples
    vocab_size: int

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Row `index`, masked by what `rng` draws: of a seed and a place in the stream of rows."""
        if rng is None:
            rng = np.random.default_rng((EVALUATION_SEED, index))
        return mask_tokens(self.rows.example(index, None), rng, self.vocab_size)


def mask_tokens(row: Batch, rng: np.random.Generator, vocab_size: int) -> Batch:
    """A row [T] with its own tokens for targets, of which those count that were chosen.

    Each token of a document is chosen by itself; of the chosen, 8 of 10 become the mask's token, 1
    of 10 any token but that, and 1 of 10 stays what it is.

    Args:
      row: one row of text.
      rng: what is drawn from.
      vocab_size: of the model; its last token is the mask's.
    """
    tokens_T = row.inputs
    drawn_T, kind_T = rng.random((2, *tokens_T.shape))
    others_T = rng.integers(0, vocab_size - 1, tokens_T.shape)
    # Rows whose documents are not distinguished say by their loss mask where padding begins.
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
