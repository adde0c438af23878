"""Autoencoder: vectors through a bottleneck and back.

Source: Hinton and Salakhutdinov 2006, "Reducing the Dimensionality of Data with Neural Networks",
without its pre-training.
Letters: B batch, D features, K size of the code.
"""

import dataclasses
import itertools
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs, Unstacked
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import ACTIVATIONS, Activation, Dense, multiply_adds, validate_widths
from jaxtrain.nn.parameters import GLOROT, InitializerName, initializer_of
from jaxtrain.parallel.gathering import dtype_of
from jaxtrain.parallel.sharding import shard


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Autoencoder(Unstacked):
    """Sizes of an autoencoder.

    Attributes:
      widths: sizes of a vector, of every hidden layer, and of the code; the decoder has the same
        in reverse: (784, 64, 3) is 784-64-3-64-784.
      activation: activation function between layers; none at the code.
      reaches: output activation: 'sigmoid' for values from 0 to 1, such as pixels; 'linear' for
        any.
      initializer: initializer of all weights except the last layer's; None: 'glorot_normal' if the
        activation is 'sigmoid' or 'tanh', else 'he_normal'.
    """

    widths: tuple[int, ...] = (784, 64, 3)
    activation: Activation = "relu"
    reaches: Literal["sigmoid", "linear"] = "sigmoid"
    initializer: InitializerName | None = None

    inputs: ClassVar[Inputs] = "vectors"
    objective = "reconstruction"
    settings: ClassVar[dict[str, str]] = {"fan_in": "widths", "fan_out": "widths"}

    def __post_init__(self) -> None:
        validate_widths(self, self.widths)

    @property
    def features(self) -> int:
        """Size of a vector."""
        return self.widths[0]

    @property
    def outputs(self) -> int:
        """Output size, equal to the input size."""
        return self.widths[0]

    def build(self, key: jax.Array) -> "AutoencoderModel":
        """Return the newly initialized module."""
        return AutoencoderModel(self, key)

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one vector: 3 x 2 x the multiply-adds of encoder and decoder."""
        del shape
        return 12.0 * multiply_adds(self.widths)


class AutoencoderModel(nnx.Module):
    """Vectors to vectors."""

    def __init__(self, sizes: Autoencoder, key: jax.Array) -> None:
        pairs = list(itertools.pairwise(sizes.widths))
        key_there, key_back, key_head = jax.random.split(key, 3)
        init = initializer_of(sizes.initializer, sizes.activation)

        def layers(key: jax.Array, pairs: list[tuple[int, int]]) -> list[Dense]:
            drawn = zip(jax.random.split(key, len(pairs)), pairs, strict=True)
            return [Dense(k, *pair, init) for k, pair in drawn]

        back = [(outputs, inputs) for inputs, outputs in reversed(pairs)]
        self.encoder = nnx.List(layers(key_there, pairs))
        self.decoder = nnx.List(layers(key_back, back[:-1]))
        self.head = Dense(key_head, *back[-1], GLOROT, role="output")
        self.activation, self.reaches = ACTIVATIONS[sizes.activation], sizes.reaches

    def encode(self, x_BD: jax.Array, execution: Execution) -> jax.Array:
        """Return the codes [B, K]."""
        x_BD = shard(x_BD.astype(dtype_of(self.head.weight)), ("batch", "fan_in"))
        for i, layer in enumerate(self.encoder):
            x_BD = layer(self.activation(x_BD) if i else x_BD, execution)
        return x_BD

    def decode(self, x_BK: jax.Array, execution: Execution) -> jax.Array:
        """Return the vectors [B, D] of codes."""
        for i, layer in enumerate((*self.decoder, self.head)):
            x_BK = layer(self.activation(x_BK) if i else x_BK, execution)
        return jax.nn.sigmoid(x_BK) if self.reaches == "sigmoid" else x_BK

    def __call__(
        self, x_BD: jax.Array, statistics: Any, execution: Execution, *, train: bool
    ) -> tuple[jax.Array, Any]:
        """Vectors [B, D]; as in `Predictor`."""
        del train
        with jax.named_scope("encoder"):
            code_BK = self.encode(x_BD, execution)
        with jax.named_scope("decoder"):
            return self.decode(code_BK, execution), statistics
