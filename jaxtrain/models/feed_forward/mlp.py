"""Multilayer perceptron; the smallest are linear and logistic regression.

Source: Rumelhart, Hinton and Williams 1986, "Learning representations by back-propagating errors".
Letters: B batch, D features, O outputs.
"""

import dataclasses
import itertools
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs, Unstacked
from jaxtrain.nn.dropout import dropout, validate_rate
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import ACTIVATIONS, Activation, Dense, multiply_adds, validate_widths
from jaxtrain.nn.parameters import GLOROT, InitializerName, initializer_of
from jaxtrain.parallel.gathering import dtype_of
from jaxtrain.parallel.sharding import shard


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP(Unstacked):
    """Sizes of a multilayer perceptron.

    Attributes:
      widths: sizes of the input, of every hidden layer, and of the output: classes, or regression
        outputs. (64, 10) is logistic regression, (10, 1) trained to 'regression' linear regression.
      activation: activation function between layers.
      dropout: dropout rate of the hidden layers.
      initializer: initializer of all weights except the last layer's; None: 'glorot_normal' if the
        activation is 'sigmoid' or 'tanh', else 'he_normal'.
      objective: 'classification' of labels, or 'regression'.
    """

    widths: tuple[int, ...] = (784, 128, 10)
    activation: Activation = "relu"
    dropout: float = 0.0
    initializer: InitializerName | None = None
    objective: Literal["classification", "regression"] = "classification"

    inputs: ClassVar[Inputs] = "vectors"
    # Its layers differ in shape: they are not stacked.
    settings: ClassVar[dict[str, str]] = {"fan_in": "widths", "fan_out": "widths"}

    def __post_init__(self) -> None:
        validate_widths(self, self.widths)
        validate_rate(self, "dropout", self.dropout)

    @property
    def features(self) -> int:
        """Size of an input."""
        return self.widths[0]

    @property
    def outputs(self) -> int:
        """Number of classes, or of regression outputs."""
        return self.widths[-1]

    def build(self, key: jax.Array) -> "MLPModel":
        """Return the newly initialized module."""
        return MLPModel(self, key)

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one vector: 3 x 2 x the multiply-adds of the layers."""
        del shape
        return 6.0 * multiply_adds(self.widths)


class MLPModel(nnx.Module):
    """Vectors to logits or regression outputs."""

    def __init__(self, sizes: MLP, key: jax.Array) -> None:
        pairs = list(itertools.pairwise(sizes.widths))
        *keys, key_head = jax.random.split(key, len(pairs))
        init = initializer_of(sizes.initializer, sizes.activation)
        hidden = zip(keys, pairs[:-1], strict=True)
        self.layers = nnx.List([Dense(k, *pair, init) for k, pair in hidden])
        self.head = Dense(key_head, *pairs[-1], GLOROT, role="output")
        self.activation, self.dropout = ACTIVATIONS[sizes.activation], sizes.dropout

    def __call__(
        self, x_BD: jax.Array, statistics: Any, execution: Execution, *, train: bool
    ) -> tuple[jax.Array, Any]:
        """Outputs [B, O]; as in `Predictor`."""
        del train
        x_BD = shard(x_BD.astype(dtype_of(self.head.weight)), ("batch", "fan_in"))
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x_BD = self.activation(layer(x_BD, execution))
                x_BD = dropout(x_BD, self.dropout, execution.draws, i)
        with jax.named_scope("head"):
            return self.head(x_BD, execution), statistics
