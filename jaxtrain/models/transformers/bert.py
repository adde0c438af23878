"""BERT: bidirectional encoder with learned positions, post-LayerNorm blocks, a tied head.

Source: Devlin et al. 2018 (arXiv 1810.04805), its masked language model without dropout; the head
is that of the authors' code: a layer, GELU and a norm before the transposed embedding and a bias;
for sentence classes a layer and tanh before a matrix of classes and a bias. An encoder of
sentences (Reimers and Gurevych 2019, arXiv 1908.10084) has no head at all.
Letters: B batch, T length, V vocab, D embed, C positions, Y token types.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.errors import UserError, nearest_multiple, require_at_least, require_positive
from jaxtrain.config.reader import configurable
from jaxtrain.models.language_model import LanguageModel
from jaxtrain.models.model import validate_features
from jaxtrain.nn.attention.multi_head import MultiHead
from jaxtrain.nn.execution import HIDDEN
from jaxtrain.nn.layers import Pooling, add_bias, embed, map_of_vectors
from jaxtrain.nn.matmul.contract import contract
from jaxtrain.nn.normalization import LayerNorm
from jaxtrain.nn.parameters import add_prefix, constant, normal, param, stack, under
from jaxtrain.nn.transformer.block import RESIDUAL, Block, post_norm
from jaxtrain.nn.transformer.mlp import TwoLayers, exact_gelu
from jaxtrain.parallel.gathering import gather
from jaxtrain.parallel.sharding import shard

_SPREAD = normal(0.02)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BERT(LanguageModel):
    """Sizes of a BERT; the defaults are the base model.

    Attributes:
      vocab_size: rows of the embedding table; the last token is the mask's in training.
      num_layers: blocks.
      embed_dim: width of the residual stream.
      num_heads: attention heads; embed_dim / num_heads is the head_dim.
      mlp_dim: width inside the MLP.
      context_length: the longest sequence, in tokens.
      token_types: number of token types with an embedding. Text has the first type: the others
        are kept unchanged, for published models of pairs of sentences.
      first_position: the row of the position table of a text's first token; the rows
        before it are kept unchanged, for published models that count from there (RoBERTa).
      norm_eps: epsilon of the layer norms.
      objective: 'masked_token', or 'token_classification', with the sentence head: a layer
        and tanh, and a matrix of classes.
      num_classes: number of classes; for 'token_classification' alone.
      features: size of the vector that is read at each position instead of a token; None:
        tokens are read. For 'token_classification' alone.
      pooling: how the tokens' hidden states become a text's embedding: their 'mean', the 'first' of
        them, or their elementwise 'max'. Such a model has no head: in training the transposed
        embedding predicts masked tokens. None: a head, and no text embeddings.
      normalized: whether these embeddings have length 1; for models with `pooling` alone.
    """

    vocab_size: int = 30522
    num_layers: int = 12
    embed_dim: int = 768
    num_heads: int = 12
    mlp_dim: int = 3072
    context_length: int = 512
    token_types: int = 2
    first_position: int = 0
    norm_eps: float = 1e-12
    objective: Literal["masked_token", "token_classification"] = "masked_token"
    num_classes: int = 2
    features: int | None = None
    pooling: Pooling | None = None
    normalized: bool = False

    cached = ()
    # The setting of each logical axis's size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "heads": "num_heads", "mlp": "mlp_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim", "positions": "context_length",
    }  # fmt: skip

    def __post_init__(self) -> None:
        sizes = [field.name for field in dataclasses.fields(self)]
        others = ("norm_eps", "objective", "first_position", "pooling", "normalized")
        require_at_least(1, self, *(name for name in sizes if name not in others))
        require_at_least(0, self, "first_position")
        require_positive(self, "norm_eps")
        validate_features(self)
        if self.embed_dim % self.num_heads:
            nearest = nearest_multiple(self.embed_dim, self.num_heads)
            raise UserError(
                f"BERT.embed_dim={self.embed_dim} does not divide by BERT.num_heads="
                f"{self.num_heads}; the nearest embed_dim is {nearest}"
            )
        if self.pooling is not None and self.objective != "masked_token":
            raise UserError(
                f"BERT.pooling={self.pooling!r} with BERT.objective={self.objective!r}: a model "
                "that embeds texts has no classification head; use BERT.pooling=None, or "
                "'masked_token'"
            )
        if self.normalized and self.pooling is None:
            raise UserError(
                "BERT.normalized=True has no effect with BERT.pooling=None, which produces no "
                "embeddings; use BERT.pooling='mean', or False"
            )

    @property
    def norm(self) -> LayerNorm:
        """The norm after the embedding, after each part of a block, and in the head."""
        return LayerNorm(dim=self.embed_dim, epsilon=self.norm_eps)

    @property
    def block(self) -> Block:
        """The layers' definition; after a norm no variance grows with the layers."""
        D, N, spread = self.embed_dim, self.num_heads, 0.02
        return Block(
            attention=MultiHead(
                embed_dim=D, num_heads=N, head_dim=D // N, residual_stddev=spread, causal=False
            ),
            mlp=TwoLayers(
                embed_dim=D, mlp_dim=self.mlp_dim, residual_stddev=spread, function=exact_gelu
            ),
            norm=self.norm,
            placement=post_norm,
        )  # fmt: skip

    def build(self, key: jax.Array) -> "BERTModel":
        """Return the newly initialized module."""
        return BERTModel(self, key)

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token, the head's with them."""
        head = 0 if self.pooling is not None else self.embed_dim**2
        return super().matmul_parameters() + head


def _head(sizes: BERT, key: jax.Array) -> dict[str, nnx.Param]:
    """Parameters of the head, without its norm; none in a sentence encoder."""
    if sizes.pooling is not None:
        return {}
    V, D, axis, output = sizes.vocab_size, sizes.embed_dim, "vocab", {}
    if sizes.objective == "token_classification":
        V, axis, key_output = sizes.num_classes, "narrow", jax.random.fold_in(key, 1)
        matrix = param(key_output, (V, D), (axis, "vocab_embed"), _SPREAD, role="output")
        output = {"output": matrix}
    return {
        "transform": param(key, (D, D), ("embed", "vector"), _SPREAD),
        "transform_bias": param(key, (D,), ("vector",), constant(0.0)),
        "bias": param(key, (V,), (axis,), constant(0.0)),
        **output,
    }


class BERTModel(nnx.Module):
    """Decoder-only model: tokens to hidden states and logits; a `Transformer`."""

    def __init__(self, sizes: BERT, key: jax.Array) -> None:
        key_tokens, key_positions, key_types, key_layers, key_head = jax.random.split(key, 5)
        V, D, spread = sizes.vocab_size, sizes.embed_dim, _SPREAD
        if sizes.features is None:
            axes = ("vocab", "vocab_embed")
            self.token_embedding = param(key_tokens, (V, D), axes, spread, role="embedding")
        else:
            self.token_embedding = map_of_vectors(key_tokens, sizes.features, D)
        self.position_embedding = param(
            key_positions, (sizes.first_position + sizes.context_length, D),
            ("positions", "vocab_embed"), spread, role="position",
        )  # fmt: skip
        self.type_embedding = param(
            key_types, (sizes.token_types, D), ("narrow", "vocab_embed"), spread
        )
        self.first_position = sizes.first_position
        self.block, self.norm = sizes.block, sizes.norm
        self.layers = nnx.data(stack(self.block.weights, sizes.num_layers, key_layers))
        for name, weight in add_prefix("embedding_norm", self.norm.weights(key)).items():
            setattr(self, name, weight)
        self.classifies = sizes.objective == "token_classification"
        head = _head(sizes, key_head)
        self.transform = head.get("transform")
        self.transform_bias = head.get("transform_bias")
        self.output, self.bias = head.get("output"), head.get("bias")
        if head and not self.classifies:
            for name, weight in add_prefix("norm", self.norm.weights(key)).items():
                setattr(self, name, weight)

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Input of the first layer, [B, T, D]."""
        with jax.named_scope("embedding"):
            positions = positions_BT + self.first_position, self.position_embedding
            x_BTD = embed(tokens_BT, self.token_embedding, RESIDUAL, positions)
            x_BTD += gather(self.type_embedding)[0].astype(x_BTD.dtype)
            return self.norm(under("embedding_norm", vars(self)), x_BTD)

    @property
    def leading(self) -> tuple[()]:
        """There are no leading layers."""
        return ()

    def run_layer(self, *arguments: Any) -> Any:
        """Run one layer; arguments and results as in `Transformer.run_layer`."""
        return self.block(*arguments)

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Input of the output matrix: a layer, GELU and a norm; for classes a layer and tanh;
        the last layer's output if there is no head."""
        if self.transform is None or self.transform_bias is None:
            return shard(x_BTD, HIDDEN)
        with jax.named_scope("transform"):
            h_BTD = contract("BTD,DF->BTF", x_BTD, self.transform, RESIDUAL)
            if self.classifies:
                return shard(jnp.tanh(add_bias(h_BTD, self.transform_bias)), HIDDEN)
            h_BTD = exact_gelu(add_bias(h_BTD, self.transform_bias))
            return shard(self.norm(under("norm", vars(self)), h_BTD), HIDDEN)

    def output_matrix(self) -> nnx.Param:
        """Return the token embedding [V, D], or the matrix of classes [C, D]."""
        return self.token_embedding if self.output is None else self.output

    def output_bias(self) -> nnx.Param | None:
        """Return the output bias [V]; None: there is no head."""
        return self.bias

    def logit_softcap(self) -> None:
        """No soft-capping of logits."""
        return
