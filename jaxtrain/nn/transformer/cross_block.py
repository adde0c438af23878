"""Transformer decoder block with cross-attention.

Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1.
Letters: B batch, T length, S length of the memory, D embed.
"""

import dataclasses
from collections.abc import Callable

import jax

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.multi_head import CrossAttention
from jaxtrain.nn.dropout import Dropout
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.kv_cache import LayerCache
from jaxtrain.nn.normalization import Norm
from jaxtrain.nn.parameters import Weights, add_prefix, merge_weights, under
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.block import RESIDUAL, Attends, Feeds, Placement, pre_norm
from jaxtrain.parallel.sharding import shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossBlock:
    """Self-attention, cross-attention, and an MLP, each with its norm.

    Attributes:
      attention, cross, mlp: the parts.
      norm: the norm of each.
      placement: before or after a part.
      dropout: of each part's output, in training, in this order.
    """

    attention: Attends
    cross: CrossAttention
    mlp: Feeds
    norm: Norm
    placement: Placement = pre_norm
    dropout: Dropout = Dropout()

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters of all parts, for `parameters.stack`."""
        first, second = self.attention.num_keys, self.cross.num_keys
        keys = jax.random.split(key, first + second + self.mlp.num_keys)
        return merge_weights(
            add_prefix("attention_norm", self.norm.weights(key)),
            self.attention.weights(keys[:first]),
            add_prefix("cross_norm", self.norm.weights(key)),
            add_prefix("cross", self.cross.weights(keys[first : first + second])),
            add_prefix("mlp_norm", self.norm.weights(key)),
            self.mlp.weights(keys[first + second :]),
        )

    def matmul_parameters(self) -> int:
        """Number of parameters used in matmuls, including the memory's keys and values."""
        parts = (self.attention, self.cross, self.mlp)
        return sum(part.matmul_parameters() for part in parts)

    def remember(self, own: Weights, memory_BSD: jax.Array, execution: Execution) -> LayerCache:
        """Return the memory's keys and values, for all queries."""
        with jax.named_scope("cross_attention"):
            return self.cross.keys_and_values(under("cross", own), memory_BSD, execution)

    def __call__(
        self,
        own: Weights,
        x_BTD: jax.Array,
        remembered: LayerCache,
        mask: Mask,
        of_memory: Mask,
        execution: Execution,
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Run one layer; return the new residual stream, and the extended cache of its own tokens.

        Args:
          own: the parameters.
          x_BTD: the residual stream.
          remembered: from `remember`.
          mask: which of its own tokens a token sees.
          of_memory: which of the memory's it sees.
          execution: kernels, precision and dropout.
          cache: keys and values of its own tokens so far, or None.
          start: the position in the cache where the new ones go.
        """
        nowhere_BT = jax.numpy.zeros(x_BTD.shape[:2], jax.numpy.int32)  # in the stream already

        def attend(h_BTD: jax.Array) -> tuple[jax.Array, LayerCache | None]:
            y_BTD, extended = self.attention(
                own, h_BTD, nowhere_BT, mask, execution, out=RESIDUAL, cache=cache, start=start
            )
            return drop(name_activation(y_BTD, "attention_out"), 0), extended

        def look(h_BTD: jax.Array) -> tuple[jax.Array, None]:
            of = under("cross", own)
            y_BTD = self.cross(of, h_BTD, remembered, of_memory, execution, out=RESIDUAL)
            return drop(name_activation(y_BTD, "attention_out"), 1), None

        def feed(h_BTD: jax.Array) -> tuple[jax.Array, None]:
            return drop(self.mlp(own, h_BTD, mask, execution, out=RESIDUAL)[0], 2), None

        def drop(y_BTD: jax.Array, number: int) -> jax.Array:
            return self.dropout(y_BTD, execution.draws, execution.layer, number=number)

        def norm_of(name: str) -> Callable[[jax.Array], jax.Array]:
            return lambda x_BTD: self.norm(under(name, own), x_BTD)

        x_BTD = shard(x_BTD, RESIDUAL)
        with jax.named_scope("attention"):
            x_BTD, cache = self.placement(norm_of("attention_norm"), x_BTD, attend)
        with jax.named_scope("cross_attention"):
            x_BTD, _ = self.placement(norm_of("cross_norm"), x_BTD, look)
        with jax.named_scope(self.mlp.scope):
            x_BTD, _ = self.placement(norm_of("mlp_norm"), x_BTD, feed)
        return x_BTD, cache
