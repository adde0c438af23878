"""signSGD with majority vote, two bits per sign.

Letters: k replicas, M bytes of a part.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.training.exchange.compression import Arrays, from_flat, to_flat

# Codes of two bits: 0, 1 and -1, and one that makes NaN of the result, so that a gradient which
# overflowed is seen by the guard and by a dynamic loss scale.
_IN_A_BYTE, _NOT_FINITE = 4, 3


@dataclasses.dataclass(frozen=True)
class Signs:
    """signSGD with majority vote (arXiv 1810.05291): sign(sum over replicas of sign(gradient)).

    As in `torch.sign`, 0 has the sign 0: what no replica reads does not move, as rows of an
    embedding, experts and positions without a token. Where as many replicas vote up as down the
    result is 0 too. For n elements a device sends n/4 bytes (k-1)/k twice: its votes to the owners
    of their parts, and each owner's result to all; 1/16 of an all-reduce of float32. Nothing is
    kept of what is lost.
    """

    keeps_rest: ClassVar[bool] = False

    def exchange(self, pending: Arrays) -> tuple[Arrays, Arrays]:
        """As in Codec; nothing is left."""
        k = jax.lax.axis_size("data")
        flat = to_flat(pending)
        padded = jnp.pad(flat, (0, -flat.size % (_IN_A_BYTE * k)))
        votes_kM = jax.lax.all_to_all(_pack(padded).reshape(k, -1), "data", 0, 0)
        won_kM = jax.lax.all_gather(_pack(_unpack(votes_kM).sum(0)), "data")
        return from_flat(_unpack(won_kM).reshape(-1)[: flat.size], pending), []


def _pack(x: jax.Array) -> jax.Array:
    """The signs of [4 M] numbers, four a byte, uint8 [M]."""
    codes = (x > 0).astype(jnp.uint8) + 2 * (x < 0).astype(jnp.uint8)
    codes = jnp.where(jnp.isfinite(x), codes, _NOT_FINITE)
    return (codes.reshape(-1, _IN_A_BYTE) << _places()).sum(-1, dtype=jnp.uint8)


def _unpack(codes: jax.Array) -> jax.Array:
    """The signs float32 [..., 4 M] of bytes [..., M]."""
    each = (codes[..., None] >> _places()) & jnp.uint8(3)
    signs = (each & 1).astype(jnp.float32) - (each >> 1).astype(jnp.float32)
    return jnp.where(each == _NOT_FINITE, jnp.nan, signs).reshape(*codes.shape[:-1], -1)


def _places() -> jax.Array:
    return 2 * jnp.arange(_IN_A_BYTE, dtype=jnp.uint8)
