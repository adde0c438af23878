"""`SequenceData`: time series with one class each, or one per position; `.npz` and `.ts` files.

Source of the second: the format of Bagnall et al. 2018, "The UEA multivariate time series
classification archive" (arXiv 1811.00075). Letters: N examples, T length, F features.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.classed_rows import ClassedRows, Labelled, Labels, Rows
from jaxtrain.data.source import Dataset, digest, existing_path, is_heldout
from jaxtrain.data.vectors.source import read_npz, standard


class Series(NamedTuple):
    """Sequences and their labels.

    Attributes:
      x: each, float64 [T, F].
      labels: of each sequence, or of each of its positions; empty if the file has none.
      names: of the classes, by label.
    """

    x: list[np.ndarray]
    labels: list[Labels]
    names: tuple[str, ...]


def read(path: AnyPath, origin: str, *, labelled: bool = True) -> Series:
    """Read the sequences of a file.

    Args:
      path: the file, `.npz` or `.ts`.
      origin: the file's name in messages.
      labelled: whether labels are read, which are required then.

    Raises:
      UserError: it is neither, has non-numeric values, or no labels.
    """
    if path.suffix == ".npz":
        found = _npz(path, origin, labelled=labelled)
    elif path.suffix == ".ts":
        found = _ts(path, origin, labelled=labelled)
    else:
        raise UserError(f"{origin}: it takes a .npz or a .ts file of sequences")
    if not found.x:
        raise UserError(f"{origin}: it has no sequences")
    features = found.x[0].shape[1]
    for number, x_TF in enumerate(found.x):
        if not x_TF.size or x_TF.shape[1] != features:
            raise UserError(
                f"{origin}: sequence {number} has the shape {list(x_TF.shape)}; use at least one "
                f"place, and {features} features as in the first"
            )
        if not np.isfinite(x_TF).all():
            raise UserError(f"{origin}: sequence {number} has a value that is not finite")
    return found


def _npz(path: AnyPath, origin: str, *, labelled: bool) -> Series:
    try:
        arrays = read_npz(path, ["x", "y"] if labelled else ["x"], optional=["lengths"])
        x, y = arrays["x"].astype(np.float64), arrays.get("y", np.zeros((), int))
        lengths = arrays.get("lengths")
    except (ValueError, TypeError) as error:
        wanted = "arrays of numbers x and y" if labelled else "an array of numbers x"
        raise UserError(f"{origin}: it holds no {wanted}: {error}") from error
    if x.ndim == 2:
        x = x[..., None]
    if x.ndim != 3:
        raise UserError(
            f"{origin} has x {list(x.shape)}; use [examples, positions, features], or "
            "[examples, positions]"
        )
    lengths = np.full(len(x), x.shape[1]) if lengths is None else lengths
    whole = np.issubdtype(lengths.dtype, np.integer) and lengths.shape == x.shape[:1]
    if not whole or (lengths < 1).any() or (lengths > x.shape[1]).any():
        raise UserError(
            f"{origin}: lengths are {lengths.dtype} {list(lengths.shape)}; use {len(x)} integers "
            f"from 1 to {x.shape[1]}, the places of each example"
        )
    x_of_each = [x_TF[:length] for x_TF, length in zip(x, lengths, strict=True)]
    if not labelled:
        return Series(x_of_each, [], ())
    least = 0 if y.ndim == 1 else -1
    if y.shape not in (x.shape[:1], x.shape[:2]) or (y != np.floor(y)).any() or y.min() < least:
        raise UserError(
            f"{origin} has y {list(y.shape)}; use labels 0, 1, ... of [examples], or of [examples, "
            "places] with -1 where there is none"
        )
    y, names = y.astype(np.int32), tuple(str(label) for label in range(int(y.max()) + 1))
    if y.ndim == 1:
        return Series(x_of_each, [int(label) for label in y], names)
    return Series(x_of_each, [row[:length] for row, length in zip(y, lengths, strict=True)], names)


def _ts(path: AnyPath, origin: str, *, labelled: bool) -> Series:
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is not UTF-8 text: {error}") from error
    header, x, labels, in_data = dict[str, list[str]](), list[np.ndarray](), list[Labels](), False
    names, has_labels = tuple[str, ...](), False
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        where = f"{origin}: line {number}"
        if not line or line.startswith("#"):
            continue
        if not in_data:
            word, *values = line.split()
            in_data = word.lower() == "@data"
            header[word.lower()] = values
            if not in_data:
                continue
            if _is_true(header.get("@timestamps")):
                raise UserError(f"{origin} has timestamps; use one without")
            has_labels = _is_true(header.get("@classlabel"))
            names = tuple(header.get("@classlabel", [])[1:])
            if labelled and not names:
                raise UserError(
                    f"{origin} has no classes: its header has no '@classLabel true ...'"
                )
            continue
        parts = line.split(":")
        if has_labels:
            *parts, label = parts
            if labelled and label not in names:
                raise UserError(f"{where} ends with {label!r}; the header has {', '.join(names)}")
            if labelled:
                labels.append(names.index(label))
        x.append(_of_parts(parts, where))
    if not in_data:
        raise UserError(f"{origin}: there is no line '@data' in it")
    return Series(x, labels, names)


def _is_true(values: list[str] | None) -> bool:
    return bool(values) and values[0].lower() == "true"


def _of_parts(parts: list[str], where: str) -> np.ndarray:
    """Parse a sequence [T, F] from the values of each feature, one feature after the other."""
    if not parts:
        raise UserError(f"{where} has a class and no values; write VALUES:CLASS, or remove it")
    try:
        rows = [[float(value) for value in part.split(",")] for part in parts]
    except ValueError as error:
        raise UserError(f"{where}: {error}; use numbers, with none missing") from error
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        raise UserError(
            f"{where} has features of {lengths[0]} and of {lengths[-1]} numbers; give all "
            "features the same length"
        )
    return np.array(rows, np.float64).T


SYNTHETIC_SEQUENCES = 1024


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceData(ClassedRows):
    """Time series with labels: sequences of vectors, one per row, padded at the end.

    Attributes:
      source: a `.npz` file of arrays x [examples, positions, features] (or [examples, positions],
        one value at each) and y, labels 0, 1, ... of [examples] or of [examples, positions] (-1
        where there is none), with an array lengths [examples] if examples are
        padded; a `.ts` file, as in time series archives; or `'synthetic'`, random
        values and labels.
      heldout_source: another such file, which is held out; None holds out a part of the source.
      features: size of a vector.
      sequence_length: positions of a row; longer sequences are truncated, and counted.
      scaling: 'standard' subtracts the mean of each feature and divides by the standard deviation,
        both over all positions of the training part; 'none' changes nothing.
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
                f"SequenceData.heldout_source = {self.heldout_source!r} has no effect with "
                "SequenceData.source = 'synthetic'; name a file there too, or set it to None"
            )
        if self.heldout_fraction != type(self).heldout_fraction:
            raise UserError(
                f"SequenceData.heldout_fraction = {self.heldout_fraction} has no effect with "
                f"SequenceData.heldout_source = {self.heldout_source!r}; leave one of them out"
            )

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data."""
        shape = (global_batch_size, self.sequence_length)
        vectors: Any = jax.ShapeDtypeStruct((*shape, self.features), np.float32)
        numbers: Any = jax.ShapeDtypeStruct(shape, np.int32)
        mask: Any = jax.ShapeDtypeStruct(shape, np.float32)
        return Batch(vectors, numbers, mask, numbers, numbers)

    def row(self, content: np.ndarray, label: Any = 0) -> Batch:
        """Return a row of vectors [T, F], scaled, with one label or one per position."""
        row = content[: self.sequence_length].astype(np.float32)
        if np.ndim(label) == 0:
            return self.label_sequence(row, label)
        return self.label_tokens(row, label)

    def class_names(self) -> list[str]:
        """Return the names of the classes by label; raises UserError as `open` does."""
        if self.source == "synthetic":
            return [str(label) for label in range(self.num_classes)]
        return list(self._read("source").names)

    def open(self, *, seed: int) -> Dataset:
        """Read, scale and split the sequences; only `'synthetic'` depends on `seed`.

        Raises:
          UserError: no such source, another number of features or classes, other classes in the
            held-out part, or a split that would be empty.
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
            "settings": [self.sequence_length, self.pooling],
        }  # fmt: skip
        labels = np.concatenate([np.atleast_1d(label) for label in found.labels]).astype(np.int64)
        train, heldout = (
            Rows([examples[index] for index in np.flatnonzero(chosen)], self)
            for chosen in (~held, held)
        )
        parts = [np.concatenate(found.x), lengths, labels, held]
        return Dataset(train, heldout, digest(header, parts), facts, None, "vectors")

    def prepare(self, sequences: Sequence[np.ndarray]) -> list[Batch]:
        """Return rows of other sequences [T, F], scaled like this source's.

        Raises:
          UserError: as in `open`.
        """
        shift, spread = self._scale(*self._split(0)) if self.scaling == "standard" else (0.0, 1.0)
        return [self.row((x_TF - shift) / spread) for x_TF in sequences]

    def _split(self, seed: int) -> tuple[Series, np.ndarray]:
        """Return all sequences, and a mask of those held out."""
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
        value, origin = (
            getattr(self, setting),
            f"SequenceData.{setting} = {getattr(self, setting)!r}",
        )
        words = ("synthetic",) if setting == "source" else ()
        path = existing_path(f"SequenceData.{setting}", value, words=words)
        found = read(path, origin)
        for name, count in (("features", found.x[0].shape[1]), ("num_classes", len(found.names))):
            # The held-out part may lack the last classes, which .npz files do not name.
            fewer = setting != "source" and path.suffix == ".npz" and name == "num_classes"
            wanted = getattr(self, name)
            if count > wanted if fewer else count != wanted:
                raise UserError(
                    f"SequenceData.{name} = {wanted}, but {origin} has {count}; set "
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
        """Return the offset to subtract from vectors and the scale to divide them by."""
        if self.scaling == "none":
            return 0.0, 1.0
        train = np.repeat(~held, [len(x_TF) for x_TF in found.x])
        return standard(np.concatenate(found.x), train)
