"""Word dropout: next-token prediction from inputs of which some are replaced by token 0.

Source: Bowman et al. 2016, "Generating Sentences from a Continuous Space" (arXiv 1511.06349,
section 3.1). Letter: T length.
"""

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from jaxtrain.data.batch import Batch
from jaxtrain.data.source import Dataset, Examples
from jaxtrain.models.model import Model
from jaxtrain.nn.transformer.language_model import Transformer
from jaxtrain.training.objectives.losses import Loss, Sums
from jaxtrain.training.objectives.tokens import TokenObjective, token_loss

RATE = 0.1  # of the inputs


class WordDropout(TokenObjective):
    """Cross entropy of the next token; held-out rows have all their inputs."""

    name: ClassVar[str] = "word_dropout"
    causal: ClassVar[bool] = True

    def dataset(self, dataset: Dataset, model: Model) -> Dataset:
        """The same data, with inputs dropped from training rows."""
        del model
        return dataclasses.replace(dataset, train=Dropped(dataset.train))

    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """The loss: a sum over targets, which the step divides by their number."""
        return {"loss": token_loss(model, h_BTD, batch, settings, train=train)}


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Rows of text with dropped inputs; implements `Examples`."""

    rows: Examples

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Row `index`; `rng` depends on the seed and the position in the stream alone."""
        row = self.rows.example(index, None)
        if rng is None:
            return row
        dropped_T = rng.random(row.inputs.shape) < RATE
        return dataclasses.replace(row, inputs=np.where(dropped_T, 0, row.inputs))
