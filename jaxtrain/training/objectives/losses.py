"""Cross entropy in float32 over sharded vocabularies, label smoothing, z-loss."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError, nearest_divisor
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.devices import platform_of
from jaxtrain.parallel.sharding import shard

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
