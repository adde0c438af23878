"""Elman's recurrent network as a language model: an embedding, recurrent layers, an output matrix.

Source: Elman 1990, "Finding Structure in Time"; the cell is `torch.nn.RNN`'s.
Letters: B batch, D embed and state, G = D.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.config.errors import refuse_below
from jaxtrain.config.reader import configurable
from jaxtrain.models.model import Inputs
from jaxtrain.nn.block import HIDDEN
from jaxtrain.nn.cache import Cached
from jaxtrain.nn.decoder import Decoder
from jaxtrain.nn.parameters import normal, param
from jaxtrain.nn.recurrent import Recurrent


def cell(x_BG: jax.Array, u_BG: jax.Array, h_BD: jax.Array) -> jax.Array:
    """tanh of both."""
    del h_BD
    return jnp.tanh(x_BG + u_BG)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RNN:
    """Sizes of an Elman network as a language model.

    Attributes:
      vocab_size: rows of the embedding table and of the output matrix.
      num_layers: recurrent layers.
      embed_dim: width of the embedding and of every layer's state.
      context_length: the longest sequence, in tokens; the state starts from zero at its beginning
        and at that of every document.
    """

    vocab_size: int = 10000
    num_layers: int = 2
    embed_dim: int = 650
    context_length: int = 1024

    inputs: ClassVar[Inputs] = "tokens"
    objective = "next_token"
    attention = None
    experts = None
    settings: ClassVar[dict[str, str]] = {
        "vocab": "vocab_size", "embed": "embed_dim", "gates": "embed_dim",
        "layers": "num_layers", "vocab_embed": "embed_dim",
    }  # fmt: skip

    def __post_init__(self) -> None:
        refuse_below(1, self, "vocab_size", "num_layers", "embed_dim", "context_length")

    @property
    def layers(self) -> int:
        """All layers are one stack."""
        return self.num_layers

    @property
    def cached(self) -> tuple[Cached, ...]:
        """A layer's state."""
        return (
            Cached(shape=(self.embed_dim,), axes=("embed",), every_token=False, dtype="float32"),
        )

    @property
    def layer(self) -> Recurrent:
        """What every layer computes."""
        return Recurrent(self.embed_dim, 1, cell, "rnn")

    def build(self, key: jax.Array) -> Decoder:
        """The module with freshly drawn parameters."""
        key_tokens, key_output, key_layers = jax.random.split(key, 3)
        shape, axes = (self.vocab_size, self.embed_dim), ("vocab", "vocab_embed")
        spread = normal(1 / math.sqrt(3 * self.embed_dim))
        return Decoder(
            self.layer,
            key_layers,
            num_layers=self.num_layers,
            token_embedding=param(key_tokens, shape, axes, normal(1.0), role="embedding"),
            output=param(key_output, shape, axes, spread, role="output"),
            stream=HIDDEN,
        )

    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token (the N of 6N)."""
        return self.num_layers * self.layer.matmul_parameters() + self.vocab_size * self.embed_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs a token: 6 N, whatever the length."""
        del sequence_length
        return 6.0 * self.matmul_parameters()

    def flops(self, shape: tuple[int, ...]) -> float:
        """Training FLOPs of one sequence of shape (T,)."""
        return shape[0] * self.flops_per_token(shape[0])
