"""Chunked cross entropy: logits one chunk at a time, gradients in the same pass.

Letters: B batch, T length, S chunks, C positions of a chunk, D embed, V vocab; devices: n along the
batch, k along the sequence, t along the vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.axis_rules import MeshAxes
from jaxtrain.parallel.sharding import current_layout, on_each_device, parts_of, reshape

Losses = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _scale(dtype: jnp.dtype) -> float:
    """Return the factor of gradients until the loss scale is known.

    Those of logits are probabilities, and float16 has full precision only above 6e-5.
    """
    return 256.0 if dtype == jnp.float16 else 1.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def over_chunks(
    losses: Losses,
    size: int,
    h_BTD: jax.Array,
    matrix_VD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    bias_V: jax.Array | None = None,
) -> jax.Array:
    """Return the sum of losses(logits, targets, mask) over chunks of positions, one live at a time.

    A chunk's gradients are computed together with its loss, from the same logits: three matmuls,
    and nothing is saved or recomputed. Each device keeps its own parts of the gradients, the
    matrix's summed in float32, and the devices' parts are added up once for all chunks.

    Args:
      losses: of the logits [B, C, V], targets and loss mask [B, C] of a chunk; float32 [B, C].
      size: positions of a chunk.
      h_BTD: final hidden states, gathered along embed.
      matrix_VD: the output matrix, gathered along embed.
      targets_BT: as in a batch.
      mask_BT: the loss mask.
      bias_V: the output bias; None: none.
    """

    def add(total_BC: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        h_BCD, targets_BC, mask_BC = chunk
        return total_BC + losses(_logits(h_BCD, matrix_VD, bias_V), targets_BC, mask_BC), None

    chunks = tuple(_chunk(x, size) for x in (h_BTD, targets_BT, mask_BT))
    return lax.scan(add, _zeros(chunks[-1][0]), chunks)[0].sum()


def _forward(
    losses: Losses,
    size: int,
    h_BTD: jax.Array,
    matrix_VD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    bias_V: jax.Array | None,
) -> tuple[jax.Array, tuple]:

    def add(sums: tuple, chunk: tuple[jax.Array, ...]) -> tuple[tuple, tuple]:
        h_BCD, targets_BC, mask_BC = chunk
        logits_BCV = _logits(h_BCD, matrix_VD, bias_V)
        loss_BC, back = jax.vjp(lambda x, mask: losses(x, targets_BC, mask), logits_BCV, mask_BC)
        g_BCV, of_mask = back(jnp.full_like(loss_BC, _scale(matrix_VD.dtype)))
        sums = jax.tree.map(jnp.add, sums, (loss_BC, of_weights(g_BCV, h_BCD)))
        return sums, (_of_h(g_BCV, matrix_VD), of_mask)

    def of_weights(g_BCV: jax.Array, h_BCD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return _of_matrix(g_BCV, h_BCD), None if bias_V is None else _of_bias(g_BCV)

    chunks = tuple(_chunk(x, size) for x in (h_BTD, targets_BT, mask_BT))
    like = jax.eval_shape(lambda h: of_weights(_logits(h[0], matrix_VD, bias_V), h[0]), chunks[0])
    # Losses of a device's own tokens too, summed at the end: a sum per chunk would be an exchange.
    zeros = _zeros(chunks[-1][0]), jax.tree.map(_zeros, like)
    (total_BC, of_both), (of_h, of_mask) = lax.scan(add, zeros, chunks)
    return total_BC.sum(), (of_h, of_both, of_mask, jnp.zeros((), matrix_VD.dtype))


def _backward(losses: Losses, size: int, kept: tuple, gradient: jax.Array) -> tuple:
    del losses, size
    of_h, (of_matrix, of_bias), of_mask, like = kept
    gradient /= _scale(like.dtype)

    def merge_chunks(x: jax.Array, axis: int) -> jax.Array:
        """Merge chunks, the first dimension, back into the positions at `axis`."""
        x = jnp.moveaxis(x, 0, axis)
        shape, parts = x.shape, jax.typeof(x).sharding.spec
        merged = shape[axis - 1] * shape[axis]
        return reshape(
            x,
            (*shape[: axis - 1], merged, *shape[axis + 1 :]),
            (*parts[:axis], *parts[axis + 1 :]),
        )

    # Rounded before devices exchange them, like the gradients of all weights.
    of_h = _sum_first((merge_chunks(of_h, 3) * gradient).astype(like.dtype), 1)
    of_matrix = _sum_first((of_matrix * gradient).astype(like.dtype), 2)
    if of_bias is not None:
        of_bias = _sum_first((of_bias * gradient).astype(like.dtype), 2)
    return (
        of_h,
        of_matrix,
        None,
        (merge_chunks(of_mask, 2) * gradient).astype(of_mask.dtype),
        of_bias,
    )


over_chunks.defvjp(_forward, _backward)


def _chunk(x: jax.Array, size: int) -> jax.Array:
    """[S, B, C, ...]: in each chunk every S-th position.

    Consecutive positions would move between the devices of a sequence.
    """
    B, T = x.shape[:2]
    return jnp.moveaxis(x.reshape(B, size, T // size, *x.shape[2:]), 2, 0)


def _sum_first(x: jax.Array, count: int) -> jax.Array:
    """Return the sum over the leading dimensions, which have one index per device."""
    spec = jax.typeof(x).sharding.spec
    axes = tuple(name for part in spec[:count] for name in parts_of(part))
    if not axes:
        return x.reshape(x.shape[count:])

    # Not left to the partitioner: in bfloat16 XLA's CPU compiler fails.
    def add(x: jax.Array) -> jax.Array:
        return lax.psum(x.reshape(x.shape[count:]), axes)

    return on_each_device(add, (spec,), P(*spec[count:]))(x)


def _logits(h_BCD: jax.Array, matrix_VD: jax.Array, bias_V: jax.Array | None) -> jax.Array:
    logits_BCV = jnp.einsum("BCD,VD->BCV", h_BCD, matrix_VD)
    return logits_BCV if bias_V is None else logits_BCV + bias_V


def _zeros(like: Any) -> jax.Array:
    """Return float32 zeros of an array's shape and sharding."""
    spec = jax.typeof(like).sharding.spec
    return jnp.zeros(like.shape, jnp.float32, out_sharding=_spec_of(spec))


def _spec_of(parts: Sequence[MeshAxes]) -> P | None:
    """Return the PartitionSpec of these parts; None without a mesh."""
    return None if jax.sharding.get_abstract_mesh().empty else P(*parts)


def _of_h(g_BCV: jax.Array, matrix_VD: jax.Array) -> jax.Array:
    """Return the gradient of the hidden states, each device's own part [t, B, C, D]: no exchange.

    Args:
      g_BCV: the gradient of a chunk's logits.
      matrix_VD: the output matrix.
    """
    (batch, length, vocab), (_, _, t) = _devices(g_BCV)
    (B, C, V), D = g_BCV.shape, matrix_VD.shape[1]
    g = reshape(g_BCV, (B, C, t, V // t), (batch, length, vocab, None))
    matrix = reshape(matrix_VD, (t, V // t, D), (vocab, None, None))
    return jnp.einsum("bctv,tvd->tbcd", g, matrix)


def _of_matrix(g_BCV: jax.Array, h_BCD: jax.Array) -> jax.Array:
    """Return the gradient of the output matrix, each device's own part float32 [n, k, V, D]: no
    exchange.

    Args:
      g_BCV: the gradient of a chunk's logits.
      h_BCD: the chunk's hidden states.
    """
    g, h = _rows(g_BCV, g_BCV), _rows(h_BCD, g_BCV)
    return jnp.einsum("nkrv,nkrd->nkvd", g, h, preferred_element_type=jnp.float32)


def _of_bias(g_BCV: jax.Array) -> jax.Array:
    """Return the gradient of the bias, each device's own part float32 [n, k, V]: no exchange."""
    return _rows(g_BCV, g_BCV).sum(2, dtype=jnp.float32)


def _rows(x: jax.Array, g_BCV: jax.Array) -> jax.Array:
    """Reshape x [B, C, ...] to [n, k, rows of a device, last dimension]; devices keep their own
    rows.

    Args:
      x: split as the gradient of the logits is along batch and sequence.
      g_BCV: that gradient.
    """
    (batch, length, _), (n, k, _) = _devices(g_BCV)
    (B, C, width), last = x.shape, jax.typeof(x).sharding.spec[2]
    x = reshape(x, (n, B // n, k, C // k, width), (batch, None, length, None, last))
    x = x.transpose(0, 2, 1, 3, 4)
    return reshape(x, (n, k, B // n * (C // k), width), (batch, length, None, last))


def _devices(x: jax.Array) -> tuple[list[MeshAxes], list[int]]:
    """Return the mesh axes that split each dimension, and the number of devices along them."""
    parts, layout = list(jax.typeof(x).sharding.spec), current_layout()
    return parts, [1 if layout is None else layout.size(part) for part in parts]
