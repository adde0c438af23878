"""Shared settings of decoders with RMSNorm: objective, module, FLOPs.

Letters: V vocab, D embed, N of 6N.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import jax

from jaxtrain.models.model import ExpertsFacts, Inputs
from jaxtrain.nn.layers import RMSNorm
from jaxtrain.nn.parameters import normal, param
from jaxtrain.nn.transformer.block import Block, residual_stddev
from jaxtrain.nn.transformer.decoder import Decoder
from jaxtrain.nn.transformer.multi_token_prediction import PredictionModule


class DecoderSizes(Protocol):
    """Settings, each documented at the models, and what a `TokenModel` says by them.

    A model that is this has the settings as fields, each with a default (a dataclass would take
    the property for a missing one), and says what its `block` is.
    """

    inputs: ClassVar[Inputs] = "tokens"

    @property
    def objective(self) -> str:
        """They learn to tell the next token."""
        return "next_token"

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def tie_embeddings(self) -> bool: ...

    @property
    def block(self) -> Block:
        """What every layer computes."""
        ...

    # What most have not: a model that has it says so.

    @property
    def experts(self) -> ExpertsFacts | None:
        """Those that tokens are routed to."""
        return None

    @property
    def leading(self) -> Sequence[Block]:
        """Layers, of `num_layers`, that stand before the others and compute something else."""
        return ()

    @property
    def predicting(self) -> Sequence[PredictionModule]:
        """Modules after the layers, each of which predicts one more token in training."""
        return ()

    @property
    def embedding_scale(self) -> float:
        """What embedded tokens are multiplied by."""
        return 1.0

    @property
    def logit_softcap(self) -> float | None:
        """The bound that logits are flattened towards; None: none."""
        return None

    @property
    def layers(self) -> int:
        """All blocks but the leading ones are one stack."""
        return self.num_layers - len(self.leading)

    @property
    def residual_stddev(self) -> float:
        """The spread of weights that make what is added to the residual stream."""
        return residual_stddev(self.num_layers)

    @property
    def norm(self) -> RMSNorm:
        """The norm before each part of a block, and after the last."""
        return RMSNorm(dim=self.embed_dim, epsilon=self.norm_eps)

    def build(self, key: jax.Array) -> Decoder:
        """The module with freshly drawn parameters."""
        key_tokens, key_output, key_layers = jax.random.split(key, 3)
        shape, axes = (self.vocab_size, self.embed_dim), ("vocab", "vocab_embed")
        return Decoder(
            self.block,
            key_layers,
            num_layers=self.layers,
            token_embedding=param(key_tokens, shape, axes, normal(0.02), role="embedding"),
            norm=self.norm,
            output=None
            if self.tie_embeddings
            else param(key_output, shape, axes, normal(0.02), role="output"),
            embedding_scale=self.embedding_scale,
            logit_softcap=self.logit_softcap,
            leading=self.leading,
            predicting=self.predicting,
        )

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N)."""
        around = sum(part.matmul_parameters() for part in (*self.leading, *self.predicting))
        own = self.layers * self.block.matmul_parameters()
        return around + own + (1 + len(self.predicting)) * self.vocab_size * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs a token: 6 N and the attention scores (arXiv 2204.02311, appendix B)."""
        layers = self.num_layers + len(self.predicting)
        scores = layers * self.block.attention.score_flops_per_token(sequence_length)
        return 6 * self.matmul_parameters() + scores

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one sequence of shape (T,)."""
        return shape[0] * self.flops_per_token(shape[0])
