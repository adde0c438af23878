"""VGG: stacks of 3x3 convolutions between poolings, and three fully connected layers.

Source: Simonyan and Zisserman 2014 (arXiv 1409.1556), table 1, columns A, B, D and E; with batch
norms as in torchvision.
"""

import dataclasses
from typing import ClassVar, Literal

import jax

from jaxtrain.config.errors import require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs, Unstacked
from jaxtrain.nn.convnet import (
    ConvNet,
    Convolution,
    NormKind,
    Plan,
    Pooling,
    convolutions_of,
    flops,
    norm_of,
    validate_norm,
    validate_side,
)
from jaxtrain.nn.dropout import validate_rate
from jaxtrain.nn.parameters import InitializerName, initializer_of

SIDE = 7  # output size for 224

_PER_STAGE = {
    11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4),
}  # fmt: skip


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class VGG(Unstacked):
    """Sizes of a VGG; the defaults are VGG-16 for ImageNet.

    Attributes:
      depth: layers with weights.
      num_classes: number of classes.
      channels: channels of the images: 3 for RGB, 1 for gray.
      norm: normalization after each convolution: over the batch, or over each image by itself,
        its channels in groups, separately ('instance') or all together ('layer'); None: none.
      norm_groups: groups of channels for norm='group'; None is 32.
      width: channels of the first stage; the others have 2, 4, 8 and 8 times as many.
      head_width: width of the two layers before the classifier.
      dropout: dropout rate of the last two layers' inputs.
      initializer: initializer of all weights except the last layer's; None: 'he_normal'.
    """

    depth: Literal[11, 13, 16, 19] = 16
    num_classes: int = 1000
    channels: int = 3
    norm: NormKind | None = None
    norm_groups: int | None = None
    width: int = 64
    head_width: int = 4096
    dropout: float = 0.5
    initializer: InitializerName | None = None

    inputs: ClassVar[Inputs] = "images"
    objective = "classification"
    least_pixels = 32
    settings: ClassVar[dict[str, str]] = {"fan_in": "width", "fan_out": "width"}

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_classes", "channels", "width", "head_width")
        validate_rate(self, "dropout", self.dropout)
        validate_norm(self, convolutions_of(self.plan))

    @property
    def plan(self) -> Plan:
        """The convolutions and poolings."""
        plan, channels_in = [], self.channels
        for times, count in zip((1, 2, 4, 8, 8), _PER_STAGE[self.depth], strict=True):
            for _ in range(count):
                plan.append(Convolution(channels_in, times * self.width))
                channels_in = times * self.width
            plan.append(Pooling())
        return plan

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the fully connected layers."""
        return self.head_width, self.head_width, self.num_classes

    def build(self, key: jax.Array) -> ConvNet:
        """Return the newly initialized module."""
        return ConvNet(
            self.plan, key, side=SIDE, widths=self.widths, rates=(0, self.dropout, self.dropout),
            norm=norm_of(self), init=initializer_of(self.initializer, "relu"),
        )  # fmt: skip

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one image; UserError if it is too small."""
        validate_side(self, self.plan, min(shape[:2]))
        return flops(self.plan, SIDE, self.widths, shape)
