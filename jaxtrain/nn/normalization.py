"""Layer norm, RMSNorm, batch norm and group norm.

Letters: B batch, T length, D embed.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.parameters import Statistic, Weights, constant, param
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import mean_over_batch, shard, size_of_batch


@jax.named_scope("norm")
def layer_norm(x: jax.Array, scale: nnx.Param, bias: nnx.Param, *, epsilon: float) -> jax.Array:
    """Layer normalization (arXiv 1607.06450) over the last dimension, in float32."""
    return _normalize(True, epsilon, x, gather(scale), gather(bias))


@jax.named_scope("norm")
def rms_norm(x: jax.Array, scale: nnx.Param, *, epsilon: float, offset: float = 0.0) -> jax.Array:
    """Root-mean-square normalization (arXiv 1910.07467) over the last dimension, in float32.

    The normalized x is multiplied by offset + scale.
    """
    factor = gather(scale) + offset if offset else gather(scale)
    return _normalize(False, epsilon, x, factor, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(
    centered: bool, epsilon: float, x: jax.Array, factor: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """x over its root mean square, or its standard deviation where it is centered, times factor,
    plus bias. With a custom derivative: JAX's own saves x four times, in float32."""
    return _norm_forward(centered, epsilon, x, factor, bias)[0]


def _norm_forward(
    centered: bool, epsilon: float, x: jax.Array, factor: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Any]:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True) if centered else None
    # Two passes: mean(x^2) - mean(x)^2 cancels where the mean is large.
    x_centered = x32 if mean is None else x32 - mean
    inverse = jax.lax.rsqrt(jnp.square(x_centered).mean(-1, keepdims=True) + epsilon)
    y = x_centered * inverse * factor
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, mean, inverse, factor, bias)


def _norm_backward(
    centered: bool, epsilon: float, kept: Any, d_y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    del epsilon
    x, mean, inverse, factor, bias = kept
    x32, d_y = x.astype(jnp.float32), d_y.astype(jnp.float32)
    normed = (x32 if mean is None else x32 - mean) * inverse
    d_normed = d_y * factor
    d_x = d_normed - normed * (d_normed * normed).mean(-1, keepdims=True)
    if centered:
        d_x -= d_normed.mean(-1, keepdims=True)
    before = tuple(range(x.ndim - 1))
    d_factor = (d_y * normed).sum(before).astype(factor.dtype)
    d_bias = None if bias is None else d_y.sum(before).astype(bias.dtype)
    return (d_x * inverse).astype(x.dtype), d_factor, d_bias


_normalize.defvjp(_norm_forward, _norm_backward)


class Norm(Protocol):
    """Protocol of norms over the last dimension."""

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters."""
        ...

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x, in its dtype."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root-mean-square normalization with a scale.

    Attributes:
      dim: size of the normalized dimension.
      epsilon: added to the mean square.
      offset: added to the scale: with 1, a parameter of 0 is the identity scale (Gemma).
    """

    dim: int
    epsilon: float
    offset: float = 0.0

    def weights(self, key: jax.Array) -> Weights:
        """Scale of 1, including the offset."""
        one = constant(1.0 - self.offset)
        return {"scale": param(key, (self.dim,), ("vector",), one, role="norm")}

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x."""
        return rms_norm(x, own["scale"], epsilon=self.epsilon, offset=self.offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """Layer normalization with a scale and a bias."""

    dim: int
    epsilon: float

    def weights(self, key: jax.Array) -> Weights:
        """Scale of 1 and biases of 0."""
        return {
            "scale": param(key, (self.dim,), ("vector",), constant(1.0), role="norm"),
            "bias": param(key, (self.dim,), ("vector",), constant(0.0), role="norm"),
        }

    def __call__(self, own: Weights, x: jax.Array) -> jax.Array:
        """Return the normalized x."""
        return layer_norm(x, own["scale"], own["bias"], epsilon=self.epsilon)


# -- batch norm over the global batch, with a fused backward pass; group norm of images ------------
# Letters: B batch, H height, W width, C channels, G groups.

_OVER = (0, 1, 2)
Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def batch_norm(
    x_BHWC: jax.Array, scale_C: jax.Array, bias_C: jax.Array, shift_C: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (arXiv 1502.03167), in float32.

    Args:
      x_BHWC: activations; their mean and variance over a sharded batch are those of all devices.
      scale_C: gamma of the paper.
      bias_C: beta of the paper, of gamma's dtype.
      shift_C: an estimate of the mean, float32, such as the running mean. Results do not depend on
        it except for rounding: the variance's relative error is about (mean - shift)^2 / variance *
          2^-20.
      epsilon: added to the variance.

    Returns:
      the normalized activations in x's dtype, mean [C] and biased variance [C] in float32.
    """
    # Sums of x and x^2 come from one pass over x (and one reduction between devices), those of
    # x and (x - mean)^2 from two; but mean(x^2) - mean(x)^2 cancels where the mean is large.
    from_shift = x_BHWC.astype(jnp.float32) - shift_C
    offset_C, square_C = mean_over_batch(
        (from_shift.mean(_OVER), jnp.square(from_shift).mean(_OVER))
    )
    variance_C = jnp.maximum(square_C - jnp.square(offset_C), 0)
    mean_C = shift_C + offset_C
    return normalize(x_BHWC, mean_C, variance_C, scale_C, bias_C, epsilon), mean_C, variance_C


def normalize(
    x_BHWC: jax.Array,
    mean_C: jax.Array,
    variance_C: jax.Array,
    scale_C: jax.Array,
    bias_C: jax.Array,
    epsilon: float,
) -> jax.Array:
    """x normalized by a given mean and variance, in x's dtype."""
    factor_C = jax.lax.rsqrt(variance_C + epsilon) * scale_C
    y_BHWC = (x_BHWC.astype(jnp.float32) - mean_C) * factor_C + bias_C
    return y_BHWC.astype(x_BHWC.dtype)


def _forward(
    x_BHWC: jax.Array, scale_C: jax.Array, bias_C: jax.Array, shift_C: jax.Array, epsilon: float
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Kept]:
    y_BHWC, mean_C, variance_C = batch_norm(x_BHWC, scale_C, bias_C, shift_C, epsilon)
    return (y_BHWC, mean_C, variance_C), (x_BHWC, scale_C, mean_C, variance_C)


def _backward(
    epsilon: float, kept: Kept, gradients: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """JAX's own derivative computes two redundant sums over the activations."""
    x_BHWC, scale_C, mean_C, variance_C = kept
    of_y, of_mean_C, of_variance_C = gradients
    centered, of_y = x_BHWC.astype(jnp.float32) - mean_C, of_y.astype(jnp.float32)
    of_bias_C, along_x_C = of_y.sum(_OVER), (of_y * centered).sum(_OVER)
    inverse_C = jax.lax.rsqrt(variance_C + epsilon)
    count = of_y.size // of_y.shape[-1]
    factor_C = inverse_C * scale_C
    offset_C = (of_mean_C - factor_C * of_bias_C) / count
    slope_C = (2 * of_variance_C - factor_C * inverse_C**2 * along_x_C) / count
    offset_C, slope_C = mean_over_batch((offset_C, slope_C))
    of_x = of_y * factor_C + centered * slope_C + offset_C
    of_scale_C = inverse_C * along_x_C
    dtype = scale_C.dtype
    return of_x.astype(x_BHWC.dtype), of_scale_C.astype(dtype), of_bias_C.astype(dtype), None


batch_norm.defvjp(_forward, _backward)


class BatchNorm(nnx.Module):
    """Batch normalization of C channels and its running statistics.

    In training the mean and the variance are those of the GLOBAL batch: a mean over a sharded batch
    dimension is reduced over the mesh.
    """

    def __init__(
        self, key: jax.Array, channels: int, axis: str, *, momentum: float, epsilon: float,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Scale of `scale` and biases of 0.

        Args:
          key: unused.
          channels: C.
          axis: logical axis of the channels.
          momentum: weight of a new batch in the running statistics (PyTorch's momentum).
          epsilon: added to the variance.
          scale: initial value of the scales.
        """
        self.scale = param(key, (channels,), (axis,), constant(scale), role="norm")
        self.bias = param(key, (channels,), (axis,), constant(0.0), role="norm")
        self.mean = Statistic(jnp.zeros((channels,), jnp.float32), axes=(axis,))
        self.variance = Statistic(jnp.ones((channels,), jnp.float32), axes=(axis,))
        self.momentum, self.epsilon = momentum, epsilon

    def apply(
        self, x_BHWC: jax.Array, statistics: Mapping[str, nnx.Variable], *, train: bool
    ) -> tuple[jax.Array, dict[str, nnx.Variable]]:
        """Return the normalized activations, and the running `mean` and `variance` after this
        batch."""
        mean, variance = statistics["mean"], statistics["variance"]
        scale_C, bias_C = gather(self.scale), gather(self.bias)
        if not train:
            of_runs = mean.get_value(), variance.get_value()
            x_BHWC = normalize(x_BHWC, *of_runs, scale_C, bias_C, self.epsilon)
            return x_BHWC, {"mean": mean, "variance": variance}
        x_BHWC, mean_C, variance_C = batch_norm(
            x_BHWC, scale_C, bias_C, mean.get_value(), self.epsilon
        )
        count = size_of_batch(x_BHWC.size // x_BHWC.shape[-1])
        return x_BHWC, {
            "mean": self._update_running(mean, mean_C),
            # The running variance is the unbiased estimate, the one that normalizes is not.
            "variance": self._update_running(variance, variance_C * (count / max(count - 1, 1))),
        }

    def _update_running(self, running: nnx.Variable, batch_C: jax.Array) -> nnx.Variable:
        return running.replace((1 - self.momentum) * running.get_value() + self.momentum * batch_C)


class Running:
    """Running statistics of a model's batch norms during one forward pass.

    Norms are found by themselves: wrappers between a model and its norms pass this on.
    """

    def __init__(self, model: nnx.Module, statistics: nnx.State, *, train: bool) -> None:
        found = nnx.iter_graph(model)
        self._paths = {id(norm): path for path, norm in found if isinstance(norm, BatchNorm)}
        self._values = dict(nnx.to_flat_state(statistics))
        self.train = train

    def apply(self, x_BHWC: jax.Array, norm: BatchNorm) -> jax.Array:
        """Normalize activations, in training with the batch's own statistics."""
        path = self._paths[id(norm)]
        own = {name: self._values[*path, name] for name in ("mean", "variance")}
        x_BHWC, moved = norm.apply(x_BHWC, own, train=self.train)
        self._values |= {(*path, name): value for name, value in moved.items()}
        return x_BHWC

    def state(self) -> nnx.State:
        """Return the statistics after this batch."""
        return nnx.from_flat_state(list(self._values.items()))


class GroupNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, in float32 (arXiv 1803.08494).

    Mean and variance are over all pixels of a group's channels, in one image: neither the batch nor
    running statistics matter. One group is layer normalization (arXiv 1607.06450), a group per
    channel instance normalization (arXiv 1607.08022).
    """

    def __init__(
        self, key: jax.Array, channels: int, axis: str, *, groups: int, epsilon: float
    ) -> None:
        """Scale of 1 and biases of 0.

        Args:
          key: unused.
          channels: C.
          axis: logical axis of the channels.
          groups: G, which divide C.
          epsilon: added to the variance.
        """
        self.scale = param(key, (channels,), (axis,), constant(1.0), role="norm")
        self.bias = param(key, (channels,), (axis,), constant(0.0), role="norm")
        self.axis, self.groups, self.epsilon = axis, groups, epsilon

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the normalized activations, in x's dtype."""
        x32 = x_BHWC.astype(jnp.float32)
        own_BC = x32.mean((1, 2))
        spread_BC = jnp.square(x32 - own_BC[:, None, None]).mean((1, 2))
        mean_BC, variance_BC = self._of_groups(own_BC, spread_BC)
        factor_BC = jax.lax.rsqrt(variance_BC + self.epsilon) * gather(self.scale)
        y_BHWC = (x32 - mean_BC[:, None, None]) * factor_BC[:, None, None] + gather(self.bias)
        return y_BHWC.astype(x_BHWC.dtype)

    def _of_groups(self, own_BC: jax.Array, spread_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Replace each channel's mean and variance by those of its group.

        A group may span several devices: two values per channel are gathered, no activation.
        """
        B, C = own_BC.shape
        split = (B, self.groups, C // self.groups)
        own_BGC, spread_BGC = (
            shard(x_BC, ("batch", "channels_in")).reshape(split) for x_BC in (own_BC, spread_BC)
        )
        mean_BG1 = own_BGC.mean(-1, keepdims=True)
        variance_BG1 = (spread_BGC + jnp.square(own_BGC - mean_BG1)).mean(-1, keepdims=True)
        mean_BC, variance_BC = (
            shard(jnp.broadcast_to(x_BG1, split).reshape(B, C), ("batch", self.axis))
            for x_BG1 in (mean_BG1, variance_BG1)
        )
        return mean_BC, variance_BC
