"""Seq2Seq: GRU encoder and decoder with attention.

Sources: Cho et al. 2014 (arXiv 1406.1078) and Sutskever et al. 2014 (arXiv 1409.3215), whose
sources are read in their order here; attention of Luong et al. 2015 (arXiv 1508.04025), without
feeding it to the next input: so all positions of a target are trained at once.
Letters: S source length, T target length, D embed, V vocab, L layers.
"""

import dataclasses
from typing import ClassVar

import jax

from jaxtrain.config.errors import require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs
from jaxtrain.nn.kv_cache import Cached
from jaxtrain.nn.recurrent.recurrent import (
    Recurrent,
    RecurrentLayer,
    gru_layer,
    in_directions,
    validate_directions,
)
from jaxtrain.nn.recurrent.seq2seq import GlobalAttention, RecurrentPair


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2Seq:
    """Sizes of a recurrent encoder-decoder.

    Attributes:
      vocab_size: rows of the source's embedding table, of the target's and of the output matrix.
      num_layers: layers of the encoder, and of the decoder; each decoder layer starts from the last
        state of its encoder layer.
      embed_dim: width of the embeddings and of every layer's state.
      context_length: the longest source, and the longest target, in tokens.
      bidirectional: whether each encoder layer reads in both directions, with half of
        embed_dim each; a decoder layer starts from both last states concatenated.
      attends: whether each position of the target attends to all states of the encoder; otherwise
        the source is only in the initial states.
    """

    vocab_size: int = 256
    num_layers: int = 1
    embed_dim: int = 256
    context_length: int = 64
    bidirectional: bool = False
    attends: bool = True

    inputs: ClassVar[Inputs] = "pairs"
    objective = "sequence_to_sequence"
    attention = None  # no attention kernel: it has no heads
    experts = None
    # The setting of each logical axis's size: for messages about sizes that do not divide.
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "gates": "embed_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        require_at_least(1, self, "vocab_size", "num_layers", "embed_dim", "context_length")
        validate_directions(self)

    @property
    def layers(self) -> int:
        """Layers of each of the two stacks."""
        return self.num_layers

    @property
    def cached(self) -> tuple[Cached, ...]:
        """Cached state of a layer."""
        return self.decoder.facts.cached

    @property
    def decoder(self) -> Recurrent:
        """The definition of the decoder's layers."""
        return gru_layer(self.embed_dim, self.embed_dim)

    @property
    def encoder(self) -> RecurrentLayer:
        """The definition of the encoder's layers."""
        return in_directions(self, gru_layer)

    @property
    def looking(self) -> GlobalAttention | None:
        """Attention from target positions to the source."""
        return GlobalAttention(self.embed_dim) if self.attends else None

    def build(self, key: jax.Array) -> RecurrentPair:
        """Return the newly initialized module."""
        return RecurrentPair(
            self.encoder,
            self.decoder,
            key,
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            vocab_size=self.vocab_size,
            attention=self.looking,
        )

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one pair of S and T tokens: 6 per parameter and token, and the scores
        and means of attention."""
        S, T = shape
        read = self.num_layers * self.encoder.matmul_parameters()
        parameters = self.num_layers * self.decoder.matmul_parameters()
        parameters += self.vocab_size * self.embed_dim
        if self.looking is not None:
            parameters += self.looking.matmul_parameters() + 2 * S * self.embed_dim
        return 6.0 * (S * read + T * parameters)
