"""Selective scan of state space models, and causal convolution.

Letters: B batch, T length, F inner width, S states of a channel, K kernel size of the convolution,
C positions of a chunk.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.nn.attention.mask import Mask
from jaxtrain.parallel.sharding import shard

# Positions whose states are live at once: the backward pass recomputes those of each chunk.
CHUNK = 64

LEAST_STEP, MOST_STEP = 1e-3, 1e-1  # of a new layer's channels

STATE = ("inner_batch", "mlp", "state")


def _documents(mask: Mask, before: int) -> jax.Array | None:
    """Return the document of every position [B, before + T]; cached positions belong to the first
    token's own."""
    ids_BT = mask.segment_ids_BT
    return None if ids_BT is None else jnp.concatenate([ids_BT[:, :1]] * before + [ids_BT], axis=1)


def goes_on(mask: Mask) -> jax.Array | None:
    """Whether each position [B, T, 1] is in the document of the previous one; None: all of them
    are."""
    ids_BP = _documents(mask, 1)
    return None if ids_BP is None else (ids_BP[:, 1:] == ids_BP[:, :-1])[..., None]


def causal_convolution(
    x_BTF: jax.Array, kernel_KF: jax.Array, mask: Mask, before_BKF: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Causal convolution of each channel over K positions, and the state for the next ones.

    Args:
      x_BTF: the channels.
      kernel_KF: their weights, the last of its own position.
      mask: documents, which sums do not cross.
      before_BKF: the K - 1 positions before the first; None: zeros.

    Returns:
      The sums, and the last K - 1 positions of x and what was before it, zeros where these are not
      of the last position's document.
    """
    K, T = kernel_KF.shape[0], x_BTF.shape[1]
    if before_BKF is None:
        # Derived from x, so that it has x's sharding.
        before_BKF = jnp.concatenate([jnp.zeros_like(x_BTF[:, :1])] * (K - 1), axis=1)
    x_BPF = jnp.concatenate([before_BKF.astype(x_BTF.dtype), x_BTF], axis=1)
    ids_BP = _documents(mask, K - 1)

    def own(first: int, last: int, whose: slice) -> jax.Array:
        """x at these positions, zeros where they are of another document than the reference."""
        if ids_BP is None:
            return x_BPF[:, first:last]
        same = ids_BP[:, first:last] == ids_BP[:, whose]
        return jnp.where(same[..., None], x_BPF[:, first:last], 0)

    y_BTF = x_BTF * kernel_KF[-1]
    for shift in range(K - 1):
        y_BTF += own(shift, shift + T, slice(K - 1, None)) * kernel_KF[shift]
    return y_BTF, own(T, T + K - 1, slice(-1, None))


def selective_scan(
    x_BTF: jax.Array,
    step_BTF: jax.Array,
    decay_FS: jax.Array,
    into_BTS: jax.Array,
    out_BTS: jax.Array,
    goes_on_BT1: jax.Array | None,
    state_BFS: jax.Array | None,
    *,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """y = out . h with h = exp(step decay) h + step into x at every position, and the last h.

    Source: Gu and Dao 2023 (arXiv 2312.00752), algorithm 2, in chunks: within one an associative
    scan, from one to the next its last state. With a chunk of all positions it is that scan alone.

    Args:
      x_BTF: the input; everything is float32.
      step_BTF: the step of every channel, Delta.
      decay_FS: the rates of its states, A, below 0.
      into_BTS, out_BTS: input and output projections of the states: B and C.
      goes_on_BT1: False where a document begins and the states are reset; None: nowhere.
      state_BFS: before the first position; None: zeros.
      chunk: positions that are scanned at once.
    """
    B, T, F = x_BTF.shape
    if state_BFS is None:
        state_BFS = shard(jnp.zeros((B, F, decay_FS.shape[-1]), jnp.float32), STATE)
    if goes_on_BT1 is None:
        goes_on_BT1 = jnp.ones_like(into_BTS[..., :1], bool)
    C = min(chunk, T)
    count = math.ceil(T / C)

    def split_chunks(x: jax.Array) -> jax.Array:
        """[chunks, B, C, ...]; positions after the last have a step of 0, which changes no
        state."""
        rest = [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, ((0, 0), (0, count * C - T), *rest))
        return jnp.moveaxis(x.reshape(B, count, C, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def run(state_BFS: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_BCF, step_BCF, into_BCS, out_BCS, goes_on_BC1 = tokens
        kept_BCFS = jnp.exp(step_BCF[..., None] * decay_FS)
        kept_BCFS = jnp.where(goes_on_BC1[..., None], kept_BCFS, 0)
        added_BCFS = (step_BCF * x_BCF)[..., None] * into_BCS[:, :, None]
        kept_BCFS, states_BCFS = jax.lax.associative_scan(_then, (kept_BCFS, added_BCFS), axis=1)
        states_BCFS += kept_BCFS * state_BFS[:, None]
        return states_BCFS[:, -1], (states_BCFS * out_BCS[:, :, None]).sum(-1)

    inputs = tuple(map(split_chunks, (x_BTF, step_BTF, into_BTS, out_BTS)))
    goes_on = jnp.pad(goes_on_BT1, ((0, 0), (0, count * C - T), (0, 0)), constant_values=True)
    goes_on = jnp.moveaxis(goes_on.reshape(B, count, C, 1), 1, 0)
    state_BFS, y = jax.lax.scan(run, state_BFS, (*inputs, goes_on))
    return jnp.moveaxis(y, 0, 1).reshape(B, count * C, F)[:, :T], state_BFS


def _then(first: Any, second: Any) -> Any:
    """Compose two ranges of positions: decay of the state before them, and their contribution."""
    (kept, added), (kept_after, added_after) = first, second
    return kept * kept_after, added * kept_after + added_after


def steps(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Biases that softplus maps to log-uniform steps."""
    low, high = math.log(LEAST_STEP), math.log(MOST_STEP)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    return step + jnp.log(-jnp.expm1(-step))
