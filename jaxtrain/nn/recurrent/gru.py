"""Gated recurrent unit (GRU) cell.

Source: Cho et al. 2014 (arXiv 1406.1078); the cell is `torch.nn.GRU`'s, whose reset gate
multiplies the state's product and not the state.
Letters: B batch, D state, G = 3 D (reset and update gate and candidate, in this order).
"""

import jax
import jax.numpy as jnp

from jaxtrain.nn.recurrent.recurrent import Recurrent


def cell(x_BG: jax.Array, u_BG: jax.Array, h_BD: jax.Array) -> jax.Array:
    """Between the state and a candidate, as the update gate says."""
    (x_r, x_z, x_n), (u_r, u_z, u_n) = jnp.split(x_BG, 3, axis=-1), jnp.split(u_BG, 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + u_r), jax.nn.sigmoid(x_z + u_z)
    return (1 - z) * jnp.tanh(x_n + r * u_n) + z * h_BD


def gru_layer(embed_dim: int, state_dim: int) -> Recurrent:
    """Return a GRU layer from `embed_dim` inputs to a state of `state_dim`."""
    return Recurrent(embed_dim, state_dim, 3, cell, "gru")
