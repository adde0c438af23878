"""What tests of encoder-decoders share: batches of pairs, and a peer that reads such."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from against_transformers import Pair, torch
from torch.nn.functional import cross_entropy

from jaxtrain.data.batch import Batch
from jaxtrain.data.pairs.source import pair
from jaxtrain.nn.dropout import Draws, dropout


def pairs(*, rows: int, source: int, target: int, vocab_size: int, seed: int = 0) -> Batch:
    """Random pairs, of which the first alone fills its rows."""
    rng, made = np.random.default_rng(seed), []
    for row in range(rows):
        lengths = (source, target) if row == 0 else rng.integers(2, (source + 1, target + 1))
        made.append(pair(*(rng.integers(1, vocab_size, n) for n in lengths), (source, target), 0))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


@dataclasses.dataclass
class SequencePair(Pair):
    """An encoder-decoder of ours and one of theirs with the same values."""

    def logits(self, batch: Batch) -> torch.Tensor:
        """Of every place of the targets."""
        return self.theirs(
            input_ids=torch.tensor(batch.source).long(),
            attention_mask=torch.tensor(batch.source_segment_ids).long(),
            decoder_input_ids=torch.tensor(batch.inputs).long(),
        ).logits

    def reading(self, objective: Any, batch: Batch) -> Batch:
        """The batch: padding of targets is seen by nobody, and is compared with them."""
        del objective
        return dataclasses.replace(batch, segment_ids=np.ones_like(batch.segment_ids))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Their mean cross entropy over the targets that count."""
        logits, mask = self.logits(batch).flatten(0, 1), torch.tensor(batch.loss_mask).flatten()
        targets = torch.tensor(batch.targets).long().flatten()
        return (cross_entropy(logits, targets, reduction="none") * mask).sum() / mask.sum()


class Given(torch.nn.Module):
    """Drops what our first step drops at these places, by turns; nothing without gradients, as in
    evaluation. PyTorch draws in another way: what is held against it is where is dropped."""

    def __init__(self, rate: float, *places: int, layer: int | None = None) -> None:
        super().__init__()
        self.rate, self.layer, self.places = rate, layer, itertools.cycle(places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return x
        draws, ones = Draws.of_step(0, 0, jnp.arange(len(x))), jnp.ones(x.shape, jnp.float32)
        return x * torch.tensor(
            np.array(dropout(ones, self.rate, draws, next(self.places), self.layer))
        )
