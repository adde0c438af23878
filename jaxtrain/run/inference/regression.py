"""Regression outputs and autoencoder reconstructions."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.errors import UserError
from jaxtrain.data.vectors.source import VectorData
from jaxtrain.models.model import Model, vector_model
from jaxtrain.run.inference.vectors import vectors_of


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """The regression outputs of one vector.

    Attributes:
      name: the file and the vector's number there, or that of an array.
      numbers: float32 [K], in the units of the data; of an autoencoder the vector again.
      squared_error: of an autoencoder the mean of what the scaled numbers are off by, squared: the
        loss of this one vector.
    """

    name: str
    numbers: np.ndarray
    squared_error: float | None = None

    def __str__(self) -> str:
        # As few digits as tell the float32 numbers apart.
        content: dict[str, Any] = {
            "input": self.name, "numbers": [float(str(number)) for number in self.numbers]
        }  # fmt: skip
        if self.squared_error is not None:
            content["squared_error"] = self.squared_error
        return json.dumps(content, ensure_ascii=False)


def numbers_of(
    given: Sequence[Any],
    model: Model,
    data: object,
    told: Callable[[np.ndarray], np.ndarray],
    *,
    again: bool,
) -> Iterator[Numbers]:
    """The numbers of each vector, prepared as in evaluation.

    Args:
      given: as of `vectors_of`.
      model: the model's settings.
      data: what it was trained on: how vectors are scaled.
      told: vectors [N, D] -> the model's outputs, [N, K].
      again: whether it reconstructs the vectors themselves.

    Raises:
      UserError: as of `vectors_of`; the data are no vectors.
    """
    sizes = vector_model(model)
    if not isinstance(data, VectorData):
        raise UserError(
            f"predict: {type(model).__name__} reads vectors, and Train.data=@"
            f"{type(data).__name__}() does not say how they are scaled; use @VectorData()"
        )
    called, table = vectors_of(given, sizes)
    vectors = data.prepare(table)
    found = told(vectors)
    if not again:
        yield from map(Numbers, called, data.numbers_again(found))
        return
    errors = np.square(found - vectors).mean(-1)
    for name, numbers, error in zip(called, data.vectors_again(found), errors, strict=True):
        yield Numbers(name, numbers, float(error))
