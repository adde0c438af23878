"""Logit softcap (Gemma 2, arXiv 2408.00118, section 2)."""

import jax
import jax.numpy as jnp


def apply_softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap tanh(x / cap), computed in float32 and of x's dtype; x itself where cap is None."""
    if cap is None:
        return x
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


def slope(capped: jax.Array, cap: float | None) -> jax.Array | float:
    """The derivative of `apply_softcap`, of its result: 1 - (capped / cap)^2; 0 of hidden keys."""
    if cap is None:
        return 1.0
    return 1 - jnp.square(jnp.clip(capped / cap, -1, 1))
