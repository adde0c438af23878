"""Random data for verification: documents, pairs and images with uneven numbers of targets."""

import dataclasses
from typing import Any

import numpy as np

from jaxtrain.data.batch import Batch, kind_of, stack
from jaxtrain.data.source import Dataset, Examples, Part
from jaxtrain.data.text.packing import PackedText, pack
from jaxtrain.models.model import features_of, reads_pairs, reads_tokens, token_classes_of
from jaxtrain.training.objectives.classification import classes_of
from jaxtrain.training.settings import Config

SEED = 20  # of all random data here
BATCHES = 5  # the rows fill half a batch less, so that the last batch extends into the next epoch


@dataclasses.dataclass(frozen=True)
class UnevenText:
    """Packed rows with a loss mask of 1 for a third to all of the targets; implements Examples.

    Attributes:
      rows: the packed rows.
      vectors: float32 [V, F], the input vectors of a model that reads vectors instead of tokens;
        None if it reads tokens.
    """

    rows: PackedText
    vectors: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return row `index`, tokens [T]; the same for any `rng`."""
        row = self.rows.example(index, rng)
        mask = row.loss_mask * _keep(index, row.loss_mask.shape)
        inputs = row.inputs if self.vectors is None else self.vectors[row.inputs]
        return dataclasses.replace(row, inputs=inputs, loss_mask=mask)


@dataclasses.dataclass(frozen=True)
class UnevenPairs:
    """Pairs with a loss mask of 1 for a third to all of the targets; implements Examples.

    Attributes:
      pairs: the pairs of the data source.
    """

    pairs: Examples

    def __len__(self) -> int:
        return len(self.pairs)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return pair `index`; the same for any `rng`."""
        row = self.pairs.example(index, rng)
        mask = row.loss_mask * _keep(index, row.loss_mask.shape)
        return dataclasses.replace(row, loss_mask=mask)


@dataclasses.dataclass(frozen=True)
class Noise:
    """Images or vectors of noise with random targets; implements Examples.

    Attributes:
      inputs: float32 [count, H, W, C] or [count, D].
      targets: int32 labels [count], or float32 regression targets [count, K].
    """

    inputs: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return image or vector `index`; an `rng` changes its brightness, like an augmentation."""
        inputs = self.inputs[index]
        if rng is not None:
            inputs = inputs + np.float32(rng.normal())
        return Batch(inputs, self.targets[index], np.float32(_keep(index, ()) > 0))


def _keep(index: int, shape: tuple[int, ...]) -> Any:
    """Return a random 0/1 loss mask; its density cycles from a third to 1 over the rows."""
    share = 0.3 + 0.7 * (index % 4) / 3
    return (np.random.default_rng((SEED, index)).random(shape) < share).astype(np.float32)


def dataset(config: Config) -> Dataset:
    """Return a random dataset for the verification of a shrunk configuration."""
    rows = config.train.global_batch_size * BATCHES - config.train.global_batch_size // 2
    batch = config.train.data.abstract_batch(1)
    model = config.train.model
    rng = np.random.default_rng(SEED)
    examples: Examples
    if reads_tokens(model):
        length, different, vectors = batch.inputs.shape[1], model.vocab_size, None
        features, classes = features_of(model), token_classes_of(model)
        if features is not None and classes is not None:
            different = classes  # the random class is also the target
            vectors = rng.normal(size=(different, features)).astype(np.float32)
        # At most half a row, so that every row contains at least two documents.
        documents = [
            rng.integers(0, different, rng.integers(3, length // 2))
            for _ in range(rows * length // 3)
        ]
        packed = pack(
            documents, length, np.dtype(np.uint16), separate=batch.segment_ids is not None
        )
        tokens = packed.tokens[: rows * length - 4]  # the last row ends with padding
        kept = int(np.searchsorted(packed.offsets, len(tokens)))
        offsets = np.append(packed.offsets[:kept], len(tokens))
        packed = dataclasses.replace(packed, tokens=tokens, offsets=offsets)
        examples = UnevenText(packed, vectors)
    elif reads_pairs(model):
        opened = config.train.data.open(seed=SEED)
        examples = UnevenPairs(Part(opened.train, range(rows)))
    else:
        inputs = rng.normal(size=(rows, *batch.inputs.shape[1:])).astype(np.float32)
        targets = rng.normal(size=(rows, *batch.targets.shape[1:])).astype(np.float32)
        if np.issubdtype(batch.targets.dtype, np.integer):
            targets = rng.integers(0, classes_of(model)[1], rows).astype(np.int32)
        examples = Noise(inputs, targets)
    return Dataset(examples, examples, f"random, seed {SEED}", {}, None, kind_of(batch))


def first_batch(config: Config, data: Dataset) -> Batch:
    """Return the batch of the first step, which includes the last row, with padding."""
    rows = np.arange(config.train.global_batch_size) - 1
    return stack([data.train.example(int(row) % len(data.train), None) for row in rows])


def twins(batch: Batch) -> Batch:
    """Return the batch with each odd row replaced by the row before it; loss_mask is unchanged.

    Both halves of the batch then contain the same images and have the statistics of the whole
    batch, so that accumulation is well defined for models with batch normalization.
    """
    rows = np.arange(len(batch.targets)) // 2 * 2
    return dataclasses.replace(batch, inputs=batch.inputs[rows], targets=batch.targets[rows])


# -- packed rows ---------------------------------------------------------------------------------


def documents_alone(batch: Batch) -> list[Batch]:
    """Return a batch for each k = 1, 2, ...: the k-th document of each row, alone in its row."""
    segment_ids: Any = batch.segment_ids
    length, alone = batch.inputs.shape[1], []
    for document in range(1, int(segment_ids.max()) + 1):
        taken = segment_ids == document
        # Stable, so that the document's tokens come first, in their order.
        order = np.argsort(~taken, axis=1, kind="stable")
        here = np.arange(length) < taken.sum(1, keepdims=True)

        def one(x: Any, order: Any = order, here: Any = here) -> np.ndarray:
            of_each = (*x.shape[:2], *(1,) * (x.ndim - 2))
            found = np.take_along_axis(x, order.reshape(of_each), axis=1)
            return np.where(here.reshape(of_each), found, 0).astype(x.dtype)

        alone.append(
            Batch(
                one(batch.inputs),
                one(batch.targets),
                one(batch.loss_mask),
                here.astype(np.int32),
                one(batch.positions),
            )
        )
    return alone


def repack(batch: Batch, alone: list[np.ndarray]) -> np.ndarray:
    """Move per-token values of `documents_alone` to the positions of the packed rows."""
    segment_ids: Any = batch.segment_ids
    found = np.zeros_like(alone[0])
    for document, values in enumerate(alone, start=1):
        taken = segment_ids == document
        # Boolean indexing is row-major, and the document's tokens come first in each row.
        here = np.arange(taken.shape[1]) < taken.sum(1, keepdims=True)
        found[taken] = values[here]
    return found


def with_one_document_changed(batch: Batch, vocab_size: int) -> tuple[Batch, np.ndarray]:
    """Replace one document of each row; return the batch and the document mask, bool [B, T]."""
    rows = np.arange(len(batch.inputs))
    segment_ids: Any = batch.segment_ids
    counts = segment_ids.max(1)
    chosen = segment_ids == (rows % counts + 1)[:, None]
    rng = np.random.default_rng(SEED)
    if batch.inputs.ndim > 2:
        other = batch.inputs + rng.normal(size=batch.inputs.shape).astype(np.float32)
        inputs = np.where(chosen[..., None], other, batch.inputs)
    else:
        shift = rng.integers(1, vocab_size, batch.inputs.shape)
        other = ((batch.inputs + shift) % vocab_size).astype(np.int32)
        inputs = np.where(chosen, other, batch.inputs)
    return dataclasses.replace(batch, inputs=inputs), chosen
