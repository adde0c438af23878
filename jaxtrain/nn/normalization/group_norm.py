"""Group, instance and layer normalization of images.

Letters: B batch, H height, W width, C channels, G groups.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.parameters import constant, param
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import shard


class GroupNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, in float32 (arXiv 1803.08494).

    Mean and variance are of all pixels of a group's channels, in one image: neither the batch nor
    what ran before it says anything. One group is layer normalization (arXiv 1607.06450), a group a
    channel instance normalization (arXiv 1607.08022).
    """

    def __init__(
        self, key: jax.Array, channels: int, axis: str, *, groups: int, epsilon: float
    ) -> None:
        """Scales of 1 and biases of 0.

        Args:
          key: not drawn from.
          channels: C.
          axis: what the channels mean.
          groups: G, which divide C.
          epsilon: added to the variance.
        """
        self.scale = param(key, (channels,), (axis,), constant(1.0), role="norm")
        self.bias = param(key, (channels,), (axis,), constant(0.0), role="norm")
        self.axis, self.groups, self.epsilon = axis, groups, epsilon

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """The normed activations, in x's dtype."""
        x32 = x_BHWC.astype(jnp.float32)
        own_BC = x32.mean((1, 2))
        spread_BC = jnp.square(x32 - own_BC[:, None, None]).mean((1, 2))
        mean_BC, variance_BC = self._of_groups(own_BC, spread_BC)
        factor_BC = jax.lax.rsqrt(variance_BC + self.epsilon) * gather(self.scale)
        y_BHWC = (x32 - mean_BC[:, None, None]) * factor_BC[:, None, None] + gather(self.bias)
        return y_BHWC.astype(x_BHWC.dtype)

    def _of_groups(self, own_BC: jax.Array, spread_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each channel's mean and variance to those of its group, given to each of its channels.

        A group may lie over several devices: two numbers a channel are gathered, no activation.
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
