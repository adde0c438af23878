"""Direct preference optimization (DPO).

Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7. Letters: B batch, T length.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.data.batch import Batch
from jaxtrain.data.text.chat.preferences import CHOSEN
from jaxtrain.models.model import Model
from jaxtrain.nn.attention.context import split_before, sum_of_sequence
from jaxtrain.nn.transformer.language_model import Transformer, logits
from jaxtrain.training.objectives.losses import Loss, Sums, cross_entropy, validate_unread
from jaxtrain.training.objectives.objective import Baseline, Yardstick
from jaxtrain.training.objectives.tokens import TokenObjective


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DPO(TokenObjective):
    """Direct preference optimization (DPO, arXiv 2305.18290): -log sigmoid(beta (r_chosen -
    r_rejected)). r is an answer's log-probability minus that by the reference model, from which the
    run started; it is computed once. Metrics: `accuracy`, the fraction of pairs whose chosen answer
    has gained more, and `margin`, the difference in nats times beta.

    Attributes:
      beta: strength of the regularization towards the reference.
    """

    beta: float = 0.1

    name: ClassVar[str] = "preference"
    causal: ClassVar[bool] = True
    own: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    refers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "beta")

    def validate_loss(self, settings: Loss) -> Iterator[str]:
        """Yield errors for settings that only a plain cross entropy uses."""
        yield from validate_unread(settings, "Train.objective=@DPO()")

    def weight(self, batch: Batch) -> jax.Array:
        """Return the number of pairs that count."""
        return (batch.loss_mask != 0).any(-1).sum(dtype=jnp.float32)

    def more_of_evaluation(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return no further metrics: the loss is not per token."""
        del means
        return {}

    def yardstick(self, model: Model, facts: Mapping[str, Any]) -> Yardstick:
        """Return nats per pair; the reference model has a margin of 0."""
        del model, facts
        label = "the reference model"
        baselines = (
            Baseline("loss", label, math.log(2)),
            Baseline("accuracy", "a guess", 0.5),
            Baseline("margin", label, 0.0),
        )
        return Yardstick("nats a pair", ("accuracy", "margin"), baselines)

    def of_hidden(
        self, model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
    ) -> Sums:
        """Return the sums of `loss`, `accuracy` and `margin`."""
        del settings, train
        assert batch.reference is not None, "rejected before"
        with jax.named_scope("loss"):
            counts_BT = batch.loss_mask != 0
            h_BTD = jnp.where(counts_BT[..., None], h_BTD, 0)
            targets_BT = jnp.where(counts_BT, batch.targets, 0)
            log_p_BT = -cross_entropy(logits(model, h_BTD), targets_BT)
            gained_BT = jnp.where(counts_BT, log_p_BT - batch.reference, 0.0)
            signs_BT = jnp.where(batch.segment_ids == CHOSEN, 1.0, -1.0)
            margin_B = self.beta * sum_of_sequence((signs_BT * gained_BT).sum(-1))
            pair_B = sum_of_sequence(counts_BT.sum(-1)) > 0
            sums = {
                "loss": jnp.where(pair_B, -jax.nn.log_sigmoid(margin_B), 0.0).sum(),
                "accuracy": (pair_B & (margin_B > 0)).sum(dtype=jnp.float32),
                "margin": margin_B.sum(),
            }
            # Devices with positions of one row have the same pairs, and their sums are added
            # up.
            return {name: value / split_before() for name, value in sums.items()}
