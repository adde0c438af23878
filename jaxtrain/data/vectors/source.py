"""`VectorData`: a table of features, each row with a label or regression targets.

Tables are scikit-learn's small data sets, images as vectors, or files, held in memory. Letters: N
examples, D features, K regression targets.
"""

import csv
import dataclasses
import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.config.untrusted import MalformedError, open_regular
from jaxtrain.config.values import PathOr
from jaxtrain.data.batch import Batch
from jaxtrain.data.demo import import_sklearn, read_digits
from jaxtrain.data.source import Dataset, check_heldout_fraction, digest, existing_path, is_heldout

_SETTING = "VectorData.source"


class Table(NamedTuple):
    """Examples and their targets.

    Attributes:
      x: float64 [N, D].
      y: float64 [N, K] regression targets, or labels [N, 1].
    """

    x: np.ndarray
    y: np.ndarray


def _sklearn(name: str) -> Table:
    found = vars(import_sklearn(name, _SETTING))[f"load_{name}"]()
    return Table(np.asarray(found.data, np.float64), np.asarray(found.target, np.float64)[:, None])


def _digits(name: str) -> Table:
    pixels, labels = read_digits(name, _SETTING)
    return Table(np.asarray(pixels, np.float64), np.asarray(labels, np.float64)[:, None])


# Each with its number of features and of classes; None: regression.
DEMO: dict[str, Callable[[], Table]] = {
    "digits": lambda: _digits("digits"),  # 1,797 x 64, 10 classes
    "iris": lambda: _sklearn("iris"),  # 150 x 4, 3 classes
    "wine": lambda: _sklearn("wine"),  # 178 x 13, 3 classes
    "breast_cancer": lambda: _sklearn("breast_cancer"),  # 569 x 30, 2 classes
    "diabetes": lambda: _sklearn("diabetes"),  # 442 x 10, one regression target
    "mnist5k": lambda: _digits("mnist5k"),  # 5,000 x 784, 10 classes
}


def read(path: AnyPath, columns: int) -> Table:
    """Read the table of a .npz or .csv file.

    Args:
      path: the file.
      columns: number of target columns, the last of a .csv.

    Raises:
      UserError: it is neither, or has non-numeric values.
    """
    origin = f"VectorData.source = {str(path)!r}"
    if path.suffix == ".npz":
        x, y = _npz(path, origin)
    elif path.suffix == ".csv":
        numbers = _csv(path.read_bytes(), origin)
        x, y = numbers[:, :-columns], numbers[:, -columns:]
    else:
        raise UserError(f"{origin}: it takes a .npz or a .csv file")
    if x.ndim != 2 or not x.size or y.ndim > 2 or len(y) != len(x):
        raise UserError(
            f"{origin} has x {list(x.shape)} and y {list(y.shape)}; use x [examples, features] and "
            "y [examples] or [examples, numbers]"
        )
    y = y.reshape(len(x), -1)
    for name, numbers in (("x", x), ("y", y)):
        rows = np.flatnonzero(~np.isfinite(numbers).all(1))
        if len(rows):
            raise UserError(f"{origin}: {name}[{rows[0]}] has a value that is not finite")
    return Table(x, y)


def read_vectors(path: AnyPath, origin: str) -> np.ndarray:
    """Read vectors [N, D] from a .npz file's array x, or from all columns of a .csv file.

    Args:
      path: the file.
      origin: the file's name in messages.

    Raises:
      UserError: it is neither, or has non-numeric values.
    """
    if path.suffix == ".csv":
        return _csv(path.read_bytes(), origin)
    if path.suffix != ".npz":
        raise UserError(f"{origin}: it takes a .npz or a .csv file of vectors")
    try:
        return np.atleast_2d(read_npz(path, ["x"])["x"].astype(np.float64))
    except (ValueError, TypeError) as error:
        raise UserError(f"{origin}: it holds no array of numbers x: {error}") from error


def _npz(path: AnyPath, origin: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = read_npz(path, ["x", "y"])
        return arrays["x"].astype(np.float64), arrays["y"].astype(np.float64)
    except (ValueError, TypeError) as error:
        raise UserError(f"{origin}: it holds no arrays of numbers x and y: {error}") from error


def _csv(content: bytes, origin: str) -> np.ndarray:
    try:
        rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8"))) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{origin} is not a UTF-8 table: {error}") from error
    if rows and not all(map(_is_number, rows[0])):
        del rows[0]  # names of the columns
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]) or not all(map(_is_number, row)):
            raise UserError(
                f"{origin}: row {number} of numbers is {','.join(row)!r}; use {len(rows[0])} values"
            )
    if not rows:
        raise UserError(f"{origin}: it has no rows of numbers")
    return np.array(rows, np.float64).reshape(len(rows), -1)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorData:
    """Tabular data: vectors of features with labels or regression targets.

    Attributes:
      source: `'digits'` (64 features, 10 classes), `'iris'` (4, 3), `'wine'` (13, 3),
        `'breast_cancer'` (30, 2), `'mnist5k'` (784, 10) or `'diabetes'` (10, one target), all from
        jaxtrain[demo]; a `.npz` file of arrays x and y; or a `.csv` file whose last columns are the
        targets, with or without a line of names.
      features: size of a vector.
      num_classes: number of labels, counted from 0; None for regression.
      num_targets: regression targets of a vector, if `num_classes` is None.
      scaling: 'standard' subtracts the mean of each feature and regression target and divides by
        the standard deviation; 'unit' scales all features together to 0 to 1; 'none' changes
        nothing. Both use statistics of the training part.
      heldout_fraction: share that is held out, evenly spaced over the order, of each class.
    """

    source: Annotated[str, PathOr(tuple(DEMO))] = "digits"
    features: int = 64
    num_classes: int | None = 10
    num_targets: int = 1
    scaling: Literal["none", "standard", "unit"] = "standard"
    heldout_fraction: float = 0.2

    def __post_init__(self) -> None:
        require_at_least(1, self, "features", "num_targets")
        require_at_least(2, self, "num_classes")
        check_heldout_fraction("VectorData.heldout_fraction", self.heldout_fraction)
        if self.num_classes is not None and self.num_targets != 1:
            raise UserError(
                f"VectorData.num_targets={self.num_targets} has no effect with VectorData."
                f"num_classes={self.num_classes}; leave it at 1 or set VectorData.num_classes=None"
            )

    def abstract_batch(self, global_batch_size: int) -> Batch:
        """Return the shapes and dtypes of a batch, for lowering a step without data."""
        rows = (global_batch_size,)
        vectors: Any = jax.ShapeDtypeStruct((*rows, self.features), np.float32)
        labels: Any = jax.ShapeDtypeStruct(rows, np.int32)
        if self.num_classes is None:
            labels = jax.ShapeDtypeStruct((*rows, self.num_targets), np.float32)
        mask: Any = jax.ShapeDtypeStruct(rows, np.float32)
        return Batch(vectors, labels, mask)

    def open(self, *, seed: int) -> Dataset:
        """Read and split the table.

        Raises:
          UserError: no such source, an extra that is not installed, another number of features,
            classes or targets, or a split that would be empty.
        """
        del seed
        table = self._read()
        held = self._hold_out(table)
        if held.all() or not held.any():
            raise UserError(
                f"VectorData.source = {self.source!r}: of its {len(held)} examples {held.sum()} "
                f"would be held out; use more, or another VectorData.heldout_fraction (now "
                f"{self.heldout_fraction})"
            )
        x, y = self._scale_columns(table, ~held)
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k != "source"}
        facts: dict[str, float | int | str] = {
            "source": self.source,
            "features": self.features,
            "train_vectors": int((~held).sum()),
            "heldout_vectors": int(held.sum()),
        }
        if self.num_classes is not None:
            facts["classes"] = self.num_classes
        return Dataset(
            Vectors(x[~held], y[~held]),
            Vectors(x[held], y[held]),
            digest({"kind": "vectors", **settings}, [table.x, table.y]),
            facts,
            None,
            "vectors",
        )

    def _read(self) -> Table:
        if self.source in DEMO:
            table = DEMO[self.source]()
        else:
            path = existing_path("VectorData.source", self.source, words=DEMO)
            table = read(path, 1 if self.num_classes else self.num_targets)
        self._check("features", table.x.shape[1])
        if self.num_classes is None:
            self._check("num_targets", table.y.shape[1])
        else:
            labels, origin = table.y[:, 0], f"VectorData.source = {self.source!r}"
            wrong = (labels < 0) | (labels != np.floor(labels))
            if table.y.shape[1] > 1 or wrong.any():
                raise UserError(
                    f"{origin}: its targets are numbers, not labels 0, 1, ...; set "
                    "VectorData.num_classes = None"
                )
            self._check("num_classes", int(labels.max()) + 1)
        return table

    def _check(self, name: str, found: int) -> None:
        value = vars(self)[name]
        if value != found:
            raise UserError(
                f"VectorData.{name} = {value}, but VectorData.source = {self.source!r} has {found};"
                f" set VectorData.{name} = {found}"
            )

    def prepare(self, x: np.ndarray) -> np.ndarray:
        """Return other vectors [N, D], scaled like this source's.

        Raises:
          UserError: as in `open`.
        """
        table = self._read()
        shift, spread = self._scale(table.x, ~self._hold_out(table))
        return ((x - shift) / spread).astype(np.float32)

    def vectors_again(self, x: np.ndarray) -> np.ndarray:
        """Return prepared vectors [N, D] in the units of this source; raises as `prepare` does."""
        table = self._read()
        shift, spread = self._scale(table.x, ~self._hold_out(table))
        return (x * spread + shift).astype(np.float32)

    def numbers_again(self, y: np.ndarray) -> np.ndarray:
        """Return regression outputs [N, K] in the units of the data."""
        table = self._read()
        shift, spread = self._scale_of_numbers(table.y, ~self._hold_out(table))
        return (y * spread + shift).astype(np.float32)

    def _hold_out(self, table: Table) -> np.ndarray:
        """Return the held-out mask, bool [N]: the same fraction of every class."""
        labels = np.zeros(len(table.x)) if self.num_classes is None else table.y[:, 0]
        held = np.zeros(len(table.x), bool)
        for label in np.unique(labels):
            (of_class,) = np.nonzero(labels == label)
            held[of_class] = is_heldout(len(of_class), self.heldout_fraction)
        return held

    def _scale(self, x: np.ndarray, train: np.ndarray) -> tuple[Any, Any]:
        """Return the offset to subtract from vectors and the scale to divide them by."""
        if self.scaling == "unit":
            least, most = x[train].min(), x[train].max()
            return least, (most - least) or 1.0
        return standard(x, train) if self.scaling == "standard" else (0.0, 1.0)

    def _scale_of_numbers(self, y: np.ndarray, train: np.ndarray) -> tuple[Any, Any]:
        return standard(y, train) if self.scaling == "standard" else (0.0, 1.0)

    def _scale_columns(self, table: Table, train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return x as float32 [N, D] and y as int32 [N] or float32 [N, K], scaled."""
        x, y = table
        shift, spread = self._scale(x, train)
        x = ((x - shift) / spread).astype(np.float32)
        if self.num_classes is not None:
            return x, y[:, 0].astype(np.int32)
        shift, spread = self._scale_of_numbers(y, train)
        return x, ((y - shift) / spread).astype(np.float32)


def standard(x: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each column over these rows, and its standard deviation, or 1 if that is
    0.
    """
    spread = x[train].std(0)
    return x[train].mean(0), np.where(spread > 0, spread, 1)


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Vectors and their targets in memory; implements WholeBatches.

    Attributes:
      x: float32 [N, D].
      y: int32 labels [N], or float32 regression targets [N, K].
    """

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def example(self, index: int, rng: np.random.Generator | None) -> Batch:
        """Return vector `index` [D], its targets and a mask of 1; the same for any `rng`."""
        return Batch(self.x[index], self.y[index], np.ones((), np.float32))

    def examples(self, indices: np.ndarray) -> Batch:
        """Return the examples of these indices, stacked."""
        return Batch(self.x[indices], self.y[indices], np.ones(len(indices), np.float32))


# -- .npz files, untrusted: sizes are checked before decompression ---------------------------------

# An array is decompressed to more than this only if the file has at least a 200th of it: a zip
# "bomb" of 1 MB becomes 1 GB.
_SMALL_BYTES, _MOST_TIMES = 64 << 20, 200
_ENCRYPTED = 1  # a bit of a member's flags
_DAMAGE = (
    ValueError, TypeError, OverflowError, EOFError, NotImplementedError, RuntimeError, OSError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


def read_npz(
    path: AnyPath, names: Iterable[str], *, optional: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """Return some arrays of a file by name.

    Args:
      path: the file.
      names: of arrays that it must have.
      optional: of arrays that it may have.

    Raises:
      MalformedError: it is not such a file, lacks an array, or has one of Python objects or of
        another size than it claims.
      UserError: see `untrusted.open_regular`.
    """
    stream = io.BytesIO(path.read_bytes()) if isinstance(path, BucketPath) else open_regular(path)
    with stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                wanted = [*names, *(name for name in optional if name in there)]
                missing = [name for name in wanted if name not in there]
                if missing:
                    raise MalformedError(f"no array {missing[0]!r} among {', '.join(there)}")
                return {name: _array(archive, there[name]) for name in wanted}
        except MalformedError:
            raise
        except _DAMAGE as error:
            raise MalformedError(str(error) or type(error).__name__) from error


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    if info.flag_bits & _ENCRYPTED:
        raise MalformedError(f"{info.filename} is encrypted")
    if info.file_size > max(_SMALL_BYTES, _MOST_TIMES * info.compress_size):
        raise MalformedError(
            f"{info.filename} unpacks from {info.compress_size:,} to {info.file_size:,} bytes, "
            f"more than {_MOST_TIMES} times as many; write it with numpy.savez"
        )
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in ((1, 0), (2, 0)):
            raise MalformedError(f"{info.filename} has version {version} of the format")
        read = (np.lib.format.read_array_header_1_0 if version == (1, 0)
                else np.lib.format.read_array_header_2_0)  # fmt: skip
        shape, _, dtype = read(member)
        if dtype.hasobject:
            raise MalformedError(f"{info.filename} holds Python objects, which run code")
        # NumPy allocates the header's size before it reads.
        rest = info.file_size - member.tell()
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != rest:
            raise MalformedError(f"{info.filename} has {rest:,} bytes, which are no {list(shape)}")
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)
