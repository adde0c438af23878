"""Losses and their metrics: float32, masked, over vocabularies sharded or not.

Every objective returns SUMS over the examples of its batch, not means: microbatches and processes
add theirs, and one division by the global count follows, so that a token weighs the same wherever
it lands. Letters: B batch, T length, D embed, V vocab, C classes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.attention import Mask
from jaxtrain.config import configurable
from jaxtrain.context import along_context
from jaxtrain.data.batch import Batch
from jaxtrain.errors import UserError
from jaxtrain.kernels import platform_of
from jaxtrain.layers import Execution, operands
from jaxtrain.loss_chunks import over_chunks
from jaxtrain.sharding import shard
from jaxtrain.transformer import LOGITS, Transformer, hidden, logits

Sums = dict[str, jax.Array]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Cross entropy and what is added to it.

    Attributes:
      chunk_size: positions of the sequence whose logits exist at one time; None makes all at once.
        It divides the sequence length.
      z_weight: weight of the squared log-partition function (PaLM's z-loss, arXiv 2204.02311).
      label_smoothing: probability spread evenly over all classes (arXiv 1512.00567).
    """

    chunk_size: int | None = None
    z_weight: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UserError(f"Loss.chunk_size={self.chunk_size}; use None or at least 1")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"Loss.label_smoothing={self.label_smoothing}; use 0 to below 1")


def cross_entropy(
    logits: jax.Array, targets: jax.Array, *, z_weight: float = 0.0, label_smoothing: float = 0.0
) -> jax.Array:
    """-log softmax(logits)[target], float32 of the targets' shape.

    Args:
      logits: [..., V], any float dtype; V may be sharded.
      targets: int32 [...].
      z_weight: as in Loss.
      label_smoothing: as in Loss.
    """
    axes = ("batch", "length", "vocab") if logits.ndim == 3 else ("batch", "classes")
    logits = logits.astype(jnp.float32)
    classes = shard(jnp.arange(logits.shape[-1]), axes[-1:])
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    log_partition = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    target_logit = _at(targets, logits, classes)
    if label_smoothing:
        target_logit = (1 - label_smoothing) * target_logit + label_smoothing * logits.mean(-1)
    losses = log_partition - target_logit
    if z_weight:
        losses += z_weight * jnp.square(log_partition)
    return losses


def _at(targets: jax.Array, logits: jax.Array, classes: jax.Array) -> jax.Array:
    """logits[..., target], float32 of the targets' shape.

    Args:
      targets: int32 [...].
      logits: float32 [..., V].
      classes: 0 to V - 1, split as the logits are.
    """
    platform = platform_of(jax.sharding.get_abstract_mesh())
    if platform == "tpu" or jax.typeof(classes).sharding.spec[0] is not None:
        # A gather along a sharded vocabulary would make XLA collect the logits; this is summed by
        # each device and then over the tensor axis.
        return _where_target(targets, logits, classes).sum(-1)
    return _picked(targets, logits, classes)


def _where_target(targets: jax.Array, x: jax.Array, classes: jax.Array) -> jax.Array:
    """x at the targets' places, 0 elsewhere."""
    # Made from the targets: JAX moves a constant out of the loop over chunks, where it becomes an
    # array of the logits' size that every chunk reads.
    zero = 0.0 * targets[..., None].astype(jnp.float32)
    return jnp.where(targets[..., None] == classes, x, zero)


@jax.custom_vjp
def _picked(targets: jax.Array, logits: jax.Array, classes: jax.Array) -> jax.Array:
    """As `_at`; its gradient is no scatter into zeros, but fused into the rest of the logits'."""
    del classes
    return jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def _picked_backward(kept: tuple, gradient: jax.Array) -> tuple:
    targets, classes = kept
    return None, _where_target(targets, gradient[..., None], classes), None


_picked.defvjp(lambda t, logits, c: (_picked(t, logits, c), (t, c)), _picked_backward)


def next_token(
    model: Any, statistics: Any, batch: Batch, execution: Execution, settings: Loss, *, train: bool
) -> tuple[Sums, Any]:
    """Sums of a language model's losses over a batch: `loss` and `weight` (targets that count),
    and the layers' auxiliary sums."""
    batch = spread(batch, execution.context_parallel)
    assert batch.positions is not None, "a batch of text has positions"
    h_BTD, _, auxiliary = hidden(
        model, batch.inputs, batch.positions, document_mask(batch), execution
    )
    return {**token_losses(model, h_BTD, batch, settings, train=train), **auxiliary}, statistics


def spread(batch: Batch, context_parallel: str) -> Batch:
    """A batch of text laid out over the mesh as activations are: rows, and places over context."""
    return jax.tree.map(lambda x_BT: along_context(x_BT, context_parallel), batch)


def document_mask(batch: Batch) -> Mask:
    """The causal mask that keeps a batch's documents apart."""
    return Mask(segment_ids_BT=batch.segment_ids, segment_ids_BS=batch.segment_ids)


def token_losses(
    model: Transformer, h_BTD: jax.Array, batch: Batch, settings: Loss, *, train: bool
) -> Sums:
    """The sums `loss` and `weight` of finished hidden states: output matrix and cross entropy."""

    def losses(logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        losses_BT = cross_entropy(
            logits_BTV,
            targets_BT,
            z_weight=settings.z_weight if train else 0.0,
            label_smoothing=settings.label_smoothing if train else 0.0,
        )
        return losses_BT * mask_BT

    with jax.named_scope("loss"):
        if settings.chunk_size is None:
            total = losses(logits(model, h_BTD), batch.targets, batch.loss_mask).sum()
        else:
            h_BTD, matrix_VD, _ = operands(LOGITS, h_BTD, model.output_matrix())
            total = over_chunks(
                losses, settings.chunk_size, h_BTD, matrix_VD, batch.targets, batch.loss_mask
            )
    return {"loss": total, "weight": batch.loss_mask.sum()}


def label(
    model: Any, statistics: Any, batch: Batch, execution: Execution, settings: Loss, *, train: bool
) -> tuple[Sums, Any]:
    """Sums of a classifier's losses: `loss`, `weight` (images that count) and `correct`."""
    del execution  # layers of a CNN differ in shape: there is no loop over them
    logits_BC, statistics = model(batch.inputs, statistics, train=train)
    losses_B = cross_entropy(
        logits_BC,
        batch.targets,
        z_weight=settings.z_weight if train else 0.0,
        label_smoothing=settings.label_smoothing if train else 0.0,
    )
    correct_B = (logits_BC.argmax(-1) == batch.targets) * batch.loss_mask
    sums = {
        "loss": (losses_B * batch.loss_mask).sum(),
        "weight": batch.loss_mask.sum(),
        "correct": correct_B.sum(),
    }
    return sums, statistics


OBJECTIVES: dict[str, Callable[..., tuple[Sums, Any]]] = {"next_token": next_token, "label": label}
