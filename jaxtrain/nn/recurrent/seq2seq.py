"""Recurrent encoder-decoder (Seq2Seq).

Sources: Cho et al. 2014 (arXiv 1406.1078) and Sutskever et al. 2014 (arXiv 1409.3215); attention is
the global one of Luong et al. 2015 (arXiv 1508.04025), equations 5, 8 (general) and 10.
Letters: B batch, S source length, T target length, D embed and state, V vocab, L layers.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.kv_cache import Cache
from jaxtrain.nn.layers import embed
from jaxtrain.nn.parameters import Weights, add_prefix, constant, normal, param, stack, under
from jaxtrain.nn.recurrent.recurrent import BothWays
from jaxtrain.nn.transformer.decoder import Layer
from jaxtrain.parallel.sharding import shard

STATES = ("layers", "batch", "embed")
HIDDEN_AWAY = -1e30  # score of masked keys; finite, for rows whose source is only padding


class Memory(NamedTuple):
    """Encoder outputs.

    Attributes:
      states_BSD: the last layer's, at every position.
      last_LBD: every layer's at each source's last token, float32.
    """

    states_BSD: jax.Array
    last_LBD: jax.Array


@dataclasses.dataclass(frozen=True)
class GlobalAttention:
    """Attention of a decoder's state to the encoder's states.

    Attributes:
      dim: D, of all states.
    """

    dim: int

    def weights(self, key: jax.Array) -> Weights:
        """Projections of the scores, and of context and state in the output; all [D, D]."""
        # The standard deviation of torch.nn.Linear, which draws uniformly from +-1 / sqrt(inputs).
        D, axes, names = self.dim, ("embed", "gates"), ("score", "context", "state")
        keys = jax.random.split(key, len(names))
        spread = normal(1 / math.sqrt(3 * D))
        return {name: param(k, (D, D), axes, spread) for name, k in zip(names, keys, strict=True)}

    def matmul_parameters(self) -> int:
        """Return all parameters."""
        return 3 * self.dim**2

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        states_BSD: jax.Array,
        of_memory: Mask,
        execution: Execution,
    ) -> jax.Array:
        """Return the attentional states, [B, T, D].

        Args:
          own: the parameters.
          h_BTD: the decoder's states.
          states_BSD: the encoder's.
          of_memory: which of them each sees.
          execution: kernels, precision and dropout.
        """

        def product(x_BTD: jax.Array, name: str) -> jax.Array:
            return execution.contract("BTD,DE->BTE", x_BTD, own[name])

        wide = {"preferred_element_type": jnp.float32}
        scores_BTS = jnp.einsum("BTD,BSD->BTS", product(h_BTD, "score"), states_BSD, **wide)
        seen = of_memory.visible(*scores_BTS.shape[1:])
        if seen is not None:
            scores_BTS = jnp.where(seen[:, 0], scores_BTS, HIDDEN_AWAY)
        shares_BTS = jax.nn.softmax(scores_BTS).astype(h_BTD.dtype)
        context_BTD = jnp.einsum("BTS,BSD->BTD", shares_BTS, states_BSD)
        return jnp.tanh(product(context_BTD, "context") + product(h_BTD, "state"))


class RecurrentPair(nnx.Module):
    """Encoder-decoder from token pairs to hidden states and logits of targets; a `PairModule`."""

    def __init__(
        self,
        encoder: Layer,
        decoder: Layer,
        key: jax.Array,
        *,
        num_layers: int,
        embed_dim: int,
        vocab_size: int,
        attention: GlobalAttention | None,
    ) -> None:
        """Initialize the model.

        Args:
          encoder, decoder: the layer of each stack, from D features to a state of
            D, which is its output; in a `BothWays` half of it is backward.
          key: for the parameters.
          num_layers: of each stack.
          embed_dim: D.
          vocab_size: V, of sources and of targets.
          attention: of the last states; None: the source is only in the initial state.
        """
        keys = jax.random.split(key, 6)
        shape, axes = (vocab_size, embed_dim), ("vocab", "vocab_embed")
        self.source_embedding, self.target_embedding = (
            param(one, shape, axes, normal(1.0), role="embedding") for one in keys[:2]
        )
        spread = normal(1 / math.sqrt(3 * embed_dim))
        self.output = param(keys[2], shape, axes, spread, role="output")
        self.bias = param(key, shape[:1], axes[:1], constant(0.0))
        self.encoder, self.decoder, self.attention = encoder, decoder, attention
        self.encoder_layers = nnx.data(stack(encoder.weights, num_layers, keys[3]))
        self.decoder_layers = nnx.data(stack(decoder.weights, num_layers, keys[4]))
        drawn = {} if attention is None else attention.weights(keys[5])
        for name, weight in add_prefix("attention", drawn).items():
            setattr(self, name, weight)

    def encode(self, source_BS: jax.Array, mask: Mask, execution: Execution) -> Memory:
        """Encoder outputs; each source begins at the start of its row."""
        ids_BS = mask.segment_ids_BT
        assert ids_BS is not None, "a pair's padding is marked"
        nowhere_BS = jnp.zeros(
            source_BS.shape, jnp.int32
        )  # positions are implicit in the recurrence
        after_BS = jnp.pad(ids_BS[:, 1:], ((0, 0), (0, 1)))
        last_BS1 = ((ids_BS != 0) & (after_BS == 0))[..., None]

        def run_layer(layer: Weights, x_BSD: jax.Array, number: jax.Array) -> Any:
            of_layer = execution.of_layer(number)
            x_BSD, _, _ = self.encoder(layer, x_BSD, nowhere_BS, mask, of_layer)
            last_BD = jnp.where(last_BS1, x_BSD, 0).astype(jnp.float32).sum(1)
            if not isinstance(self.encoder, BothWays):
                return x_BSD, last_BD
            # From the right, a source ends at its first position.
            first_BD, half = x_BSD[:, 0].astype(jnp.float32), x_BSD.shape[-1] // 2
            return x_BSD, jnp.concatenate([last_BD[:, :half], first_BD[:, half:]], -1)

        with jax.named_scope("encoder"):
            x_BSD = self._embed(source_BS, self.source_embedding)
            numbers = _numbers(self.encoder_layers)
            return Memory(*execution.over_layers(run_layer, x_BSD, self.encoder_layers, numbers))

    def decode(
        self,
        tokens_BT: jax.Array,
        memory: Memory,
        mask: Mask,
        of_memory: Mask,
        execution: Execution,
    ) -> jax.Array:
        """Final hidden states [B, T, D]; arguments as of `PairModule`."""
        states_LBD = memory.last_LBD
        return self._decode(tokens_BT, memory, states_LBD, mask, of_memory, execution)[0]

    def remember(self, memory: Memory, execution: Execution) -> tuple[jax.Array, jax.Array]:
        """Return the memory for generation, with states as of one layer: [1, B, S, D] and [L, B,
        D]."""
        del execution
        return memory.states_BSD[None], memory.last_LBD

    def go_on(
        self,
        tokens_BT: jax.Array,
        remembered: tuple[jax.Array, jax.Array],
        of_memory: Mask,
        execution: Execution,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """Final hidden states, and the cache, whose states are those after the last token;
        arguments as of `PairModule`."""
        memory = Memory(remembered[0][0], remembered[1])
        first_LBD = shard(memory.last_LBD, STATES)
        states_LBD = jnp.where(cache.length == 0, first_LBD, shard(cache.layers[0], STATES))
        h_BTD, states_LBD = self._decode(
            tokens_BT, memory, states_LBD, Mask(), of_memory, execution
        )
        return h_BTD, Cache((states_LBD,), cache.length + tokens_BT.shape[1])

    def output_matrix(self) -> nnx.Param:
        """Return the output matrix [V, D]."""
        return self.output

    def output_bias(self) -> nnx.Param:
        """Return the output bias [V]."""
        return self.bias

    def logit_softcap(self) -> None:
        """No soft-capping of logits."""
        return

    def _decode(
        self,
        tokens_BT: jax.Array,
        memory: Memory,
        states_LBD: jax.Array,
        mask: Mask,
        of_memory: Mask,
        execution: Execution,
    ) -> tuple[jax.Array, jax.Array]:
        """Final hidden states, and every layer's state after the last token."""
        nowhere_BT = jnp.zeros(tokens_BT.shape, jnp.int32)

        def run_layer(layer: Weights, x_BTD: jax.Array, own: Any) -> tuple[jax.Array, Any]:
            number, before_BD = own
            x_BTD, after, _ = self.decoder(
                layer, x_BTD, nowhere_BT, mask, execution.of_layer(number), (before_BD,)
            )
            assert after is not None, "a state went in"
            return x_BTD, after[0]

        with jax.named_scope("decoder"):
            x_BTD = self._embed(tokens_BT, self.target_embedding)
            each = _numbers(self.decoder_layers), states_LBD
            h_BTD, after_LBD = execution.over_layers(run_layer, x_BTD, self.decoder_layers, each)
        if self.attention is not None:
            with jax.named_scope("attention"):
                own = under("attention", vars(self))
                h_BTD = self.attention(own, h_BTD, memory.states_BSD, of_memory, execution)
        return shard(h_BTD, HIDDEN), after_LBD

    def _embed(self, tokens_BT: jax.Array, table: nnx.Param) -> jax.Array:
        with jax.named_scope("embedding"):
            return embed(tokens_BT, table)


def _numbers(layers: Any) -> jax.Array:
    return jnp.arange(jax.tree.leaves(layers)[0].shape[0])
