"""Decoder-only language model: embedding, layers, norm, output matrix, multi-token prediction.

Letters: B batch, T length, D embed, V vocab, L layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import HIDDEN, Execution
from jaxtrain.nn.kv_cache import LayerCache
from jaxtrain.nn.layers import embed
from jaxtrain.nn.normalization import Norm, RMSNorm
from jaxtrain.nn.parameters import Weights, add_prefix, merge_weights, normal, param, stack, under
from jaxtrain.nn.transformer.block import RESIDUAL, Block
from jaxtrain.nn.transformer.language_model import Auxiliary
from jaxtrain.parallel.sharding import shard


class Layer(Protocol):
    """Layer of a model: a `Block`, or another."""

    def weights(self, key: jax.Array) -> Weights:
        """Initialize the parameters of one layer."""
        ...

    def __call__(
        self,
        own: Weights,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """Run one layer; arguments and results as in `Transformer.run_layer`."""
        ...


class Decoder(nnx.Module):
    """Decoder-only model: tokens to hidden states and logits; a `Transformer`."""

    def __init__(
        self,
        layer: Layer,
        key: jax.Array,
        *,
        num_layers: int,
        token_embedding: nnx.Param,
        position_embedding: nnx.Param | None = None,
        norm: Norm | None = None,
        output: nnx.Param | None = None,
        stream: tuple[str, ...] = RESIDUAL,
        embedding_scale: float = 1.0,
        logit_softcap: float | None = None,
        leading: Sequence[Layer] = (),
        predicting: "Sequence[PredictionModule]" = (),
    ) -> None:
        """Initialize the layers; embedding and head are passed in.

        Args:
          layer: the layers' definition.
          key: for their parameters.
          num_layers: number of layers.
          token_embedding: the table [V, D].
          position_embedding: learned positions [positions, D]; None where the layers know
            positions.
          norm: after the last layer; None: none.
          output: the output matrix [V, D]; None: the token embedding.
          stream: logical axes of the activations between layers.
          embedding_scale: factor of embedded tokens, including positions.
          logit_softcap: the softcap of the logits; None: none.
          leading: the leading layers, each run on its own before the scanned ones.
          predicting: modules after the last layer, each of which predicts one more token.
        """
        self.layer, self.norm, self.stream = layer, norm, stream
        self.embedding_scale, self.softcap = embedding_scale, logit_softcap
        self.token_embedding, self.position_embedding = token_embedding, position_embedding
        self.layers = nnx.data(stack(layer.weights, num_layers, key))
        self.leading_layers = tuple(leading)
        self.first_layers = nnx.data(_init(leading, jax.random.fold_in(key, num_layers)))
        self.prediction_modules = tuple(predicting)
        key_predictors = jax.random.fold_in(key, num_layers + 1)
        self.predictors = nnx.data(_init(predicting, key_predictors))
        self.output = output
        for name, weight in add_prefix("norm", norm.weights(key) if norm else {}).items():
            setattr(self, name, weight)

    @property
    def leading(self) -> list[Callable[..., tuple[jax.Array, LayerCache | None, Auxiliary]]]:
        """The leading layers, with their parameters."""
        pairs = zip(self.leading_layers, self.first_layers, strict=True)
        return [functools.partial(layer, own) for layer, own in pairs]

    @property
    def predicting(self) -> list[Callable[..., tuple[jax.Array, Auxiliary]]]:
        """The prediction modules, with their parameters."""
        pairs = zip(self.prediction_modules, self.predictors, strict=True)
        return [functools.partial(module, own) for module, own in pairs]

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Input of the first layer, [B, T, D]."""
        with jax.named_scope("embedding"):
            learned = self.position_embedding
            positions = None if learned is None else (positions_BT, learned)
            x_BTD = embed(tokens_BT, self.token_embedding, self.stream, positions)
            return x_BTD if self.embedding_scale == 1 else x_BTD * self.embedding_scale

    def run_layer(
        self,
        layer: Weights,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
        cache: LayerCache | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """Run one layer with these parameters."""
        return self.layer(layer, x_BTD, positions_BT, mask, execution, cache, start)

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Return the normalized activations after the last layer."""
        if self.norm is not None:
            x_BTD = self.norm(under("norm", vars(self)), x_BTD)
        return shard(x_BTD, HIDDEN)

    def output_matrix(self) -> nnx.Param:
        """Return the output matrix [V, D]."""
        return self.token_embedding if self.output is None else self.output

    def output_bias(self) -> None:
        """No output bias."""
        return

    def logit_softcap(self) -> float | None:
        """Return the softcap of the logits."""
        return self.softcap


class DecoderSizes(Protocol):
    """Sizes of a `decoder`, and its layers: `layers` are those after the leading
    ones."""

    @property
    def block(self) -> Block: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


def decoder(sizes: DecoderSizes, key: jax.Array, **more: Any) -> Decoder:
    """Return a decoder of newly initialized blocks and embeddings; its last norm is the blocks'.

    Args:
      sizes: its sizes, its block, and whether embeddings are tied.
      key: for the parameters.
      **more: other arguments of `Decoder`.
    """
    key_tokens, key_output, key_layers = jax.random.split(key, 3)
    shape, axes = (sizes.vocab_size, sizes.embed_dim), ("vocab", "vocab_embed")
    output = None
    if not sizes.tie_embeddings:
        output = param(key_output, shape, axes, normal(0.02), role="output")
    block = sizes.block
    return Decoder(
        block,
        key_layers,
        num_layers=sizes.layers,
        token_embedding=param(key_tokens, shape, axes, normal(0.02), role="embedding"),
        norm=block.norm,
        output=output,
        **more,
    )


def _init(parts: "Sequence[Layer | PredictionModule]", key: jax.Array) -> list[Weights]:
    """Initialize the parameters of each."""
    keys = jax.random.split(key, len(parts) or 1)
    return [part.weights(own) for part, own in zip(parts, keys, strict=False)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionModule:
    """norm(block(project [norm(embedding); norm(hidden)])): from a later token's embedding and
    the hidden states before it, the next final hidden states.

    Attributes:
      embed_dim: width of the residual stream.
      block: the layer.
      norm: kind of the three norms.
      number: the layer's index, after those of the model.
    """

    embed_dim: int
    block: Block
    norm: RMSNorm
    number: int

    def weights(self, key: jax.Array) -> Weights:
        """Parameters of the block, three norms, and the projection [2 D, D], the embedding's rows
        first."""
        key_block, key_project = jax.random.split(key)
        shape = 2 * self.embed_dim, self.embed_dim
        return merge_weights(
            add_prefix("token_norm", self.norm.weights(key)),
            add_prefix("hidden_norm", self.norm.weights(key)),
            {"project": param(key_project, shape, ("embed", "latent"), normal(0.02))},
            self.block.weights(key_block),
            add_prefix("norm", self.norm.weights(key)),
        )

    def matmul_parameters(self) -> int:
        """Number of parameters used in a matmul for every token, without the output matrix."""
        return 2 * self.embed_dim**2 + self.block.matmul_parameters()

    def __call__(
        self,
        own: Weights,
        h_BTD: jax.Array,
        token_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        execution: Execution,
    ) -> tuple[jax.Array, Auxiliary]:
        """Final hidden states [B, T, D] of the token after those, and the layer's sums.

        Args:
          own: the parameters.
          h_BTD: the final hidden states that predict the previous token.
          token_BTD: the embedding of that token.
          positions_BT: positions of the tokens in their documents.
          mask: which positions see which.
          execution: kernels, precision and dropout.
        """

        def run(x_BTD: jax.Array) -> tuple[jax.Array, Auxiliary]:
            y_BTD, _, sums = self.block(
                own, x_BTD, positions_BT, mask, execution.of_layer(self.number)
            )
            return y_BTD, sums

        with jax.named_scope("prediction"):
            both_BTD = jnp.concatenate(
                [
                    self.norm(under("token_norm", own), token_BTD),
                    self.norm(under("hidden_norm", own), shard(h_BTD, RESIDUAL)),
                ],
                axis=-1,
            )
            x_BTD = execution.contract("BTD,DC->BTC", both_BTD, own["project"], RESIDUAL)
            x_BTD, sums = execution.remat_layer(run)(x_BTD)
            return shard(self.norm(under("norm", own), x_BTD), HIDDEN), sums
