"""Plain convolutional network: convolutions and poolings, then fully connected layers.

Letters: B batch, H height, W width, C channels in or classes, D channels out.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import jax
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.nn.convolution import average_pool, convolution, max_pool, pool_output_size, pool_to
from jaxtrain.nn.dropout import dropout
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import Dense, add_bias, fan_in, fan_out, multiply_adds
from jaxtrain.nn.normalization import BatchNorm, GroupNorm, Running
from jaxtrain.nn.parameters import HE, Initializer, constant, normal, param
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import shard

IMAGES = ("batch", "height", "width", "channels_in")
SIGNALS = ("batch", "width", "channels_in")


NormKind = Literal["batch", "group", "instance", "layer"]
GROUPS = 32  # of the paper of group norms (arXiv 1803.08494)


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm after each convolution.

    Attributes:
      kind: over the batch (`BatchNorm`), or over groups of channels of each image (`GroupNorm`):
        `groups` groups, one channel each, or all channels.
      groups: if the kind is 'group'.
      momentum, epsilon: as in `BatchNorm`.
    """

    kind: NormKind = "batch"
    groups: int = GROUPS
    momentum: float = 0.1
    epsilon: float = 1e-5

    def of(self, key: jax.Array, channels: int, axis: str) -> BatchNorm | GroupNorm:
        """Return the norm of `channels` channels."""
        if self.kind == "batch":
            return BatchNorm(key, channels, axis, momentum=self.momentum, epsilon=self.epsilon)
        groups = {"group": self.groups, "instance": channels, "layer": 1}[self.kind]
        return GroupNorm(key, channels, axis, groups=groups, epsilon=self.epsilon)


class NormSettings(Protocol):
    """Settings of a norm, each documented at the models that have them."""

    @property
    def norm(self) -> NormKind | None: ...
    @property
    def norm_groups(self) -> int | None: ...


def norm_of(model: NormSettings, epsilon: float = 1e-5) -> Norm | None:
    """Return the norm of a model's settings; None: none."""
    if model.norm is None:
        return None
    return Norm(model.norm, model.norm_groups or GROUPS, epsilon=epsilon)


def validate_norm(model: NormSettings, convolutions: Iterable["Convolution"]) -> None:
    """Raise UserError for unused groups, or groups that do not divide some channels."""
    written = f"{type(model).__name__}.norm_groups={model.norm_groups}"
    if model.norm != "group":
        if model.norm_groups is not None:
            raise UserError(
                f"{written} has no effect with norm={model.norm!r}; use norm='group', or None"
            )
        return
    groups = model.norm_groups or GROUPS
    widths = {convolution.channels for convolution in convolutions}
    if groups < 1 or any(width % groups for width in widths):
        common = math.gcd(*widths)
        nearest = min(
            (n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(n - groups)
        )
        raise UserError(
            f"{written} (None is {GROUPS}) does not divide all of the convolutions' channels "
            f"{sorted(widths)}; use {nearest}"
        )


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution with a bias; the settings are those of `convolution.convolution`."""

    channels_in: int
    channels: int
    size: int = 3
    stride: int = 1
    padding: int = 1

    def side(self, side: int) -> int:
        """Output size of a side, in pixels."""
        return pool_output_size(side, self.size, self.stride, self.padding)

    def multiply_adds(self, height: int, width: int) -> int:
        """Return the multiply-adds for an output image of this size."""
        return height * width * self.size**2 * self.channels_in * self.channels


@dataclasses.dataclass(frozen=True)
class Pooling:
    """Max or mean pooling; the settings are those of `max_pool`."""

    size: int = 2
    stride: int = 2
    padding: int = 0
    kind: Literal["max", "average"] = "max"
    ceil: bool = False

    def side(self, side: int) -> int:
        """Output size of a side, in pixels."""
        return pool_output_size(side, self.size, self.stride, self.padding, ceil=self.ceil)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the pooled image."""
        if self.kind == "average":
            return average_pool(x_BHWC, self.size, self.stride)
        return max_pool(x_BHWC, self.size, self.stride, self.padding, ceil=self.ceil)


Plan = Sequence[Convolution | Pooling]


def convolutions_of(plan: Plan) -> list[Convolution]:
    """Return the convolutions of a plan, without its poolings."""
    return [part for part in plan if isinstance(part, Convolution)]


def least_side(plan: Plan, side: int) -> int:
    """Smallest image size, at least this, that the plan does not reduce to nothing."""

    def fits(side: int) -> bool:
        for part in plan:
            side = part.side(side)
            if side < 1:
                return False
        return True

    return next(more for more in itertools.count(side) if fits(more))


def validate_side(model: object, plan: Plan, side: int) -> None:
    """Raise UserError for images that the plan reduces to nothing."""
    least = least_side(plan, side)
    if least != side:
        name = type(model).__name__
        raise UserError(f"{name} on images of {side} pixels a side; use at least {least}")


def plan_multiply_adds(plan: Plan, height: int, width: int) -> int:
    """Multiply-adds of the convolutions, for one image of these sides."""
    total = 0
    for part in plan:
        height, width = part.side(height), part.side(width)
        if isinstance(part, Convolution):
            total += part.multiply_adds(height, width)
    return total


class ConvolutionNorm(nnx.Module):
    """A convolution with bias, and a norm where one is requested.

    Output channels are split over `tensor` if they are a multiple of 8; input
    channels are gathered. `of` is the kind of input: IMAGES or SIGNALS.
    """

    def __init__(
        self,
        plan: Convolution,
        key: jax.Array,
        norm: Norm | None = None,
        init: Initializer = HE,
        of: tuple[str, ...] = IMAGES,
    ) -> None:
        along, axis = of[1:-1], fan_out(plan.channels)
        shape = (*[plan.size] * len(along), plan.channels_in, plan.channels)
        self.weight = param(key, shape, (*along, fan_in(plan.channels_in), axis), init)
        self.bias = param(key, shape[-1:], (axis,), constant(0.0))
        self.norm = None if norm is None else norm.of(key, plan.channels, axis)
        self.stride, self.padding, self.of = plan.stride, plan.padding, of

    def convolve(self, x: jax.Array) -> jax.Array:
        """Activations before the norm."""
        kernel = gather(self.weight)
        x = shard(x, self.of).astype(kernel.dtype)
        return add_bias(convolution(x, kernel, self.stride, self.padding), self.bias)

    def __call__(self, x_BHWC: jax.Array, running: Running) -> jax.Array:
        """Activations, normalized if there is a norm."""
        x_BHWC = self.convolve(x_BHWC)
        if isinstance(self.norm, BatchNorm):
            return running.apply(x_BHWC, self.norm)
        return x_BHWC if self.norm is None else self.norm(x_BHWC)


class ConvNet(nnx.Module):
    """Images to logits: the plan, adaptive mean pooling, fully connected layers."""

    def __init__(
        self,
        plan: Plan,
        key: jax.Array,
        *,
        side: int,
        widths: Sequence[int],
        activation: Callable[[jax.Array], jax.Array] = jax.nn.relu,
        rates: Sequence[float],
        norm: Norm | None = None,
        init: Initializer = HE,
    ) -> None:
        """Initialize all layers.

        Args:
          plan: convolutions, each followed by the activation, and poolings.
          key: for the parameters.
          side: size of the pooled image that the fully connected layers read.
          widths: of those layers, the last the classes; the input width follows from `side`.
          activation: after every layer but the last.
          rates: dropout rates of those layers' inputs.
          norm: of every convolution.
          init: initializer of convolutions and hidden layers.
        """
        convolutions = convolutions_of(plan)
        flat = side * side * convolutions[-1].channels
        pairs = list(itertools.pairwise((flat, *widths)))
        keys = iter(jax.random.split(key, len(convolutions) + len(pairs)))
        self.convolutions = nnx.List(
            [ConvolutionNorm(c, next(keys), norm, init) for c in convolutions]
        )
        self.dense = nnx.List([Dense(next(keys), *pair, init) for pair in pairs[:-1]])
        # A small last layer, as in a ResNet (arXiv 1706.02677, section 5.1): max poolings
        # make activations larger than their initialization assumes.
        self.head = Dense(next(keys), *pairs[-1], normal(0.01), role="output")
        self.plan, self.side, self.rates = tuple(plan), side, tuple(rates)
        self.activation = activation

    def __call__(
        self, images_BHWC: jax.Array, statistics: nnx.State, execution: Execution, *, train: bool
    ) -> tuple[jax.Array, nnx.State]:
        """Logits [B, C]; as in `Predictor`."""
        x, running = images_BHWC, Running(self, statistics, train=train)
        convolutions = iter(self.convolutions)
        for i, part in enumerate(self.plan):
            with jax.named_scope(f"part_{i}"):
                if isinstance(part, Pooling):
                    x = part(x)
                else:
                    x = self.activation(next(convolutions)(x, running))
        # Gathered along the channels, which are flattened with the pixels.
        x = shard(pool_to(x, self.side), IMAGES)
        x_BD = x.reshape(x.shape[0], -1)
        for i, layer in enumerate((*self.dense, self.head)):
            with jax.named_scope(f"dense_{i}"):
                x_BD = self.activation(x_BD) if i else x_BD
                x_BD = dropout(x_BD, self.rates[i], execution.draws, i)
                x_BD = layer(x_BD, execution)
        return x_BD, running.state()


def flops(plan: Plan, side: int, widths: Sequence[int], shape: tuple[int, ...]) -> float:
    """Training FLOPs of one image (H, W, C) in a `ConvNet`: 3 x 2 x its multiply-adds."""
    channels = convolutions_of(plan)[-1].channels
    dense = multiply_adds((side * side * channels, *widths))
    return 6.0 * (plan_multiply_adds(plan, *shape[:2]) + dense)
