"""Files of time series: NumPy `.npz` and `.ts`.

Source of the second: the format of Bagnall et al. 2018, "The UEA multivariate time series
classification archive" (arXiv 1811.00075).
Letters: N examples, T places, F features.
"""

from typing import NamedTuple

import numpy as np

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.data.classed_rows import Labels
from jaxtrain.data.vectors.npz import read_npz


class Series(NamedTuple):
    """Sequences and their labels.

    Attributes:
      x: each, float64 [T, F].
      labels: of each sequence, or of each of its positions; empty where the file has none.
      names: of the classes, by label.
    """

    x: list[np.ndarray]
    labels: list[Labels]
    names: tuple[str, ...]


def read(path: Place, said: str, *, labelled: bool = True) -> Series:
    """The sequences of a file.

    Args:
      path: the file, `.npz` or `.ts`.
      said: what names it, for messages.
      labelled: whether labels are read, which have to be there then.

    Raises:
      UserError: it is neither, holds something else than numbers, or no labels.
    """
    if path.suffix == ".npz":
        found = _npz(path, said, labelled=labelled)
    elif path.suffix == ".ts":
        found = _ts(path, said, labelled=labelled)
    else:
        raise UserError(f"{said}: it takes a .npz or a .ts file of sequences")
    if not found.x:
        raise UserError(f"{said}: there is no sequence in it")
    features = found.x[0].shape[1]
    for number, x_TF in enumerate(found.x):
        if not x_TF.size or x_TF.shape[1] != features:
            raise UserError(
                f"{said}: sequence {number} has the shape {list(x_TF.shape)}; use at least one "
                f"place, and {features} features as in the first"
            )
        if not np.isfinite(x_TF).all():
            raise UserError(f"{said}: sequence {number} has what is no finite number")
    return found


def _npz(path: Place, said: str, *, labelled: bool) -> Series:
    try:
        arrays = read_npz(path, ["x", "y"] if labelled else ["x"], optional=["lengths"])
        x, y = arrays["x"].astype(np.float64), arrays.get("y", np.zeros((), int))
        lengths = arrays.get("lengths")
    except (ValueError, TypeError) as error:
        wanted = "arrays of numbers x and y" if labelled else "an array of numbers x"
        raise UserError(f"{said}: it holds no {wanted}: {error}") from error
    if x.ndim == 2:
        x = x[..., None]
    if x.ndim != 3:
        raise UserError(
            f"{said} has x {list(x.shape)}; use [examples, places, features], or [examples, places]"
        )
    lengths = np.full(len(x), x.shape[1]) if lengths is None else lengths
    whole = np.issubdtype(lengths.dtype, np.integer) and lengths.shape == x.shape[:1]
    if not whole or (lengths < 1).any() or (lengths > x.shape[1]).any():
        raise UserError(
            f"{said}: lengths are {lengths.dtype} {list(lengths.shape)}; use {len(x)} integers "
            f"from 1 to {x.shape[1]}, the places of each example"
        )
    x_of_each = [x_TF[:length] for x_TF, length in zip(x, lengths, strict=True)]
    if not labelled:
        return Series(x_of_each, [], ())
    least = 0 if y.ndim == 1 else -1
    if y.shape not in (x.shape[:1], x.shape[:2]) or (y != np.floor(y)).any() or y.min() < least:
        raise UserError(
            f"{said} has y {list(y.shape)}; use labels 0, 1, ... of [examples], or of [examples, "
            "places] with -1 where there is none"
        )
    y, names = y.astype(np.int32), tuple(str(label) for label in range(int(y.max()) + 1))
    if y.ndim == 1:
        return Series(x_of_each, [int(label) for label in y], names)
    return Series(x_of_each, [row[:length] for row, length in zip(y, lengths, strict=True)], names)


def _ts(path: Place, said: str, *, labelled: bool) -> Series:
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{said} is no text in UTF-8: {error}") from error
    header, x, labels, begun = dict[str, list[str]](), list[np.ndarray](), list[Labels](), False
    names, has_labels = tuple[str, ...](), False
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        where = f"{said}: line {number}"
        if not line or line.startswith("#"):
            continue
        if not begun:
            word, *values = line.split()
            begun = word.lower() == "@data"
            header[word.lower()] = values
            if not begun:
                continue
            if _is_true(header.get("@timestamps")):
                raise UserError(f"{said} has times beside its numbers; use one without")
            has_labels = _is_true(header.get("@classlabel"))
            names = tuple(header.get("@classlabel", [])[1:])
            if labelled and not names:
                raise UserError(
                    f"{said} names no classes: its header has no '@classLabel true ...'"
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
    if not begun:
        raise UserError(f"{said}: there is no line '@data' in it")
    return Series(x, labels, names)


def _is_true(values: list[str] | None) -> bool:
    return bool(values) and values[0].lower() == "true"


def _of_parts(parts: list[str], where: str) -> np.ndarray:
    """One sequence [T, F], each feature's numbers behind each other."""
    if not parts:
        raise UserError(f"{where} has a class and no values; write VALUES:CLASS, or remove it")
    try:
        rows = [[float(value) for value in part.split(",")] for part in parts]
    except ValueError as error:
        raise UserError(f"{where}: {error}; use numbers, none of them missing") from error
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        raise UserError(
            f"{where} has features of {lengths[0]} and of {lengths[-1]} numbers; use as many of "
            "each"
        )
    return np.array(rows, np.float64).T
