"""Labelled rows: one label per example, or one per position.

Letters: T length, F features of a position that has a vector.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.source import check_heldout_fraction, is_heldout

# An example's label, or one per position, -1 where none is predicted.
Labels = int | np.ndarray
# The content of an example: tokens, int32 [T], or vectors, float32 [T, F]; and its labels.
Labelled = tuple[np.ndarray, Labels]

S = TypeVar("S", bound="ClassedRows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassedRows(abc.ABC):
    """Base of sources of labelled examples, one example per row.

    Attributes:
      source: the file; or `'synthetic'`, random examples and labels.
      num_classes: different classes; their labels follow the order of their names.
      sequence_length: positions of a row; longer examples are truncated, and counted.
      pooling: the position at which an example's one class is predicted: the `'first'`, or the
        `'last'`, as unidirectional recurrent models need it.
      heldout_fraction: share of the examples that is held out, evenly spaced; where an example has
        one class, of each.
    """

    source: Annotated[str, PathOr(("synthetic",))] = "synthetic"
    num_classes: int = 2
    sequence_length: int = 128
    pooling: Literal["first", "last"] = "first"
    heldout_fraction: float = 0.1

    def __post_init__(self) -> None:
        require_at_least(2, self, "num_classes", "sequence_length")
        check_heldout_fraction(f"{self.section}.heldout_fraction", self.heldout_fraction)

    @abc.abstractmethod
    def row(self, content: Any, label: Any = 0) -> Batch:
        """Return one example as a row [T]: labels are at the predicted positions, and nothing else
        counts."""

    @property
    def section(self) -> str:
        """Name of the settings class, for messages."""
        return type(self).__name__

    def pad_row(self, row: np.ndarray, label_T: np.ndarray, is_labeled_T: np.ndarray) -> Batch:
        """Return a row [T] or [T, F], padded to `sequence_length`, with labels at the predicted
        positions."""
        position_T = np.arange(self.sequence_length, dtype=np.int32)
        return Batch(
            np.pad(row, ((0, len(position_T) - len(row)), *((0, 0),) * (row.ndim - 1))),
            np.where(is_labeled_T, label_T, 0).astype(np.int32),
            is_labeled_T.astype(np.float32),
            (position_T < len(row)).astype(np.int32),
            position_T,
        )

    def label_sequence(self, row: np.ndarray, label: int) -> Batch:
        """Return a row with one label."""
        position = 0 if self.pooling == "first" else len(row) - 1
        is_labeled_T = np.arange(self.sequence_length) == position
        return self.pad_row(row, np.full(self.sequence_length, label), is_labeled_T)

    def label_tokens(self, row: np.ndarray, labels: Labels, *, first: int = 0) -> Batch:
        """Return a row with labels at the positions from `first` on; a scalar label is used for
        all.
        """
        label_T = np.full(self.sequence_length, -1, np.int32)
        count = len(row) - first
        own = np.full(count, labels) if np.ndim(labels) == 0 else np.asarray(labels)[:count]
        label_T[first : first + len(own)] = own
        return self.pad_row(row, label_T, label_T >= 0)

    def split_by_class(self, labels: Sequence[Labels]) -> np.ndarray:
        """Return which examples are held out, bool: the same fraction of each class."""
        classes, held = np.array(labels), np.zeros(len(labels), bool)
        for label in range(self.num_classes):
            (of_class,) = np.nonzero(classes == label)
            held[of_class] = is_heldout(len(of_class), self.heldout_fraction)
        return held

    def reject_empty_split(self, held: np.ndarray, of: str) -> None:
        """Raise UserError if all examples, or none of them, would be held out."""
        if held.all() or not held.any():
            raise UserError(
                f"{self.section}.source = {self.source!r}: of its {len(held)} {of} {held.sum()} "
                f"would be held out; use more, or another {self.section}.heldout_fraction (now "
                f"{self.heldout_fraction})"
            )


@dataclasses.dataclass(frozen=True)
class Rows(Generic[S]):
    """Labelled examples in memory; implements Examples.

    Attributes:
      each: the content and the label of every example.
      data: converts them to rows.
    """

    each: list[Labelled]
    data: S

    def __len__(self) -> int:
        return len(self.each)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return example `index`, a row [T]; the same for any `rng`."""
        del rng
        content, label = self.each[index]
        return self.data.row(content, label)
