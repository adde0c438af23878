"""The loss of a sequence whose logits are made a chunk at a time, its gradients beside it.

Letters: B batch, T length, C chunk, D embed, V vocab, n devices along the batch, k along the
sequence.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.sharding import current_layout, reshape

Losses = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_TOKENS = ("batch", "length")


def _scale(dtype: jnp.dtype) -> float:
    """What gradients are multiplied by until the loss's own, with its scale, is known.

    Those of logits are probabilities, and float16 has its full precision from 6e-5 on only.
    """
    return 256.0 if dtype == jnp.float16 else 1.0


def over_chunks(
    losses: Losses,
    size: int,
    h_BTD: jax.Array,
    matrix_VD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
) -> jax.Array:
    """The sum of losses(logits, targets, mask) of chunks of places, one chunk's alive at a time.

    A chunk's gradients are computed beside its loss, with its logits at hand: three products, and
    nothing is kept or computed again. Each device sums its own part of the matrix's gradient, in
    float32, and the parts are added up once for all chunks.

    Args:
      losses: of the logits [B, C, V], targets and loss mask [B, C] of a chunk; float32 [B, C].
      size: places of a chunk.
      h_BTD: finished hidden states, whole along embed.
      matrix_VD: the output matrix, whole along embed.
      targets_BT: as in a batch.
      mask_BT: the loss mask.
    """

    def chunked(x: jax.Array) -> jax.Array:
        # Every (T / size)-th place: runs of places would move between the devices of a sequence.
        B, T = x.shape[:2]
        return jnp.moveaxis(x.reshape(B, size, T // size, *x.shape[2:]), 2, 0)

    return _total(losses, chunked(h_BTD), matrix_VD, chunked(targets_BT), chunked(mask_BT))


def _logits(h_BCD: jax.Array, matrix_VD: jax.Array) -> jax.Array:
    return jnp.einsum("BCD,VD->BCV", h_BCD, matrix_VD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(losses: Losses, h: jax.Array, matrix_VD: jax.Array, *others: jax.Array) -> jax.Array:
    """The sum over chunks, which all arrays but the matrix have as their first dimension."""

    def add(total_BC: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        h_BCD, *others = chunk
        return total_BC + losses(_logits(h_BCD, matrix_VD), *others), None

    return lax.scan(add, _zeros(h[0, ..., 0]), (h, *others))[0].sum()


def _zeros(like: Any) -> jax.Array:
    sharding = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(like).sharding
    return jnp.zeros(like.shape, jnp.float32, out_sharding=sharding)


def _forward(
    losses: Losses, h: jax.Array, matrix_VD: jax.Array, *others: jax.Array
) -> tuple[jax.Array, tuple]:
    def add(sums: tuple, chunk: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        h_BCD, *others = chunk
        logits_BCV, of_h = jax.vjp(lambda h_BCD: _logits(h_BCD, matrix_VD), h_BCD)
        loss_BC, of_logits = jax.vjp(lambda logits_BCV: losses(logits_BCV, *others), logits_BCV)
        (g_BCV,) = of_logits(jnp.full_like(loss_BC, _scale(matrix_VD.dtype)))
        of_matrix = _of_matrix(g_BCV, h_BCD)
        return jax.tree.map(jnp.add, sums, (loss_BC, of_matrix)), of_h(g_BCV)[0]

    like = jax.eval_shape(lambda h: _of_matrix(_logits(h[0], matrix_VD), h[0]), h)
    # Losses of a device's own tokens too, summed at the end: a sum a chunk would be an exchange.
    zeros = _zeros(h[0, ..., 0]), _zeros(like)
    (total_BC, of_matrix), of_h = lax.scan(add, zeros, (h, *others))
    return total_BC.sum(), (of_h, of_matrix, jnp.zeros((), matrix_VD.dtype), [None] * len(others))


def _backward(losses: Losses, kept: tuple, gradient: jax.Array) -> tuple:
    del losses
    of_h, of_matrix, like, others = kept
    gradient /= _scale(like.dtype)
    # Rounded before devices exchange it, as the gradients of all weights are.
    of_matrix = (of_matrix * gradient).astype(like.dtype)
    of_matrix = lax.reduce(of_matrix, jnp.zeros((), like.dtype), lax.add, (0, 1))
    # Targets and the loss mask have no gradient.
    return (of_h * gradient).astype(of_h.dtype), of_matrix, *others


_total.defvjp(_forward, _backward)


def _of_matrix(g_BCV: jax.Array, h_BCD: jax.Array) -> jax.Array:
    """Each device's own part of the matrix's gradient, float32 [n, k, V, D]: no exchange.

    Args:
      g_BCV: the gradient of a chunk's logits.
      h_BCD: the chunk's hidden states.
    """
    layout = current_layout()
    batch, length = (None, None) if layout is None else layout.activation(_TOKENS)
    n, k = (1, 1) if layout is None else (layout.size(batch), layout.size(length))

    def by_device(x: jax.Array) -> jax.Array:
        """[n, k, rows of a device, the last dimension]; every device keeps what it has."""
        B, C, width = x.shape
        part = jax.typeof(x).sharding.spec[2]
        x = reshape(x, (n, B // n, k, C // k, width), (batch, None, length, None, part))
        x = x.transpose(0, 2, 1, 3, 4)
        return reshape(x, (n, k, B // n * (C // k), width), (batch, length, None, part))

    return jnp.einsum(
        "nkrv,nkrd->nkvd", by_device(g_BCV), by_device(h_BCD), preferred_element_type=jnp.float32
    )
