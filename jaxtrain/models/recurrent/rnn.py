"""RNN (Elman network) language model: embedding, recurrent layers, output matrix.

Source: Elman 1990, "Finding Structure in Time"; the cell is `torch.nn.RNN`'s.
Letters: B batch, D embed and state, G = D.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.config.reader import configurable
from jaxtrain.models.recurrent.recurrent_sizes import RecurrentSizes
from jaxtrain.nn.recurrent.recurrent import Recurrent


def cell(x_BG: jax.Array, u_BG: jax.Array, h_BD: jax.Array) -> jax.Array:
    """tanh of both."""
    del h_BD
    return jnp.tanh(x_BG + u_BG)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RNN(RecurrentSizes):
    """Sizes of an Elman network as a language model.

    Attributes:
      vocab_size: rows of the embedding table and of the output matrix.
      num_layers: recurrent layers.
      embed_dim: width of the embedding and of every layer's state.
      context_length: the longest sequence, in tokens; the state starts from zero at its beginning
        and at that of every document.
      objective: 'next_token'; or 'token_classification', whose output matrix is one of classes.
      num_classes: classes that are distinguished; of 'token_classification' alone.
      bidirectional: whether each layer reads from the right too, with half of embed_dim each way.
      features: numbers of the vector that is read at each place in place of a token; None: tokens
        are read. Of 'token_classification' alone.
    """

    vocab_size: int = 10000
    num_layers: int = 2
    embed_dim: int = 650
    context_length: int = 1024
    objective: Literal["next_token", "token_classification"] = "next_token"
    num_classes: int = 2
    bidirectional: bool = False
    features: int | None = None

    def one_way(self, state_dim: int) -> Recurrent:
        """What a layer computes in one direction, with a state of this width."""
        return Recurrent(self.embed_dim, state_dim, 1, cell, "rnn")
