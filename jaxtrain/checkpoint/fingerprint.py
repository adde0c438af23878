"""One number for each array: the same in every layout, another when an element changes."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A number below 2**32 for each array: the same on every mesh, another if any element changes.

    Args:
      arrays: of any shapes; each element of at most 4 bytes.
    """
    return numbers(dispatch(arrays))


def dispatch(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Begins to count; `numbers` waits for the result."""
    # One program for all arrays: a program each, all in flight, starves simulated devices' threads
    # until their reductions wait for one another for ever.
    return _fingerprint_all(dict(arrays))


def numbers(counted: Mapping[str, jax.Array]) -> dict[str, int]:
    """The fingerprints that `dispatch` has begun."""
    return {name: int(x) for name, x in jax.device_get(dict(counted)).items()}


@jax.jit
def _fingerprint_all(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _fingerprint(x) for name, x in arrays.items()}


def _fingerprint(x: jax.Array) -> jax.Array:
    """The elements' bits times an odd number drawn from each one's place, summed modulo 2**32.

    Sums of integers do not depend on their order, so the layout does not matter; an odd factor has
    an inverse modulo 2**32, so no change of a single element goes unseen.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        index = jnp.arange(size, dtype=jnp.uint32)
        place = place * jnp.uint32(size) + jnp.expand_dims(index, range(1, bits.ndim - axis))
    # 2654435769 = 2**32 / golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
    return jnp.sum(bits * (place * jnp.uint32(2654435769) | jnp.uint32(1)), dtype=jnp.uint32)
