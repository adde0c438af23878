"""Encoder-decoder of two stacks of layers.

Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.
Letters: B batch, S source length, T target length, D embed, V vocab, L layers of each stack.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.attention.multi_head import CrossAttention
from jaxtrain.nn.dropout import Dropout
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.kv_cache import Cache, LayerCache
from jaxtrain.nn.layers import embed
from jaxtrain.nn.normalization import Norm
from jaxtrain.nn.parameters import Weights, add_prefix, merge_weights, stack, under
from jaxtrain.nn.remat import name_activation
from jaxtrain.nn.transformer.block import RESIDUAL, Attends, Block, Feeds, Placement, pre_norm
from jaxtrain.nn.transformer.positional_embedding import PositionalEmbedding
from jaxtrain.parallel.sharding import shard

# -- decoder block with cross-attention ------------------------------------------------------------
# Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1. Letters: B batch, T length, S length
# of the memory, D embed.


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


# -- both stacks -----------------------------------------------------------------------------------

# First indices of dropout layers: around the stacks, in the encoder's layers, in the decoder's.
# Each has room for those of its parts; adapters use a distant range.
AROUND, ENCODER, DECODER = 1000, 1010, 1020


class EncoderDecoder(nnx.Module):
    """Encoder-decoder from token pairs to hidden states and logits of targets."""

    def __init__(
        self,
        encoder: Block,
        decoder: CrossBlock,
        key: jax.Array,
        *,
        num_layers: int,
        token_embedding: nnx.Param,
        source_positions: PositionalEmbedding,
        target_positions: PositionalEmbedding,
        norm: Norm | None = None,
        output: nnx.Param | None = None,
        embedding_scale: float = 1.0,
        output_scale: float = 1.0,
        dropout: float = 0.0,
        drops_finished: bool = False,
    ) -> None:
        """Initialize the layers; embedding and head are passed in.

        Args:
          encoder, decoder: the layer of each stack.
          key: for their parameters.
          num_layers: of each stack.
          token_embedding: the table [V, D] of both sequences.
          source_positions, target_positions: positional embedding of each stack.
          norm: after the last layer of each stack; None: none.
          output: the output matrix [V, D]; None: the token embedding.
          embedding_scale: factor of embedded tokens.
          output_scale: factor of hidden states before the output matrix.
          dropout: of each stack's input, in training.
          drops_finished: whether each stack's output has dropout too.
        """
        keys = jax.random.split(key, 4)
        self.encoder, self.decoder, self.norm = encoder, decoder, norm
        self.source_positions, self.target_positions = source_positions, target_positions
        self.dropout, self.drops_finished = Dropout(dropout, first=AROUND), drops_finished
        self.embedding_scale, self.output_scale = embedding_scale, output_scale
        self.token_embedding, self.output = token_embedding, output
        self.encoder_layers = nnx.data(stack(encoder.weights, num_layers, keys[0]))
        self.decoder_layers = nnx.data(stack(decoder.weights, num_layers, keys[1]))
        own = add_prefix("source", source_positions.weights(keys[2]))
        own |= add_prefix("target", target_positions.weights(keys[3]))
        for part in ("encoder_norm", "decoder_norm"):
            own |= add_prefix(part, norm.weights(key) if norm else {})
        for name, weight in own.items():
            setattr(self, name, weight)

    def encode(self, source_BS: jax.Array, mask: Mask, execution: Execution) -> jax.Array:
        """Encode sources to [B, S, D]; any mask is accepted."""
        x_BSD = self.enter_source(source_BS, execution)
        mask = self.of_source(mask, source_BS.shape[1])

        def run_layer(layer: Weights, x_BSD: jax.Array, number: jax.Array) -> Any:
            return self.read_layer(layer, x_BSD, mask, execution.of_layer(number)), None

        with jax.named_scope("encoder"):
            numbers = _numbers(self.encoder_layers)
            x_BSD, _ = execution.over_layers(run_layer, x_BSD, self.encoder_layers, numbers)
        return self.finish_source(x_BSD, execution)

    def enter_source(self, source_BS: jax.Array, execution: Execution) -> jax.Array:
        """Input of the encoder's first layer, [B, S, D]."""
        x_BSD = self._embed(source_BS, self.source_positions, under("source", vars(self)))
        return self.dropout(x_BSD, execution.draws)

    def of_source(self, mask: Mask, length: int) -> Mask:
        """Return a mask of the source's tokens with the bias that their positions add to scores in
        every layer."""
        own = under("source", vars(self))
        bias_CNTS = self.source_positions.into_scores(own, length, length)
        return dataclasses.replace(mask, bias_CNTS=bias_CNTS)

    def read_layer(
        self, layer: Weights, x_BSD: jax.Array, mask: Mask, execution: Execution
    ) -> jax.Array:
        """Run one encoder layer; the mask is from `of_source`."""
        nowhere_BS = jnp.zeros(x_BSD.shape[:2], jnp.int32)  # in the stream already
        return self.encoder(layer, x_BSD, nowhere_BS, mask, execution)[0]

    def finish_source(self, x_BSD: jax.Array, execution: Execution) -> jax.Array:
        """Memory for the decoder, from the encoder's last layer."""
        with jax.named_scope("encoder"):
            return self._finish("encoder_norm", x_BSD, execution, number=1)

    def decode(
        self,
        tokens_BT: jax.Array,
        memory_BSD: jax.Array,
        mask: Mask,
        of_memory: Mask,
        execution: Execution,
    ) -> jax.Array:
        """Final hidden states [B, T, D] of whole targets.

        Args:
          tokens_BT: the targets' tokens so far, each row from its first.
          memory_BSD: from `encode`.
          mask: which of the targets' tokens a token sees.
          of_memory: which of the memory's it sees.
          execution: kernels, precision and dropout.
        """

        def run_layer(
            layer: Weights, x_BTD: jax.Array, mask: Mask, execution: Execution, _: None
        ) -> Any:
            return self.write_layer(layer, x_BTD, memory_BSD, mask, of_memory, execution), None

        return self._decode(run_layer, tokens_BT, mask, execution, None, 0, tokens_BT.shape[1])[0]

    def enter_target(
        self, tokens_BT: jax.Array, execution: Execution, start: jax.Array | int = 0
    ) -> jax.Array:
        """Input of the decoder's first layer for tokens from position `start` on, [B, T, D]."""
        own = under("target", vars(self))
        x_BTD = self._embed(tokens_BT, self.target_positions, own, start)
        return self.dropout(x_BTD, execution.draws, number=2)

    def of_target(self, mask: Mask, length: int, keys: int, start: jax.Array | int = 0) -> Mask:
        """Return a mask of the target's tokens with the bias that their positions add to scores in
        every layer."""
        own = under("target", vars(self))
        bias_CNTS = self.target_positions.into_scores(own, length, keys, start)
        return dataclasses.replace(mask, bias_CNTS=bias_CNTS)

    def write_layer(
        self,
        layer: Weights,
        x_BTD: jax.Array,
        memory_BSD: jax.Array,
        mask: Mask,
        of_memory: Mask,
        execution: Execution,
    ) -> jax.Array:
        """Run one decoder layer over whole targets; the mask is from `of_target`."""
        remembered = self.decoder.remember(layer, memory_BSD, execution)
        return self.decoder(layer, x_BTD, remembered, mask, of_memory, execution)[0]

    def finish_target(self, x_BTD: jax.Array, execution: Execution) -> jax.Array:
        """Final hidden states from the decoder's last layer."""
        with jax.named_scope("decoder"):
            h_BTD = self._finish("decoder_norm", x_BTD, execution, number=3)
            return h_BTD * self.output_scale

    def remember(self, memory_BSD: jax.Array, execution: Execution) -> LayerCache:
        """Return the memory's keys and values in every layer, both [L, B, S, N, H]."""

        def one(layer: Weights, x: jax.Array, _: None) -> tuple[jax.Array, LayerCache]:
            return x, self.decoder.remember(layer, memory_BSD, execution)

        return execution.over_layers(one, memory_BSD, self.decoder_layers)[1]

    def go_on(
        self,
        tokens_BT: jax.Array,
        remembered: LayerCache,
        of_memory: Mask,
        execution: Execution,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """Final hidden states [B, T, D] of tokens that follow a cache's targets, and the
        cache with it.

        Args:
          tokens_BT: the following tokens.
          remembered: from `remember`.
          of_memory: which positions of the memory a token sees.
          execution: kernels, precision and dropout.
          cache: keys and values of the targets' tokens so far.
        """
        room = cache.layers[0].shape[2]

        def run_layer(
            layer: Weights, x_BTD: jax.Array, mask: Mask, execution: Execution, extra: Any
        ) -> Any:
            kept, remembered = extra
            return self.decoder(
                layer, x_BTD, remembered, mask, of_memory, execution, kept, cache.length
            )

        mask, extra = Mask(query_start=cache.length), (cache.layers, remembered)
        h_BTD, layers = self._decode(
            run_layer, tokens_BT, mask, execution, extra, cache.length, room
        )
        return h_BTD, Cache(layers, cache.length + tokens_BT.shape[1])

    @property
    def read_by_layers(self) -> frozenset[str]:
        """Names of the parameters around the layers that every layer of a stack reads."""
        both = (("source", self.source_positions), ("target", self.target_positions))
        return frozenset(
            name
            for side, positions in both
            if positions.adds_to_scores
            for name in vars(self)
            if name.startswith(f"{side}_") and isinstance(vars(self)[name], nnx.Param)
        )

    def output_matrix(self) -> nnx.Param:
        """Return the output matrix [V, D]."""
        return self.token_embedding if self.output is None else self.output

    def output_bias(self) -> None:
        """No output bias."""
        return

    def logit_softcap(self) -> None:
        """No soft-capping of logits."""
        return

    def _decode(
        self,
        run_layer: Any,
        tokens_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        extra: Any,
        start: jax.Array | int,
        keys: int,
    ) -> tuple[jax.Array, Any]:
        """Final hidden states, and each layer's further outputs."""
        x_BTD = self.enter_target(tokens_BT, execution, start)
        mask = self.of_target(mask, tokens_BT.shape[1], keys, start)

        def run_numbered(layer: Weights, x_BTD: jax.Array, own: tuple[jax.Array, Any]) -> Any:
            number, extra = own
            return run_layer(layer, x_BTD, mask, execution.of_layer(number), extra)

        with jax.named_scope("decoder"):
            each = _numbers(self.decoder_layers), extra
            x_BTD, kept = execution.over_layers(run_numbered, x_BTD, self.decoder_layers, each)
        return self.finish_target(x_BTD, execution), kept

    def _embed(
        self,
        tokens_BT: jax.Array,
        embedding: PositionalEmbedding,
        own: Weights,
        start: jax.Array | int = 0,
    ) -> jax.Array:
        with jax.named_scope("embedding"):
            x_BTD = embed(tokens_BT, self.token_embedding, RESIDUAL) * self.embedding_scale
            return embedding.into_stream(own, x_BTD, start)

    def _finish(
        self, name: str, x_BTD: jax.Array, execution: Execution, *, number: int
    ) -> jax.Array:
        if self.norm is not None:
            x_BTD = self.norm(under(name, vars(self)), x_BTD)
        if self.drops_finished:
            x_BTD = self.dropout(x_BTD, execution.draws, number=number)
        return shard(x_BTD, HIDDEN)


def _numbers(layers: Any) -> jax.Array:
    return jnp.arange(jax.tree.leaves(layers)[0].shape[0])
