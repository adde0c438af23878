"""Signs of gradients, told in a bit each, and what most of the replicas say.

Letters: k replicas, M bytes of a part.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.training.exchange.compression import Arrays, from_flat, to_flat

_BITS = 8


@dataclasses.dataclass(frozen=True)
class Signs:
    """signSGD with majority vote (arXiv 1810.05291): each number becomes 1 or -1, as most say.

    For n numbers a device sends n/8 bytes (k-1)/k twice: its bits to those who count, each a part,
    and what they counted back to all; 1/32 of an all-reduce of float32. Nothing is kept of what is
    lost. Where as many say the one as the other, numbers at even places go up, the others down.
    """

    keeps_rest: ClassVar[bool] = False

    def exchange(self, pending: Arrays) -> tuple[Arrays, Arrays]:
        """As in Codec; nothing is left."""
        k = jax.lax.axis_size("data")
        flat = to_flat(pending)
        padded = jnp.pad(flat, (0, -flat.size % (_BITS * k)))
        bits_kM = _packed(padded >= 0).reshape(k, -1)
        bits_kM = jax.lax.all_to_all(bits_kM, "data", 0, 0)
        votes = jnp.where(_unpacked(bits_kM), 1, -1).sum(0)
        even = jnp.arange(votes.size) % 2 == 0
        won_kM = jax.lax.all_gather(_packed((votes > 0) | ((votes == 0) & even)), "data")
        signs = jnp.where(_unpacked(won_kM).reshape(-1)[: flat.size], 1.0, -1.0)
        return from_flat(signs, pending), []


def _packed(bits: jax.Array) -> jax.Array:
    """Eight booleans [8 M] a byte, uint8 [M]."""
    powers = jnp.uint8(1) << jnp.arange(_BITS, dtype=jnp.uint8)
    return (bits.reshape(-1, _BITS) * powers).sum(-1, dtype=jnp.uint8)


def _unpacked(codes: jax.Array) -> jax.Array:
    """The booleans [..., 8 M] of bytes [..., M]."""
    places = jnp.arange(_BITS, dtype=jnp.uint8)
    bits = (codes[..., None] >> places) & jnp.uint8(1)
    return (bits > 0).reshape(*codes.shape[:-1], -1)
