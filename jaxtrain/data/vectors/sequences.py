"""`SequenceData`: time series with one class each, or one per position.

Letters: T length, F features.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.classed_rows import ClassedRows, Labelled, Rows
from jaxtrain.data.source import Dataset, digest, existing_path, is_heldout
from jaxtrain.data.vectors import sequence_files
from jaxtrain.data.vectors.sequence_files import Series
from jaxtrain.data.vectors.source import standard

SYNTHETIC_SEQUENCES = 1024


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceData(ClassedRows):
    """Sequences of vectors, one in a row, which ends with padding.

    Attributes:
      source: a `.npz` file of arrays x [examples, places, features] (or [examples, places], one
        number at each) and y, labels 0, 1, ... of [examples] or of [examples, places] (-1 where
        there is none), with an array lengths [examples] where not all places are an example's; a
        `.ts` file, as archives of time series have them; or `'synthetic'`, random numbers and
        labels.
      heldout_source: another such file, which is held out; None holds out a part of the source.
      features: numbers of a vector.
      sequence_length: places of a row; of longer sequences the rest is left out, and counted.
      scaling: 'standard' takes the mean from each feature and divides by the standard deviation,
        both over all places of the training part; 'none' leaves them.
    """

    heldout_source: Annotated[str | None, PathOr()] = None
    features: int = 1
    scaling: Literal["none", "standard"] = "standard"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "features")
        if self.heldout_source is None:
            return
        if self.source == "synthetic":
            raise UserError(
                f"SequenceData.heldout_source = {self.heldout_source!r} does nothing with "
                "SequenceData.source = 'synthetic'; name a file there too, or set it to None"
            )
        if self.heldout_fraction != type(self).heldout_fraction:
            raise UserError(
                f"SequenceData.heldout_fraction = {self.heldout_fraction} does nothing with "
                f"SequenceData.heldout_source = {self.heldout_source!r}; leave one of them out"
            )

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """The shapes and dtypes of a batch, for lowering a step without data."""
        shape = (global_batch_size, self.sequence_length)
        vectors: Any = jax.ShapeDtypeStruct((*shape, self.features), np.float32)
        numbers: Any = jax.ShapeDtypeStruct(shape, np.int32)
        mask: Any = jax.ShapeDtypeStruct(shape, np.float32)
        return Batch(vectors, numbers, mask, numbers, numbers)

    def row(self, places: np.ndarray, label: Any = 0) -> Batch:
        """As in ClassedRows: of vectors [T, F], scaled, with one label or one for each."""
        row = places[: self.sequence_length].astype(np.float32)
        if np.ndim(label) == 0:
            return self.label_sequence(row, label)
        return self.label_tokens(row, label)

    def class_names(self) -> list[str]:
        """The names of the classes, by label; raises UserError as `open` does."""
        if self.source == "synthetic":
            return [str(label) for label in range(self.num_classes)]
        return list(self._read("source").names)

    def open(self, *, seed: int) -> Dataset:
        """Reads, scales and splits the sequences; only `'synthetic'` depends on `seed`.

        Raises:
          UserError: nothing there, another number of features or classes, other classes in what is
            held out, or a split that would be empty.
        """
        found, held = self._split(seed)
        shift, spread = self._scale(found, held)
        each = zip(found.x, found.labels, strict=True)
        examples: list[Labelled] = [((x_TF - shift) / spread, label) for x_TF, label in each]
        lengths = np.array([len(x_TF) for x_TF in found.x], np.int64)
        facts: dict[str, float | int | str] = {
            "source": self.source,
            "features": self.features,
            "classes": self.num_classes,
            "class_names": ", ".join(found.names),
            "train_sequences": int((~held).sum()),
            "heldout_sequences": int(held.sum()),
            "longest_sequence": int(lengths.max()),
            "sequences_cut": int((lengths > self.sequence_length).sum()),
        }
        header = {
            "kind": "sequences", "names": list(found.names), "scaling": self.scaling,
            "settings": [self.sequence_length, self.place],
        }  # fmt: skip
        told = np.concatenate([np.atleast_1d(label) for label in found.labels]).astype(np.int64)
        train, heldout = (
            Rows([examples[place] for place in np.flatnonzero(chosen)], self)
            for chosen in (~held, held)
        )
        parts = [np.concatenate(found.x), lengths, told, held]
        return Dataset(train, heldout, digest(header, parts), facts, None, "vectors")

    def prepare(self, sequences: Sequence[np.ndarray]) -> list[Batch]:
        """Rows of other sequences [T, F], scaled as those of this source are.

        Raises:
          UserError: as of `open`.
        """
        shift, spread = self._scale(*self._split(0)) if self.scaling == "standard" else (0.0, 1.0)
        return [self.row((x_TF - shift) / spread) for x_TF in sequences]

    def _split(self, seed: int) -> tuple[Series, np.ndarray]:
        """All sequences, and which of them are held out."""
        if self.source == "synthetic":
            found = self._synthetic(seed)
        else:
            found = self._read("source")
        if self.heldout_source is not None:
            other = self._read("heldout_source")
            if other.names != found.names[: len(other.names)]:
                raise UserError(
                    f"SequenceData.heldout_source = {self.heldout_source!r} has the classes "
                    f"{', '.join(other.names)}, and SequenceData.source {', '.join(found.names)}; "
                    "name files of the same"
                )
            held = np.arange(len(found.x) + len(other.x)) >= len(found.x)
            return Series([*found.x, *other.x], [*found.labels, *other.labels], found.names), held
        if any(np.ndim(label) for label in found.labels):
            held = is_heldout(len(found.x), self.heldout_fraction)
        else:
            held = self.split_by_class(found.labels)
        self.reject_empty_split(held, "sequences")
        return found, held

    def _read(self, setting: str) -> Series:
        value, said = getattr(self, setting), f"SequenceData.{setting} = {getattr(self, setting)!r}"
        words = ("synthetic",) if setting == "source" else ()
        path = existing_path(f"SequenceData.{setting}", value, words=words)
        found = sequence_files.read(path, said)
        for name, count in (("features", found.x[0].shape[1]), ("num_classes", len(found.names))):
            # What is held out may lack the last classes, which .npz files do not name.
            fewer = setting != "source" and path.suffix == ".npz" and name == "num_classes"
            wanted = getattr(self, name)
            if count > wanted if fewer else count != wanted:
                raise UserError(
                    f"SequenceData.{name} = {wanted}, but {said} has {count}; set "
                    f"SequenceData.{name} = {count}"
                )
        return found

    def _synthetic(self, seed: int) -> Series:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, self.sequence_length + 1, SYNTHETIC_SEQUENCES)
        x = [rng.normal(size=(length, self.features)) for length in lengths]
        labels = rng.integers(0, self.num_classes, SYNTHETIC_SEQUENCES).tolist()
        return Series(x, labels, tuple(str(label) for label in range(self.num_classes)))

    def _scale(self, found: Series, held: np.ndarray) -> tuple[Any, Any]:
        """What is taken from vectors, and what they are divided by then."""
        if self.scaling == "none":
            return 0.0, 1.0
        train = np.repeat(~held, [len(x_TF) for x_TF in found.x])
        return standard(np.concatenate(found.x), train)
