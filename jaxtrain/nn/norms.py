"""Norm layers with parameters: RMSNorm, LayerNorm."""

import dataclasses
from typing import Protocol

import jax

from jaxtrain.nn.layers import layer_norm, rms_norm
from jaxtrain.nn.parameters import Weights, constant, param


class Norm(Protocol):
    """A norm over the last dimension of what it is given."""

    def weights(self, key: jax.Array) -> Weights:
        """Freshly made parameters."""
        ...

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """The normed x, in its dtype."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root-mean-square normalization with a scale.

    Attributes:
      dim: numbers that are normed.
      epsilon: what their mean square is added to.
      offset: what is added to the scale: with 1, a parameter of 0 leaves what is normed (Gemma).
    """

    dim: int
    epsilon: float
    offset: float = 0.0

    def weights(self, key: jax.Array) -> Weights:
        """Scales of 1, the offset with them."""
        one = constant(1.0 - self.offset)
        return {"scale": param(key, (self.dim,), ("vector",), one, role="norm")}

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """The normed x."""
        return rms_norm(x, own["scale"], epsilon=self.epsilon, offset=self.offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """Layer normalization with a scale and a bias."""

    dim: int
    epsilon: float

    def weights(self, key: jax.Array) -> Weights:
        """Scales of 1 and biases of 0."""
        return {
            "scale": param(key, (self.dim,), ("vector",), constant(1.0), role="norm"),
            "bias": param(key, (self.dim,), ("vector",), constant(0.0), role="norm"),
        }

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """The normed x."""
        return layer_norm(x, own["scale"], own["bias"], epsilon=self.epsilon)
