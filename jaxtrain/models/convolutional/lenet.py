"""LeNet-5 and similar networks: two convolutions with pooling, and three layers.

Source: LeCun et al. 1998, "Gradient-Based Learning Applied to Document Recognition", figure 2, with
every feature map connected to all before it and a softmax at the end.
"""

import dataclasses
from typing import ClassVar, Literal

import jax

from jaxtrain.config.errors import require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs, Unstacked
from jaxtrain.nn.convnet import ConvNet, Convolution, Plan, Pooling, flops, validate_side
from jaxtrain.nn.layers import ACTIVATIONS, Activation
from jaxtrain.nn.parameters import InitializerName, initializer_of

SIDE = 5  # output size for 28 with padding 2, and for 32 without


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LeNet(Unstacked):
    """Sizes of a LeNet; the defaults are LeNet-5 for MNIST's 28 pixels.

    The usual course network for CIFAR-10 (conv 6, pool, conv 16, pool, 120-84-10) has channels=3,
    padding=0, activation='relu' and pooling='max'.

    Attributes:
      num_classes: number of classes.
      channels: channels of the images: 3 for RGB, 1 for gray.
      filters: channels of the two 5x5 convolutions.
      hidden: widths of the two layers before the classifier.
      padding: pixels of zeros around the image: 2 for 28 pixels, 0 for 32. Other sizes are
        mean-pooled to 5 x 5 before the layers.
      activation: activation function after every convolution and hidden layer.
      pooling: pooling over 2x2 pixels.
      initializer: initializer of all weights except the last layer's; None: 'glorot_normal' if the
        activation is 'sigmoid' or 'tanh', else 'he_normal'.
    """

    num_classes: int = 10
    channels: int = 1
    filters: tuple[int, int] = (6, 16)
    hidden: tuple[int, int] = (120, 84)
    padding: int = 2
    activation: Activation = "tanh"
    pooling: Literal["average", "max"] = "average"
    initializer: InitializerName | None = None

    inputs: ClassVar[Inputs] = "images"
    objective = "classification"
    least_pixels = 16
    settings: ClassVar[dict[str, str]] = {"fan_in": "hidden", "fan_out": "hidden"}

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_classes", "channels")
        require_at_least(0, self, "padding")

    @property
    def plan(self) -> Plan:
        """The convolutions and poolings."""
        first, second = self.filters
        pooling = Pooling(kind=self.pooling)
        return (
            Convolution(self.channels, first, size=5, padding=self.padding), pooling,
            Convolution(first, second, size=5, padding=0), pooling,
        )  # fmt: skip

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the fully connected layers."""
        return *self.hidden, self.num_classes

    def build(self, key: jax.Array) -> ConvNet:
        """Return the newly initialized module."""
        return ConvNet(
            self.plan, key, side=SIDE, widths=self.widths, rates=(0, 0, 0),
            activation=ACTIVATIONS[self.activation],
            init=initializer_of(self.initializer, self.activation),
        )  # fmt: skip

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one image; UserError if it is too small."""
        validate_side(self, self.plan, min(shape[:2]))
        return flops(self.plan, SIDE, self.widths, shape)
