"""One architecture a file: a frozen dataclass of sizes and a module that is only mathematics."""

from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from flax import nnx


@runtime_checkable
class Model(Protocol):
    """What the trainer needs of an architecture's settings: every file here has one such class.

    Attributes:
      objective: a name in `loss.OBJECTIVES`: what the model is trained to do.
      settings: logical axis -> the field that gives it its size, for messages.
    """

    objective: ClassVar[str]
    settings: ClassVar[dict[str, str]]

    def build(self, key: jax.Array) -> nnx.Module:
        """The module with freshly drawn parameters."""
        ...


def attends(model: Any) -> bool:
    """Whether a model's settings are of one with attention: then it has heads."""
    return hasattr(model, "num_heads")
