"""Shared settings of encoder-decoders: heads, KV cache, FLOPs.

Letters: S source length, T target length, D embed, N heads, H head_dim, V vocab.
"""

from typing import ClassVar, Protocol

from jaxtrain.models.model import AttentionFacts, Inputs
from jaxtrain.nn.cache import Cached
from jaxtrain.nn.transformer.block import Block
from jaxtrain.nn.transformer.cross_block import CrossBlock


class Stacks(Protocol):
    """The settings, each documented at the models, and what a `PairModel` says by them: an encoder
    and a decoder of as many layers, with as many heads each.

    A model that is this has the settings as fields, each with a default (a dataclass would take
    the property for a missing one), and says what a layer of each stack computes.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def encoder(self) -> Block: ...
    @property
    def decoder(self) -> CrossBlock: ...

    objective: str = "sequence_to_sequence"
    inputs: ClassVar[Inputs] = "pairs"
    experts: None = None

    @property
    def layers(self) -> int:
        """Of each of the two stacks."""
        return self.num_layers

    @property
    def attention(self) -> AttentionFacts:
        """Of the source and to it a query sees all, of the target what is written."""
        return self.encoder.attention.facts

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of the target's tokens so far."""
        shape, axes = (self.num_heads, self.head_width), ("heads", "head_dim")
        return (Cached(shape=shape, axes=axes, every_token=True),) * 2

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one pair of S and T tokens: of the stacks, and of the logits."""
        return sum(self.flops_of_stacks(shape)) + 6.0 * shape[1] * self.vocab_size * self.embed_dim

    def flops_of_stacks(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """Those of the encoder's layers and of the decoder's: 6 a parameter and token, scores of
        all keys, and of half of them where the target sees its own."""
        S, T = shape
        encoder, decoder = self.encoder, self.decoder
        of_memory = decoder.cross.matmul_parameters() // 2  # its keys and values
        read = S * (6 * encoder.matmul_parameters() + encoder.attention.score_flops_per_token(S))
        own = decoder.matmul_parameters() - of_memory
        scores = decoder.attention.score_flops_per_token(T) / 2
        scores += decoder.cross.score_flops_per_token(S)
        written = 6 * S * of_memory + T * (6 * own + scores)
        return self.num_layers * read, self.num_layers * written
