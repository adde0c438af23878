"""1-D convolutional network for signals.

Source: the convolutional network of MNIST-1D, Greydanus and Kobak 2020 (arXiv 2011.14439).
Letters: B batch, W positions, C channels, O classes.
"""

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs, Unstacked
from jaxtrain.nn.convnet import SIGNALS, Convolution, ConvolutionNorm, least_side
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import Dense
from jaxtrain.parallel.sharding import shard


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SignalCNN(Unstacked):
    """Sizes of a convolutional network that reads signals; the defaults are MNIST-1D's.

    Attributes:
      features: number of samples of a signal.
      outputs: number of classes.
      filters: channels of each convolution, followed by ReLU.
      sizes: kernel size of each.
      stride: stride of each.
      padding: zeros before and after.
    """

    features: int = 40
    outputs: int = 10
    filters: tuple[int, ...] = (25, 25, 25)
    sizes: tuple[int, ...] = (5, 3, 3)
    stride: int = 2
    padding: int = 1

    inputs: ClassVar[Inputs] = "vectors"
    objective = "classification"
    settings: ClassVar[dict[str, str]] = {"fan_in": "filters", "fan_out": "filters"}

    def __post_init__(self) -> None:
        require_at_least(1, self, "features", "outputs", "stride")
        require_at_least(0, self, "padding")
        if not self.filters or len(self.filters) != len(self.sizes):
            raise UserError(
                f"SignalCNN.filters={self.filters} with SignalCNN.sizes={self.sizes}: give both "
                "the same length, at least 1"
            )
        if min(*self.filters, *self.sizes) < 1:
            raise UserError(
                f"SignalCNN.filters={self.filters}, SignalCNN.sizes={self.sizes}: use numbers of "
                "at least 1"
            )
        least = least_side(self.plan, self.features)
        if least != self.features:
            raise UserError(
                f"SignalCNN.features={self.features}: the signal is too short for the "
                f"convolutions; use at least {least}"
            )

    @property
    def plan(self) -> tuple[Convolution, ...]:
        """The convolutions."""
        pairs = itertools.pairwise((1, *self.filters))
        return tuple(
            Convolution(*pair, size, self.stride, self.padding)
            for pair, size in zip(pairs, self.sizes, strict=True)
        )

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Output size of each convolution."""
        ways = itertools.accumulate(self.plan, lambda w, part: part.side(w), initial=self.features)
        return tuple(ways)[1:]

    def build(self, key: jax.Array) -> "SignalNet":
        """Return the newly initialized module."""
        return SignalNet(self, key)

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one signal: 3 x 2 x the multiply-adds of all layers."""
        del shape
        of_plan = zip(self.output_sizes, self.plan, strict=True)
        along = sum(w * part.size * part.channels_in * part.channels for w, part in of_plan)
        return 6.0 * (along + self.output_sizes[-1] * self.filters[-1] * self.outputs)


class SignalNet(nnx.Module):
    """Signals to logits."""

    def __init__(self, sizes: SignalCNN, key: jax.Array) -> None:
        *keys, key_head = jax.random.split(key, len(sizes.plan) + 1)
        parts = zip(sizes.plan, keys, strict=True)
        self.convolutions = nnx.List(
            [ConvolutionNorm(part, one, of=SIGNALS) for part, one in parts]
        )
        flat = sizes.output_sizes[-1] * sizes.filters[-1]
        self.head = Dense(key_head, flat, sizes.outputs, role="output")

    def __call__(
        self, x_BD: jax.Array, statistics: Any, execution: Execution, *, train: bool
    ) -> tuple[jax.Array, Any]:
        """Logits [B, O]; as in `Predictor`."""
        del train
        x_BWC = x_BD[..., None]
        for i, layer in enumerate(self.convolutions):
            with jax.named_scope(f"convolution_{i}"):
                x_BWC = jax.nn.relu(layer.convolve(x_BWC))
        # Gathered along the channels, which are flattened with the positions.
        x_BWC = shard(x_BWC, SIGNALS)
        with jax.named_scope("head"):
            return self.head(x_BWC.reshape(x_BWC.shape[0], -1), execution), statistics
