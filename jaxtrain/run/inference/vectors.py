"""Feature-vector input of `predict`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.source import existing_path
from jaxtrain.data.vectors.source import read_vectors
from jaxtrain.models.model import VectorModel


def vectors_of(given: Sequence[Any], model: VectorModel) -> tuple[list[str], np.ndarray]:
    """What each vector is called, and all of them [N, D] as they are.

    Args:
      given: .npz or .csv files, or arrays [D] or [n, D]; at least one.
      model: that reads them.

    Raises:
      UserError: one of them is neither, cannot be read, or has not the model's numbers.
    """
    called, tables, arrays = list[str](), list[np.ndarray](), 0
    for source in given:
        if isinstance(source, np.ndarray):
            name, table, first = "vector", np.atleast_2d(source), arrays
            arrays += len(table)
        elif isinstance(source, str) or hasattr(source, "__fspath__"):
            path = existing_path("predict INPUT", str(source))
            name, first = str(path), 0
            table = read_vectors(path, f"predict INPUT = {str(path)!r}")
        else:
            raise UserError(f"predict: {type(model).__name__} reads vectors, and an image is none")
        if table.shape[1] != model.features:
            raise UserError(
                f"predict: {name} has vectors of {table.shape[1]} numbers; "
                f"{type(model).__name__} reads {model.features}"
            )
        called += [f"{name} {first + number}" for number in range(1, len(table) + 1)]
        tables.append(table)
    return called, np.concatenate(tables)
