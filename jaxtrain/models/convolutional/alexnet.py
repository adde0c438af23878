"""AlexNet: five convolutions and three fully connected layers.

Sources: Krizhevsky et al. 2012, "ImageNet Classification with Deep Convolutional Neural Networks",
in the form of Krizhevsky 2014 (arXiv 1404.5997) for one device, without local response
normalization, as in torchvision.
"""

import dataclasses
from typing import ClassVar

import jax

from jaxtrain.config.errors import require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs, Unstacked
from jaxtrain.nn.convnet import ConvNet, Convolution, Plan, Pooling, flops, validate_side
from jaxtrain.nn.dropout import validate_rate
from jaxtrain.nn.parameters import InitializerName, initializer_of

SIDE = 6  # output size for 224


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class AlexNet(Unstacked):
    """Sizes of an AlexNet; the defaults are those for ImageNet.

    Attributes:
      num_classes: number of classes.
      channels: channels of the images: 3 for RGB, 1 for gray.
      width: channels of the first convolution; the others have 3, 6, 4 and 4 times as many.
      head_width: width of the two layers before the classifier.
      dropout: dropout rate of those layers' inputs.
      initializer: initializer of all weights except the last layer's; None: 'he_normal'.
    """

    num_classes: int = 1000
    channels: int = 3
    width: int = 64
    head_width: int = 4096
    dropout: float = 0.5
    initializer: InitializerName | None = None

    inputs: ClassVar[Inputs] = "images"
    objective = "classification"
    least_pixels = 63
    settings: ClassVar[dict[str, str]] = {"fan_in": "width", "fan_out": "width"}

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_classes", "channels", "width", "head_width")
        validate_rate(self, "dropout", self.dropout)

    @property
    def plan(self) -> Plan:
        """The convolutions and poolings."""
        w, pooling = self.width, Pooling(3, 2)
        return (
            Convolution(self.channels, w, size=11, stride=4, padding=2), pooling,
            Convolution(w, 3 * w, size=5, padding=2), pooling,
            Convolution(3 * w, 6 * w),
            Convolution(6 * w, 4 * w),
            Convolution(4 * w, 4 * w), pooling,
        )  # fmt: skip

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the fully connected layers."""
        return self.head_width, self.head_width, self.num_classes

    def build(self, key: jax.Array) -> ConvNet:
        """Return the newly initialized module."""
        return ConvNet(
            self.plan, key, side=SIDE, widths=self.widths, rates=(self.dropout, self.dropout, 0),
            init=initializer_of(self.initializer, "relu"),
        )  # fmt: skip

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one image; UserError if it is too small."""
        validate_side(self, self.plan, min(shape[:2]))
        return flops(self.plan, SIDE, self.widths, shape)
