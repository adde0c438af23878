"""Fully connected layers and activation functions.

Letters: B batch, I inputs, O outputs.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Literal

import jax
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.layers import add_bias
from jaxtrain.nn.parameters import GLOROT, Initializer, Role, constant, param
from jaxtrain.parallel.sharding import shard

Activation = Literal["sigmoid", "tanh", "relu", "gelu", "silu"]

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "tanh": jax.numpy.tanh,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}

# A dimension that is not a multiple of this is replicated: 3 channels, 10 classes.
SHARED = 8


def fan_in(size: int) -> str:
    """Return the logical axis for `size` inputs of a layer."""
    return "narrow" if size % SHARED else "fan_in"


def fan_out(size: int) -> str:
    """Return the logical axis for `size` outputs of a layer."""
    return "narrow" if size % SHARED else "fan_out"


def validate_widths(model: object, widths: tuple[int, ...]) -> None:
    """Raise UserError for fewer than two widths, or a width of 0."""
    written = f"{type(model).__name__}.widths={widths}"
    if len(widths) < 2:
        raise UserError(f"{written}; use at least two: (inputs, outputs)")
    if min(widths) < 1:
        raise UserError(f"{written}; use widths of at least 1")


def multiply_adds(widths: tuple[int, ...]) -> int:
    """Multiply-adds of the layers between these widths, for one vector."""
    return sum(i * o for i, o in itertools.pairwise(widths))


class Dense(nnx.Module):
    """x W + b: vectors [B, I] to [B, O], the outputs split over `tensor` if they are sharded."""

    def __init__(
        self,
        key: jax.Array,
        inputs: int,
        outputs: int,
        init: Initializer = GLOROT,
        *,
        role: Role | None = None,
    ) -> None:
        axes = fan_in(inputs), fan_out(outputs)
        self.weight = param(key, (inputs, outputs), axes, init, role=role)
        self.bias = param(key, (outputs,), axes[1:], constant(0.0))

    def __call__(self, x_BI: jax.Array, execution: Execution) -> jax.Array:
        """Return the outputs, in x's dtype."""
        # Gathered along I from the devices that computed its shards in the previous layer.
        x_BI = shard(x_BI, ("batch", "fan_in"))
        return add_bias(execution.contract("BI,IO->BO", x_BI, self.weight), self.bias)
