"""Row assignment: which examples are in which rows of a batch; length buckets.

Rows can be made in any process and any thread, some or all of them at once: a row's content
depends on the seed, the batch and the row alone.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from jaxtrain.data.bad_records import UNREADABLE, BadRecords, read_example
from jaxtrain.data.batch import Batch, stack
from jaxtrain.data.ordering.shuffle import shuffle_nearby
from jaxtrain.data.source import Examples, MixedRows, WholeBatches

# Streams derived from one seed; 2 is that of `mixing`.
SHUFFLE_STREAM, AUGMENT_STREAM, PAIR_STREAM = 0, 1, 3
HELDOUT_ORDER = 0  # fixed: a run's seed must not change its evaluation data


class Order(Protocol):
    """Assignment of examples to the rows of batches."""

    def indices(
        self, batch: int, rows: np.ndarray, *, global_batch_size: int, seed: int
    ) -> np.ndarray:
        """Return the examples at some rows of a batch, int64 [n]."""
        ...


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """Rows of an endless stream of batches, reshuffled each epoch.

    Attributes:
      examples: what to draw from.
      global_batch_size: rows of a batch over all processes.
      seed: of the order and of augmentation.
      augment: whether training examples are augmented.
      order: in which examples are drawn; None: each once per epoch, reshuffled.
    """

    examples: Examples
    global_batch_size: int
    seed: int
    augment: bool
    order: Order | None

    def read(self, number: int, *, rows: np.ndarray, bad: BadRecords) -> Batch:
        """Read these rows of batch `number` in order; rows past the last have zero weight."""
        size = self.global_batch_size
        made = self._within(number, np.minimum(rows, size - 1), bad)
        return made if rows.max() < size else without_weight(made, rows >= size)

    def _within(self, number: int, rows: np.ndarray, bad: BadRecords) -> Batch:
        examples = self.examples
        if not (self.augment and isinstance(examples, MixedRows)):
            return self._rows_without_mixing(number, rows, bad)
        # Rows are mixed in pairs of neighbors, which are on one machine except for odd shares: a
        # row that is needed only for its neighbor is read and dropped.
        others = np.minimum(rows ^ 1, self.global_batch_size - 1)
        needed, inverse = np.unique(np.concatenate([rows, others]), return_inverse=True)
        plain = self._rows_without_mixing(number, needed, bad)
        mixed = [
            examples.mix(_row(plain, own), _row(plain, other), self._rng(PAIR_STREAM, number, r))
            for own, other, r in zip(
                inverse[: len(rows)], inverse[len(rows) :], rows.tolist(), strict=True
            )
        ]
        return stack(mixed)

    def _rows_without_mixing(self, number: int, rows: np.ndarray, bad: BadRecords) -> Batch:
        size = self.global_batch_size
        if self.order is None:
            positions = number * size + rows
            indices = shuffle_nearby(positions, len(self.examples), self._shuffle_seed)
        else:
            indices = self.order.indices(number, rows, global_batch_size=size, seed=self.seed)

        def rng(position: int) -> np.random.Generator | None:
            return self._rng(AUGMENT_STREAM, number, int(rows[position])) if self.augment else None

        return _read_rows(self.examples, indices, rng, "training", bad)

    def _rng(self, stream: int, number: int, row: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream, number * self.global_batch_size + row))

    @functools.cached_property
    def _shuffle_seed(self) -> int:
        return int(np.random.SeedSequence((self.seed, SHUFFLE_STREAM)).generate_state(1)[0])


@dataclasses.dataclass(frozen=True)
class HeldoutRows:
    """Rows of batches with every example once, always in the same order.

    Attributes:
      examples: the examples.
      global_batch_size: rows of a batch over all processes.
    """

    examples: Examples
    global_batch_size: int

    def read(self, number: int, *, rows: np.ndarray, bad: BadRecords) -> Batch:
        """Read these rows of batch `number`; rows past the last example have zero weight."""
        positions, count = number * self.global_batch_size + rows, len(self.examples)
        indices = self._order[np.minimum(positions, count - 1)]
        made = _read_rows(self.examples, indices, lambda row: None, "held-out", bad)
        return without_weight(made, positions >= count)

    @functools.cached_property
    def _order(self) -> np.ndarray:
        return np.random.default_rng(HELDOUT_ORDER).permutation(len(self.examples))


def without_weight(batch: Batch, which: np.ndarray) -> Batch:
    """Return the batch with zero weight in the rows `which`, bool [B]: no targets, no documents."""
    without = {
        name: leaf * (~which).reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)
        for name in ("loss_mask", "segment_ids", "source_segment_ids")
        if (leaf := getattr(batch, name)) is not None
    }
    return dataclasses.replace(batch, **without)


def _row(batch: Batch, index: int) -> Batch:
    return jax.tree.map(lambda leaf: leaf[index], batch)


def _read_rows(
    examples: Examples,
    indices: np.ndarray,
    rng: Callable[[int], np.random.Generator | None],
    split: str,
    bad: BadRecords,
) -> Batch:
    """Return the examples `indices`, stacked; `rng` gives each row's augmentation."""
    if isinstance(examples, WholeBatches):
        # If one cannot be read, all are read one by one to find it.
        with contextlib.suppress(*UNREADABLE):
            return examples.examples(indices)
    made = [
        read_example(examples, index, rng(row), split, bad)
        for row, index in enumerate(indices.tolist())
    ]
    return stack(made)
