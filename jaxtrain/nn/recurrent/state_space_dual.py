"""State space duality (SSD, Mamba 2): attention within chunks, a scan between them.

Source: Dao and Gu 2024 (arXiv 2405.21060), listing 1. Letters: B batch, T length, N heads,
P channels of a head, S states of a channel, C positions of a chunk.
"""

import math

import jax
import jax.numpy as jnp

from jaxtrain.parallel.sharding import shard

CHUNK = 64  # positions whose mutual scores are live at once

STATE = ("inner_batch", "mlp", "head_dim", "state")


def state_space_dual(
    x_BTNP: jax.Array,
    step_BTN: jax.Array,
    rate_N: jax.Array,
    into_BTS: jax.Array,
    out_BTS: jax.Array,
    goes_on_BT1: jax.Array | None,
    state_BNPS: jax.Array | None,
    *,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """y = h out with h = exp(step rate) h + step x into at every position, and the last h.

    Args:
      x_BTNP: the input; everything is float32.
      step_BTN: the step of every head.
      rate_N: of its states, A, below 0.
      into_BTS, out_BTS: input and output projections of the states: B and C.
      goes_on_BT1: False where a document begins and the states are reset; None: nowhere.
      state_BNPS: before the first position; None: zeros.
      chunk: positions per chunk.
    """
    B, T, N, P = x_BTNP.shape
    if state_BNPS is None:
        state_BNPS = shard(jnp.zeros((B, N, P, into_BTS.shape[-1]), jnp.float32), STATE)
    if goes_on_BT1 is None:
        goes_on_BT1 = jnp.ones_like(into_BTS[..., :1], bool)
    C = min(chunk, T)
    count = math.ceil(T / C)

    def split_chunks(x: jax.Array, *, last: float = 0.0) -> jax.Array:
        """[chunks, B, C, ...]; positions after the last have a step of 0, which changes no
        state."""
        rest = [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, ((0, 0), (0, count * C - T), *rest), constant_values=last)
        return jnp.moveaxis(x.reshape(B, count, C, *x.shape[2:]), 1, 0)

    before_CC = jnp.tril(jnp.ones((C, C), bool))

    @jax.checkpoint
    def run(state_BNPS: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_BCNP, step_BCN, into_BCS, out_BCS, goes_on_BC1 = tokens
        # Cumulative log decay since the chunk's start, and the documents that start in
        # it.
        left_BCN = jnp.cumsum(step_BCN * rate_N, axis=1)
        begun_BC = jnp.cumsum(~goes_on_BC1[..., 0], axis=1, dtype=jnp.int32)
        given_BCNP = step_BCN[..., None] * x_BCNP
        same_BCC = (begun_BC[:, :, None] == begun_BC[:, None, :]) & before_CC
        left_BNC = jnp.swapaxes(left_BCN, 1, 2)
        between_BNCC = left_BNC[..., :, None] - left_BNC[..., None, :]
        # Masked positions have positive exponents: exp may be infinite, and its gradient NaN.
        kept_BNCC = jnp.exp(jnp.where(same_BCC[:, None], between_BNCC, -jnp.inf))
        scores_BCC = jnp.einsum("bts,bus->btu", out_BCS, into_BCS)
        y_BCNP = jnp.einsum("bntu,bunp->btnp", scores_BCC[:, None] * kept_BNCC, given_BCNP)
        # Decay of the states before the chunk, and of each position to the chunk's end.
        since_BCN = jnp.where((begun_BC == 0)[..., None], jnp.exp(left_BCN), 0)
        y_BCNP += jnp.einsum("bts,bnps->btnp", out_BCS, state_BNPS) * since_BCN[..., None]
        last_BC = begun_BC == begun_BC[:, -1:]
        to_end_BCN = jnp.where(last_BC[..., None], left_BCN[:, -1:] - left_BCN, -jnp.inf)
        given_BCNP *= jnp.exp(to_end_BCN)[..., None]
        state_BNPS *= since_BCN[:, -1, :, None, None]
        state_BNPS += jnp.einsum("btnp,bts->bnps", given_BCNP, into_BCS)
        return state_BNPS, y_BCNP

    inputs = tuple(map(split_chunks, (x_BTNP, step_BTN, into_BTS, out_BTS)))
    goes_on = split_chunks(goes_on_BT1, last=True)
    state_BNPS, y = jax.lax.scan(run, state_BNPS, (*inputs, goes_on))
    return jnp.moveaxis(y, 0, 1).reshape(B, count * C, N, P)[:, :T], state_BNPS
