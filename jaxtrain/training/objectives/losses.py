"""Cross entropy in float32 over sharded vocabularies, label smoothing, z-loss."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.config.errors import UserError, nearest_divisor
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.axis_rules import MeshAxes
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import current_layout, on_each_device, parts_of, reshape, shard

CONFUSION = "confusion"  # the sum that is a confusion matrix
Sums = dict[str, jax.Array]
Over = Literal["vocab", "classes"]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Cross-entropy loss settings: label smoothing, z-loss, chunk size.

    Attributes:
      chunk_size: positions of the sequence whose logits are live at once; None: all.
        If it does not divide the sequence, the next smaller divisor is used.
      z_weight: weight of the squared log-partition function (PaLM's z-loss, arXiv 2204.02311).
      label_smoothing: probability distributed uniformly over all classes (arXiv 1512.00567).
    """

    chunk_size: int | None = None
    z_weight: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UserError(f"Loss.chunk_size={self.chunk_size}; use None or at least 1")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"Loss.label_smoothing={self.label_smoothing}; use 0 to below 1")


def settle(settings: Loss, *, length: int, context: int = 1) -> tuple[Loss, list[str]]:
    """Return the settings with a chunk size that divides the sequence, and a note if it was
    changed.

    It bounds memory and does not change results, so the next smaller divisor is a safe choice. If
    there is none the settings stay unchanged.

    Args:
      settings: as configured.
      length: tokens of a sequence.
      context: devices that share a sequence, each with its part of every chunk.
    """
    chunk = settings.chunk_size
    if chunk is None or (length % chunk == 0 and chunk % context == 0):
        return settings, []
    fitting = range(context, min(chunk, length) + 1, context)
    fits = max((size for size in fitting if length % size == 0), default=None)
    if fits is None:
        return settings, []
    over = f" over Mesh.context={context}" if context > 1 else ""
    note = (
        f"Loss.chunk_size={chunk} does not divide a sequence of {length}{over}; using {fits}, "
        "the next smaller value that does (it limits memory and does not change results)"
    )
    return dataclasses.replace(settings, chunk_size=fits), [note]


def losses(
    logits: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    settings: Loss,
    *,
    train: bool,
    classes: int | None = None,
    over: Over | None = None,
) -> jax.Array:
    """Return the cross entropies of the targets that count times their mask, float32 of the
    targets' shape.

    The targets and logits at other positions affect neither results nor gradients.

    Args:
      logits: [..., V]; finite where the mask is 0 too.
      targets: int32 [...].
      mask: float32 [...], a loss mask.
      settings: further terms of the cross entropy.
      train: whether they are added: not in evaluation.
      classes: as in `cross_entropy`.
      over: as in `cross_entropy`.
    """
    counts = mask != 0
    of_targets = cross_entropy(
        logits,
        jnp.where(counts, targets, 0),
        classes=classes,
        z_weight=settings.z_weight if train else 0.0,
        label_smoothing=settings.label_smoothing if train else 0.0,
        over=over,
    )
    # Select, not only multiply: 0 x NaN is NaN.
    return jnp.where(counts, of_targets, 0.0) * mask


def validate_unread(settings: Loss, objective: str) -> Iterator[str]:
    """Yield an error message for each setting not at its default, for an objective that
    reads none.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != field.default:
            yield (
                f"Loss.{field.name}={value!r} has no effect for {objective}; leave it at "
                f"{field.default!r}"
            )


def validate(settings: Loss, *, length: int, context: int) -> Iterator[str]:
    """Yield an error message where no chunk size near the configured one fits; arguments as in
    `settle`.
    """
    chunk = settings.chunk_size
    if chunk is None:
        return
    if length % chunk:
        yield (
            f"Loss.chunk_size={chunk} does not divide TextData.sequence_length={length}; "
            f"the nearest is {nearest_divisor(length, chunk)}"
        )
    elif chunk % context:
        fitting = [d for d in range(context, length + 1, context) if length % d == 0]
        nearest = min(fitting, key=lambda d: abs(d - chunk)) if fitting else None
        yield (
            f"Loss.chunk_size={chunk} does not divide over Mesh.context={context}; the nearest is "
            f"{nearest}"
        )


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    classes: int | None = None,
    z_weight: float = 0.0,
    label_smoothing: float = 0.0,
    over: Over | None = None,
) -> jax.Array:
    """Return -log softmax(logits)[target], float32 of the targets' shape.

    Args:
      logits: [..., V], any float dtype; V may be sharded.
      targets: int32 [...].
      classes: number of classes: the other logits are padding, with no probability and
        no gradient. None: all.
      z_weight: as in Loss.
      label_smoothing: as in Loss.
      over: logical axis of the last dimension; None: 'vocab' for sequences, else 'classes'.
    """
    over = over or ("vocab" if logits.ndim == 3 else "classes")
    token_ids = shard(jnp.arange(logits.shape[-1]), (over,))
    size = logits.shape[-1] if classes is None else classes
    padded = size < logits.shape[-1]
    if padded:
        # Before the cast to float32: each device's maximum is sent in the logits' dtype.
        logits = jnp.where(token_ids < size, logits, -jnp.inf)
    logits = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    log_partition = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    target_logit = _at(targets, logits, token_ids)
    if label_smoothing:
        summed = jnp.where(token_ids < size, logits, 0.0) if padded else logits
        mean = summed.sum(-1) / size
        target_logit = (1 - label_smoothing) * target_logit + label_smoothing * mean
    losses = log_partition - target_logit
    if z_weight:
        losses += z_weight * jnp.square(log_partition)
    return losses


def _at(targets: jax.Array, logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Return logits[..., target], float32 of the targets' shape.

    Args:
      targets: int32 [...].
      logits: float32 [..., V].
      classes: 0 to V - 1, sharded like the logits.
    """
    platform = platform_of(jax.sharding.get_abstract_mesh())
    if platform == "tpu" or jax.typeof(classes).sharding.spec[0] is not None:
        # A gather along a sharded vocabulary would make XLA collect the logits; this is summed by
        # each device and then over the tensor axis.
        return _where_target(targets, logits, classes).sum(-1)
    return _pick(targets, logits, classes)


def _where_target(targets: jax.Array, x: jax.Array, classes: jax.Array) -> jax.Array:
    """Return x at the targets' positions, 0 elsewhere."""
    # Derived from the targets: JAX hoists a constant out of the loop over chunks, where it becomes
    # an array of the logits' size that every chunk reads.
    zero = 0.0 * targets[..., None].astype(jnp.float32)
    return jnp.where(targets[..., None] == classes, x, zero)


@jax.custom_vjp
def _pick(targets: jax.Array, logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Return the target logits, like `_at`; the gradient is fused with the rest, not a scatter into
    zeros.
    """
    del classes
    return jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def _pick_backward(kept: tuple, gradient: jax.Array) -> tuple:
    targets, classes = kept
    return None, _where_target(targets, gradient[..., None], classes), None


_pick.defvjp(lambda t, logits, c: (_pick(t, logits, c), (t, c)), _pick_backward)


def perplexity(loss: float) -> float:
    """Return exp(loss); infinite for a loss above 709, which overflows float64."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


# -- chunked cross entropy: logits one chunk at a time, gradients in the same pass -----------------
# Letters: B batch, T length, S chunks, C positions of a chunk, D embed, V vocab; devices: n along
# the batch, k along the sequence, t along the vocabulary.

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
