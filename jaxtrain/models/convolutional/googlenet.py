"""GoogLeNet (Inception v1): parallel convolutions and auxiliary classifiers.

Source: Szegedy et al. 2014, "Going Deeper with Convolutions" (arXiv 1409.4842), table 1, without
local response normalization; with batch norms as in torchvision. The auxiliary heads pool
to 4 x 4, so that images of any size work.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs, Unstacked
from jaxtrain.nn.convnet import (
    IMAGES,
    Convolution,
    ConvolutionNorm,
    NormKind,
    Pooling,
    convolutions_of,
    norm_of,
    plan_multiply_adds,
    validate_norm,
    validate_side,
)
from jaxtrain.nn.convolution import pool_to
from jaxtrain.nn.dropout import dropout, validate_rate
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import Dense, multiply_adds
from jaxtrain.nn.normalization import Running
from jaxtrain.nn.parameters import InitializerName, initializer_of, normal
from jaxtrain.parallel.sharding import shard

# Of each module: 1x1; 1x1 before 3x3, 3x3; 1x1 before 5x5, 5x5; 1x1 after pooling. None pools.
MODULES = (
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None,
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None,
    (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip
POOLING = Pooling(3, 2, ceil=True)
AROUND = Pooling(3, 1, padding=1)  # inside a module
HEADS_AFTER = (
    3,
    6,
)  # modules before the auxiliary heads: the inputs of the paper's fourth and seventh
HEAD_SIDE, HEAD_CHANNELS, HEAD_WIDTH = 4, 128, 1024


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GoogLeNet(Unstacked):
    """Sizes of a GoogLeNet; the defaults are those for ImageNet.

    Attributes:
      num_classes: number of classes.
      channels: channels of the images: 3 for RGB, 1 for gray.
      norm: normalization after each convolution: over the batch, or over each image by itself,
        its channels in groups, separately ('instance') or all together ('layer'); None: none.
      norm_groups: groups of channels for norm='group'; None is 32.
      width: channels of the first convolution; all others scale with it.
      dropout: dropout rate of the last layer's input.
      auxiliary_dropout: dropout rate of the auxiliary heads.
      initializer: initializer of all weights except the last layers'; None: 'he_normal'.
    """

    num_classes: int = 1000
    channels: int = 3
    norm: NormKind | None = None
    norm_groups: int | None = None
    width: int = 64
    dropout: float = 0.4
    auxiliary_dropout: float = 0.7
    initializer: InitializerName | None = None

    inputs: ClassVar[Inputs] = "images"
    objective = "auxiliary_classification"
    least_pixels = 32
    settings: ClassVar[dict[str, str]] = {"fan_in": "width", "fan_out": "width"}

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_classes", "channels", "width")
        validate_rate(self, "dropout", self.dropout)
        validate_rate(self, "auxiliary_dropout", self.auxiliary_dropout)
        inside = [one for module in self.modules if module is not None for one in module]
        validate_norm(self, (*convolutions_of(self.stem), *inside, self.on_the_way(1)))

    def scale_width(self, count: int) -> int:
        """Scale the paper's channel count by `width`."""
        return max(count * self.width // 64, 1)

    @property
    def stem(self) -> tuple[Convolution | Pooling, ...]:
        """The stem before the first module."""
        w, wide = self.width, self.scale_width(192)
        first = Convolution(self.channels, w, size=7, stride=2, padding=3)
        return first, POOLING, Convolution(w, w, 1, padding=0), Convolution(w, wide), POOLING

    @property
    def modules(self) -> tuple[tuple[Convolution, ...] | None, ...]:
        """The six convolutions of each module; None pools."""
        found, channels = [], self.scale_width(192)
        for counts in MODULES:
            if counts is None:
                found.append(None)
                continue
            one, in3, out3, in5, out5, pooled = map(self.scale_width, counts)
            found.append((
                Convolution(channels, one, 1, padding=0),
                Convolution(channels, in3, 1, padding=0), Convolution(in3, out3),
                Convolution(channels, in5, 1, padding=0), Convolution(in5, out5, 5, padding=2),
                Convolution(channels, pooled, 1, padding=0),
            ))  # fmt: skip
            channels = one + out3 + out5 + pooled
        return tuple(found)

    def on_the_way(self, channels: int) -> Convolution:
        """Return the convolution of an auxiliary head that reads `channels`."""
        return Convolution(channels, self.scale_width(HEAD_CHANNELS), 1, padding=0)

    @property
    def head_width(self) -> int:
        """Width of an auxiliary head's hidden layer."""
        return self.scale_width(HEAD_WIDTH)

    def build_convolution(self, plan: Convolution, key: jax.Array) -> ConvolutionNorm:
        """Return a convolution with the settings' initializer and norm."""
        init = initializer_of(self.initializer, "relu")
        return ConvolutionNorm(plan, key, norm_of(self, epsilon=1e-3), init)

    def build(self, key: jax.Array) -> "GoogLeNetModel":
        """Return the newly initialized module."""
        return GoogLeNetModel(self, key)

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one image, 3 x 2 x the multiply-adds; UserError if too small."""
        poolings = (POOLING,) * MODULES.count(None)
        validate_side(self, (*self.stem, *poolings), min(shape[:2]))
        height, width = shape[:2]
        total = plan_multiply_adds(self.stem, height, width)
        for part in self.stem:
            height, width = part.side(height), part.side(width)
        for i, module in enumerate(self.modules):
            if module is None:
                height, width = POOLING.side(height), POOLING.side(width)
                continue
            total += sum(one.multiply_adds(height, width) for one in module)
            if i in HEADS_AFTER:
                one = self.on_the_way(channels_of(module))
                total += one.multiply_adds(HEAD_SIDE, HEAD_SIDE)
                flat = HEAD_SIDE**2 * one.channels
                total += multiply_adds((flat, self.head_width, self.num_classes))
        if self.norm == "instance" and height * width == 1:
            raise UserError(
                f"GoogLeNet.norm='instance' on images of {shape[0]} x {shape[1]} pixels leaves one "
                "pixel a channel, which is its own mean; use larger images, or norm='group'"
            )
        return 6.0 * (total + channels_of(self.modules[-1]) * self.num_classes)


def channels_of(module: tuple[Convolution, ...] | None) -> int:
    """Output channels of a module."""
    assert module is not None, "a pooling"
    return sum(module[i].channels for i in (0, 2, 4, 5))


class Module(nnx.Module):
    """Inception module: parallel convolutions of three sizes and a pooling; channels are
    concatenated."""

    def __init__(self, sizes: GoogLeNet, plan: tuple[Convolution, ...], key: jax.Array) -> None:
        keys = jax.random.split(key, len(plan))
        self.all = nnx.List(
            [sizes.build_convolution(p, k) for p, k in zip(plan, keys, strict=True)]
        )

    def __call__(self, x: jax.Array, running: Running) -> jax.Array:
        """Activations [B, H, W, C] to activations of the same size, gathered along C."""

        def run(i: int, x: jax.Array) -> jax.Array:
            return jax.nn.relu(self.all[i](x, running))

        x = shard(x, IMAGES)
        branches = run(0, x), run(2, run(1, x)), run(4, run(3, x)), run(5, AROUND(x))
        return jnp.concatenate([shard(branch, IMAGES) for branch in branches], -1)


class Head(nnx.Module):
    """Auxiliary classifier: mean pooling, a convolution and two layers."""

    def __init__(self, sizes: GoogLeNet, channels: int, key: jax.Array) -> None:
        plan, (first, second, third) = sizes.on_the_way(channels), jax.random.split(key, 3)
        self.convolution = sizes.build_convolution(plan, first)
        flat, init = HEAD_SIDE**2 * plan.channels, initializer_of(sizes.initializer, "relu")
        self.dense = Dense(second, flat, sizes.head_width, init)
        self.out = Dense(third, sizes.head_width, sizes.num_classes, normal(0.01))
        self.rate = sizes.auxiliary_dropout

    def __call__(
        self, x: jax.Array, running: Running, execution: Execution, site: int
    ) -> jax.Array:
        """Logits [B, C]."""
        x = jax.nn.relu(self.convolution(pool_to(x, HEAD_SIDE), running))
        x_BD = self.dense(shard(x, IMAGES).reshape(x.shape[0], -1), execution)
        x_BD = dropout(jax.nn.relu(x_BD), self.rate, execution.draws, site)
        return self.out(x_BD, execution)


class GoogLeNetModel(nnx.Module):
    """Images to a tuple of logits: the last head's, and in training those of the auxiliary
    heads."""

    def __init__(self, sizes: GoogLeNet, key: jax.Array) -> None:
        key_stem, key_modules, key_heads, key_head = jax.random.split(key, 4)
        stem = convolutions_of(sizes.stem)
        keys = jax.random.split(key_stem, len(stem))
        self.stem = nnx.List(
            [sizes.build_convolution(p, k) for p, k in zip(stem, keys, strict=True)]
        )
        plans = [plan for plan in sizes.modules if plan is not None]
        keys = jax.random.split(key_modules, len(plans))
        self.modules = nnx.List([Module(sizes, p, k) for p, k in zip(plans, keys, strict=True)])
        keys = zip(HEADS_AFTER, jax.random.split(key_heads), strict=True)
        self.heads = nnx.List([Head(sizes, channels_of(sizes.modules[i]), k) for i, k in keys])
        init = normal(0.01)
        self.head = Dense(key_head, channels_of(plans[-1]), sizes.num_classes, init, role="output")
        self.plan, self.rate = sizes.stem, sizes.dropout

    def __call__(
        self, images_BHWC: jax.Array, statistics: nnx.State, execution: Execution, *, train: bool
    ) -> tuple[tuple[jax.Array, ...], nnx.State]:
        """Logits [B, C], one or three; the rest as in `Predictor`."""
        x, running = images_BHWC, Running(self, statistics, train=train)
        stem, modules, heads, answers = iter(self.stem), iter(self.modules), iter(self.heads), []
        with jax.named_scope("stem"):
            for part in self.plan:
                is_pooling = isinstance(part, Pooling)
                x = part(x) if is_pooling else jax.nn.relu(next(stem)(x, running))
        for i, counts in enumerate(MODULES):
            with jax.named_scope(f"module_{i}"):
                x = POOLING(x) if counts is None else next(modules)(x, running)
            if train and i in HEADS_AFTER:
                answers.append(next(heads)(x, running, execution, i))
        with jax.named_scope("head"):
            x_BD = x.astype(jnp.float32).mean((1, 2)).astype(x.dtype)
            x_BD = dropout(x_BD, self.rate, execution.draws, 0)
            return (self.head(x_BD, execution), *answers), running.state()
