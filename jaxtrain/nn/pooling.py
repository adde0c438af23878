"""Pooling of token hidden states into one vector per text.

Source: Reimers and Gurevych 2019 (arXiv 1908.10084), section 3.
Letters: B texts, T length, D embed.
"""

from typing import Literal

import jax
import jax.numpy as jnp

Pooling = Literal["mean", "first", "max"]


def pool(
    h_BTD: jax.Array, segment_ids_BT: jax.Array, pooling: Pooling, *, normalized: bool
) -> jax.Array:
    """The vector of each text, float32 [B, D]; padding has no part in it.

    Args:
      h_BTD: finished hidden states, one text in a row.
      segment_ids_BT: 0 for padding, which follows the text.
      pooling: the mean of the text's tokens, its first token, or each number's maximum.
      normalized: whether it is divided by its length.
    """
    h_BTD, counts_BT1 = h_BTD.astype(jnp.float32), (segment_ids_BT != 0)[..., None]
    match pooling:
        case "mean":
            # At least 1, as sentence-transformers has it: a text without tokens is zeros.
            tokens_B1 = jnp.maximum(counts_BT1.sum(1), 1)
            vector_BD = jnp.where(counts_BT1, h_BTD, 0.0).sum(1) / tokens_B1
        case "first":
            vector_BD = h_BTD[:, 0]
        case "max":
            vector_BD = jnp.where(counts_BT1, h_BTD, -jnp.inf).max(1)
    if not normalized:
        return vector_BD
    length_B1 = jnp.linalg.norm(vector_BD, axis=-1, keepdims=True)
    return vector_BD / jnp.maximum(length_B1, 1e-12)
