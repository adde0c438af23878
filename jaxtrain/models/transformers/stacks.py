"""What the sizes of encoder-decoders have in common: heads, a decoder's cache, products.

Letters: S source length, T target length, D embed, N heads, H head_dim, V vocab.
"""

import abc
import dataclasses
from typing import ClassVar

from jaxtrain.models.model import AttentionFacts, Inputs
from jaxtrain.nn.block import Block
from jaxtrain.nn.cache import Cached
from jaxtrain.nn.cross_block import CrossBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stacks(abc.ABC):
    """An encoder and a decoder of as many layers, with as many heads each.

    Attributes:
      vocab_size: rows of the embedding table, of sources and targets.
      num_layers: blocks of the encoder, and of the decoder.
      embed_dim: width of the residual stream.
      num_heads: attention heads.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int

    inputs: ClassVar[Inputs] = "pairs"
    objective = "sequence_to_sequence"
    experts = None

    @property
    @abc.abstractmethod
    def head_width(self) -> int:
        """Width of each head."""

    @property
    @abc.abstractmethod
    def encoder(self) -> Block:
        """What every layer computes that reads the source."""

    @property
    @abc.abstractmethod
    def decoder(self) -> CrossBlock:
        """What every layer computes that writes the target."""

    @property
    def layers(self) -> int:
        """Of each of the two stacks."""
        return self.num_layers

    @property
    def attention(self) -> AttentionFacts:
        """Of the source and to it a query sees all, of the target what is written."""
        N, H = self.num_heads, self.head_width
        return AttentionFacts(num_heads=N, num_kv_heads=N, key_dim=H, value_dim=H, causal=False)

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Keys and values of the target's tokens so far."""
        shape, axes = (self.num_heads, self.head_width), ("heads", "head_dim")
        return (Cached(shape=shape, axes=axes, every_token=True),) * 2

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one pair of S and T tokens: 6 a parameter and token, scores of all
        keys, and of half of them where the target sees its own."""
        S, T = shape
        encoder, decoder = self.encoder, self.decoder
        of_memory = decoder.cross.matmul_parameters() // 2  # its keys and values
        read = S * (6 * encoder.matmul_parameters() + encoder.attention.score_flops_per_token(S))
        own = decoder.matmul_parameters() - of_memory
        scores = decoder.attention.score_flops_per_token(T) / 2
        scores += decoder.cross.score_flops_per_token(S)
        written = 6 * S * of_memory + T * (6 * own + scores)
        return self.num_layers * (read + written) + 6.0 * T * self.vocab_size * self.embed_dim
