"""ResNet for images: the ImageNet form (18 to 152, v1.5) and the CIFAR form (20, 32, 56).

Sources: He et al. 2015, "Deep Residual Learning" (arXiv 1512.03385), tables 1 and 6. v1.5: the
stride of a bottleneck is in its 3x3 convolution, as in torchvision. A shortcut whose shape
changes is a 1x1 convolution in both forms (option B of section 4.2).
Letters: B batch, H height, W width, C channels or classes.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.errors import UserError, require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs, Unstacked
from jaxtrain.nn.convolution import convolution, max_pool
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.normalization import BatchNorm
from jaxtrain.nn.parameters import constant, normal, param
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import shard

PIXELS = ("batch", "height", "width")
IMAGES = (*PIXELS, "channels_in")
KERNEL = ("height", "width", "channels_in", "channels")
# He initialization (arXiv 1502.01852) with the fan of the outputs, as torchvision draws it.
HE_NORMAL = jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")

# Of the ImageNet form.
BLOCKS_PER_STAGE = {
    18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3),
}  # fmt: skip
BOTTLENECKS = (50, 101, 152)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """One convolution: a square kernel of `size`, its stride and its channels."""

    size: int
    stride: int
    channels_in: int
    channels: int


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The convolutions of one residual block; the shortcut is None where it is the identity."""

    convolutions: tuple[Convolution, ...]
    shortcut: Convolution | None


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet(Unstacked):
    """Sizes of a ResNet; the defaults are ResNet-50 for ImageNet.

    Attributes:
      depth: 18, 34, 50, 101, 152: stem 7x7/2 and 3x3/2 max pooling, four stages (bottlenecks from
        50 on); 20, 32, 56: stem 3x3, three stages of (depth - 2) / 6 basic blocks, for images of
        about 32 pixels.
      num_classes: number of classes.
      channels: channels of the images: 3 for RGB, 1 for gray.
      width: channels of the first stage, doubled from stage to stage; None is the published width
        (64, or 16 for 20, 32, 56).
      zero_init_residual: initialize the last norm scale of every block to 0, so that a block starts
        as its shortcut (arXiv 1706.02677, section 5.1): for large batches; short runs start slower.
      norm_momentum: weight of a new batch in the running statistics (PyTorch's momentum).
      norm_eps: epsilon of the batch norms.
    """

    depth: Literal[18, 34, 50, 101, 152, 20, 32, 56] = 50
    num_classes: int = 1000
    channels: int = 3
    width: int | None = None
    zero_init_residual: bool = False
    norm_momentum: float = 0.1
    norm_eps: float = 1e-5

    inputs: ClassVar[Inputs] = "images"
    objective = "classification"
    # The setting of each logical axis's size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "channels": "width",
        "channels_in": "width",
        "classes": "num_classes",
        "fan_out": "width",
    }

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_classes", "channels", "width")
        require_positive(self, "norm_eps")
        if not 0 < self.norm_momentum <= 1:
            raise UserError(f"ResNet.norm_momentum={self.norm_momentum}; use above 0, at most 1")

    @property
    def for_imagenet(self) -> bool:
        """Whether this is the form for large images: strided stem, pooling, four stages."""
        return self.depth in BLOCKS_PER_STAGE

    @property
    def least_pixels(self) -> int:
        """Stem and four stages halve the size five times, three stages twice."""
        return 32 if self.for_imagenet else 8

    @property
    def first_width(self) -> int:
        """Channels of the first stage."""
        return self.width or (64 if self.for_imagenet else 16)

    @property
    def stem(self) -> Convolution:
        """The first convolution."""
        size, stride = (7, 2) if self.for_imagenet else (3, 1)
        return Convolution(size, stride, self.channels, self.first_width)

    @property
    def features(self) -> int:
        """Channels after the last block."""
        return self.blocks()[-1].convolutions[-1].channels

    def blocks(self) -> list[BlockPlan]:
        """Return all residual blocks, in order."""
        counts = BLOCKS_PER_STAGE.get(self.depth, ((self.depth - 2) // 6,) * 3)
        plans, channels_in = [], self.first_width
        for stage, count in enumerate(counts):
            width = self.first_width * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                plans.append(self._block(channels_in, width, stride))
                channels_in = plans[-1].convolutions[-1].channels
        return plans

    def _block(self, channels_in: int, width: int, stride: int) -> BlockPlan:
        if self.depth in BOTTLENECKS:
            channels = 4 * width
            convolutions = (
                Convolution(1, 1, channels_in, width),
                Convolution(3, stride, width, width),
                Convolution(1, 1, width, channels),
            )
        else:
            channels = width
            convolutions = (
                Convolution(3, stride, channels_in, width),
                Convolution(3, 1, width, width),
            )
        same = stride == 1 and channels_in == channels
        shortcut = None if same else Convolution(1, stride, channels_in, channels)
        return BlockPlan(convolutions, shortcut)

    def build(self, key: jax.Array) -> "ResNetModel":
        """Return the newly initialized module."""
        return ResNetModel(self, key)

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs per image (H, W, C): 3 x 2 x the multiply-adds of convolutions and head.

        The backward pass costs two forward passes; norms and pooling are not counted. The forward
        pass of ResNet-50 at 224 x 224 is 4.09e9 multiply-adds.
        """
        height, width = shape[:2]

        def run(convolution: Convolution, height: int, width: int) -> tuple[int, int, int]:
            height, width = -(-height // convolution.stride), -(-width // convolution.stride)
            weights = convolution.size**2 * convolution.channels_in * convolution.channels
            return height * width * weights, height, width

        total, height, width = run(self.stem, height, width)
        if self.for_imagenet:
            height, width = -(-height // 2), -(-width // 2)
        for block in self.blocks():
            if block.shortcut is not None:
                total += run(block.shortcut, height, width)[0]
            for plan in block.convolutions:
                multiply_adds, height, width = run(plan, height, width)
                total += multiply_adds
        return 3.0 * 2.0 * (total + self.features * self.num_classes)


class NormedConvolution(BatchNorm):
    """A convolution without bias, then batch normalization (arXiv 1502.03167).

    Output channels are split over `tensor`; input channels are gathered.

    `__call__` maps activations [B, H, W, C_in] and this norm's running statistics to activations
    [B, H/stride, W/stride, C] and new running statistics.
    """

    def __init__(
        self, sizes: ResNet, plan: Convolution, key: jax.Array, *, scale: float = 1.0
    ) -> None:
        C, momentum, epsilon = plan.channels, sizes.norm_momentum, sizes.norm_eps
        super().__init__(key, C, "fan_out", momentum=momentum, epsilon=epsilon, scale=scale)
        self.kernel = param(key, (plan.size, plan.size, plan.channels_in, C), KERNEL, HE_NORMAL)
        self.stride = plan.stride

    def __call__(
        self, x_BHWC: jax.Array, statistics: Any, *, train: bool
    ) -> tuple[jax.Array, dict[str, nnx.Variable]]:
        kernel = gather(self.kernel)
        x_BHWC = shard(x_BHWC, IMAGES).astype(kernel.dtype)
        x_BHWC = convolution(x_BHWC, kernel, self.stride)
        return self.apply(x_BHWC, statistics, train=train)


class Block(nnx.Module):
    """relu(convolutions(x) + shortcut(x)), a relu between the convolutions."""

    def __init__(self, sizes: ResNet, plan: BlockPlan, key: jax.Array) -> None:
        keys = jax.random.split(key, len(plan.convolutions) + 1)
        last = 0.0 if sizes.zero_init_residual else 1.0
        *first_plans, last_plan = plan.convolutions
        convolutions = [
            NormedConvolution(sizes, p, k) for p, k in zip(first_plans, keys[1:-1], strict=True)
        ]
        convolutions.append(NormedConvolution(sizes, last_plan, keys[-1], scale=last))
        self.convolutions = nnx.List(convolutions)
        self.shortcut = (
            None if plan.shortcut is None else NormedConvolution(sizes, plan.shortcut, keys[0])
        )

    def __call__(
        self, x_BHWC: jax.Array, statistics: Any, *, train: bool
    ) -> tuple[jax.Array, dict[str, Any]]:
        h_BHWC, new = x_BHWC, {"convolutions": {}}
        for i, normed in enumerate(self.convolutions):
            h_BHWC = jax.nn.relu(h_BHWC) if i else h_BHWC
            h_BHWC, new["convolutions"][i] = normed(
                h_BHWC, statistics["convolutions"][i], train=train
            )
        if self.shortcut is not None:
            x_BHWC, new["shortcut"] = self.shortcut(x_BHWC, statistics["shortcut"], train=train)
        x_BHWC = shard(x_BHWC, (*PIXELS, "channels"))
        return jax.nn.relu(h_BHWC + x_BHWC), new


class ResNetModel(nnx.Module):
    """Images to logits; running statistics are arguments and results."""

    def __init__(self, sizes: ResNet, key: jax.Array) -> None:
        plans = sizes.blocks()
        key_stem, key_head, *keys = jax.random.split(key, len(plans) + 2)
        self.stem = NormedConvolution(sizes, sizes.stem, key_stem)
        self.blocks = nnx.List([Block(sizes, p, k) for p, k in zip(plans, keys, strict=True)])
        # The head of arXiv 1706.02677, section 5.1.
        shape, axes = (sizes.features, sizes.num_classes), ("channels", "classes")
        self.head = param(key_head, shape, axes, normal(0.01), role="output")
        self.head_bias = param(key_head, shape[1:], axes[1:], constant(0.0))
        self.pooled_stem = sizes.for_imagenet

    def __call__(
        self, images_BHWC: jax.Array, statistics: nnx.State, execution: Execution, *, train: bool
    ) -> tuple[jax.Array, nnx.State]:
        """Logits [B, C]; as in `Predictor`. Images are cast to the dtype of the kernels."""
        del execution  # layers of a CNN differ in shape: they are not stacked
        x_BHWC = images_BHWC
        new: dict[str, Any] = {"blocks": {}}
        with jax.named_scope("stem"):
            x_BHWC, new["stem"] = self.stem(x_BHWC, statistics["stem"], train=train)
            x_BHWC = jax.nn.relu(x_BHWC)
            if self.pooled_stem:
                x_BHWC = max_pool(x_BHWC)
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{i}"):
                x_BHWC, new["blocks"][i] = block(x_BHWC, statistics["blocks"][i], train=train)
        with jax.named_scope("head"):
            x_BC = x_BHWC.astype(jnp.float32).mean((1, 2)).astype(x_BHWC.dtype)
            logits_BC = contract("BD,DC->BC", x_BC, self.head, ("batch", "classes"))
            logits_BC = add_bias(logits_BC, self.head_bias)
        return logits_BC, nnx.State(new)
