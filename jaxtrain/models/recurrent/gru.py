"""GRU language model: an embedding, recurrent layers one above the other, an output matrix.

Source: Cho et al. 2014 (arXiv 1406.1078); the cell is `torch.nn.GRU`'s, whose reset gate
multiplies the state's product and not the state.
Letters: B batch, D embed and state, G = 3 D (reset and update gate and candidate, in this order).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.config.reader import configurable
from jaxtrain.models.recurrent.recurrent_sizes import RecurrentSizes
from jaxtrain.nn.recurrent import Recurrent


def cell(x_BG: jax.Array, u_BG: jax.Array, h_BD: jax.Array) -> jax.Array:
    """Between the state and a candidate, as the update gate says."""
    (x_r, x_z, x_n), (u_r, u_z, u_n) = jnp.split(x_BG, 3, axis=-1), jnp.split(u_BG, 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + u_r), jax.nn.sigmoid(x_z + u_z)
    return (1 - z) * jnp.tanh(x_n + r * u_n) + z * h_BD


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GRU(RecurrentSizes):
    """Sizes of a GRU language model.

    Attributes:
      vocab_size: rows of the embedding table and of the output matrix.
      num_layers: recurrent layers.
      embed_dim: width of the embedding and of every layer's state.
      context_length: the longest sequence, in tokens; the state starts from zero at its beginning
        and at that of every document.
      objective: 'next_token'; or 'token_classification', whose output matrix is one of classes.
      num_classes: classes that are told apart; of 'token_classification' alone.
      bidirectional: whether each layer reads from the right too, with half of embed_dim each way.
    """

    vocab_size: int = 10000
    num_layers: int = 2
    embed_dim: int = 650
    context_length: int = 1024
    objective: Literal["next_token", "token_classification"] = "next_token"
    num_classes: int = 2
    bidirectional: bool = False

    def one_way(self, state_dim: int) -> Recurrent:
        """What a layer computes in one direction, with a state of this width."""
        return Recurrent(self.embed_dim, state_dim, 3, cell, "gru")
