"""Parameters with logical axes, weight initializers (fan-in, Xavier, He), stacking of layers."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.errors import did_you_mean
from jaxtrain.parallel.sharding import is_variable, logical_axes

Initializer = Callable[..., jax.Array]

# Roles of parameters that their axes do not show; most have none.
#   embedding  a row per token; also the output matrix if no parameter has the role output
#   position   a row for each position of a sequence
#   norm       the scale or the bias of a norm, computed in float32
#   router     scores experts, in float32
#   balance    bias of the scores of experts; updated by their load, without a gradient
#   output     the output matrix
#   quantized  the codes or the scales of a quantized weight
Role = Literal["embedding", "position", "norm", "router", "balance", "output", "quantized"]

# Parameters by name; a part of a model may nest its own under one name.
Weights = dict[str, Any]


class Statistic(nnx.Variable):
    """A running statistic of the data (batch norm's mean and variance): state, not a parameter."""


def param(
    key: jax.Array,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    init: Initializer,
    *,
    role: Role | None = None,
) -> nnx.Param:
    """Return a float32 parameter with logical axes and a role."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} has {len(shape)} dims but {len(axes)} axis names: {axes}")
    if role is not None and role not in get_args(Role):
        raise ValueError(f"unknown role {role!r}{did_you_mean(role, get_args(Role))}")
    return nnx.Param(init(key, shape, jnp.float32), axes=axes, role=role)


def role_of(variable: nnx.Variable) -> Role | None:
    """Return the role of a parameter, as its model declared it."""
    return variable.get_metadata().get("role")


def normal(stddev: float) -> Initializer:
    """Return the initializer N(0, stddev^2)."""
    return jax.nn.initializers.normal(stddev)


def constant(value: float) -> Initializer:
    """Return the constant initializer."""
    return jax.nn.initializers.constant(value)


def merge_weights(*parts: Weights) -> Weights:
    """Merge the parameters of several parts; names must be distinct."""
    names = [name for part in parts for name in part]
    assert len(set(names)) == len(names), f"two parameters of one name: {sorted(names)}"
    return {name: weight for part in parts for name, weight in part.items()}


def add_prefix(prefix: str, weights: Weights) -> Weights:
    """Return the same parameters, with `prefix` and an underscore before each name."""
    return {f"{prefix}_{name}": weight for name, weight in weights.items()}


def under(prefix: str, weights: Weights) -> Weights:
    """Return the parameters with this prefix, by their names without it."""
    start = f"{prefix}_"
    return {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}


def unstack(stacked: Any) -> list[Any]:
    """Split a pytree with a leading layers dimension into one per layer."""
    count = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count)]


def stack(make: Callable[[jax.Array], Any], num_layers: int, key: jax.Array) -> Any:
    """Initialize num_layers copies of make(key), stacked on a leading "layers" dimension."""
    layers = jax.vmap(make)(jax.random.split(key, num_layers))

    def name_new_axis(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(axes=("layers", *logical_axes(variable)))

    return jax.tree.map(name_new_axis, layers, is_leaf=is_variable)


# Weight initializers by name. A weight [..., I, O] has as fan-in I, as fan-out O, both times the
# pixels of a convolution's kernel. With variance 1 / fan-in a layer keeps its inputs' variance
# (LeCun et al. 1998, "Efficient BackProp"), with 2 / (fan-in + fan-out) about that and its
# gradient's (Glorot and Bengio 2010), with 2 / fan-in that after a ReLU (He et
# al. 2015, arXiv 1502.01852).
InitializerName = Literal[
    "he_normal", "he_uniform", "glorot_normal", "glorot_uniform", "lecun_normal", "lecun_uniform"
]

_scaled = jax.nn.initializers.variance_scaling
INITIALIZERS: dict[InitializerName, Initializer] = {
    "he_normal": _scaled(2.0, "fan_in", "normal"),
    "he_uniform": _scaled(2.0, "fan_in", "uniform"),
    "glorot_normal": _scaled(1.0, "fan_avg", "normal"),
    "glorot_uniform": _scaled(1.0, "fan_avg", "uniform"),
    "lecun_normal": _scaled(1.0, "fan_in", "normal"),
    "lecun_uniform": _scaled(1.0, "fan_in", "uniform"),
}
HE, GLOROT = INITIALIZERS["he_normal"], INITIALIZERS["glorot_normal"]


def is_layer(variable: Any) -> bool:
    """Whether a parameter belongs to the stacked layers."""
    return logical_axes(variable)[:1] == ("layers",)


def initializer_of(name: InitializerName | None, activation: str) -> Initializer:
    """Return a layer's initializer; None: the default for this activation.

    Args:
      name: what the settings say.
      activation: a name of `dense.ACTIVATIONS`.
    """
    if name is not None:
        return INITIALIZERS[name]
    return GLOROT if activation in ("sigmoid", "tanh") else HE


def residual_stddev(num_layers: int) -> float:
    """Standard deviation of the projections into the residual stream.

    It decreases with the number of layers, so that the stream's variance does not grow.
    """
    return 0.02 / math.sqrt(2 * num_layers)
