"""Losses and their metrics: float32, masked, over vocabularies sharded or not.

Every objective returns SUMS over the examples of its batch, not means: microbatches and processes
add theirs, and one division by the global count follows, so that a token weighs the same wherever
it lands. Letters: B batch, T length, D embed, V vocab, C chunk.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.attention import Mask
from jaxtrain.config import configurable
from jaxtrain.context import along_context
from jaxtrain.data.batch import Batch
from jaxtrain.errors import UserError
from jaxtrain.layers import Execution
from jaxtrain.sharding import current_layout, shard
from jaxtrain.transformer import Transformer, hidden

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
    # logsumexp - sum(where(iota == target)): a gather along a sharded vocabulary would make XLA
    # collect the logits, this form reduces locally and then over the tensor axis.
    classes = shard(jnp.arange(logits.shape[-1]), axes[-1:])
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    log_partition = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    is_target = targets[..., None] == classes
    # Made from the targets: JAX moves a constant out of the loop over chunks, where it becomes an
    # array of the logits' size that every chunk reads.
    zero = 0.0 * targets[..., None].astype(jnp.float32)
    target_logit = jnp.where(is_target, logits, zero).sum(-1)
    if label_smoothing:
        target_logit = (1 - label_smoothing) * target_logit + label_smoothing * logits.mean(-1)
    losses = log_partition - target_logit
    if z_weight:
        losses += z_weight * jnp.square(log_partition)
    return losses


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

    def losses(h_BTD: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        with jax.named_scope("loss"):
            losses_BT = cross_entropy(
                model.logits(h_BTD),
                targets_BT,
                z_weight=settings.z_weight if train else 0.0,
                label_smoothing=settings.label_smoothing if train else 0.0,
            )
            return (losses_BT * mask_BT).sum()

    if settings.chunk_size is None:
        total = losses(h_BTD, batch.targets, batch.loss_mask)
    else:
        total = over_chunks(losses, settings.chunk_size, h_BTD, batch.targets, batch.loss_mask)
    return {"loss": total, "weight": batch.loss_mask.sum()}


def over_chunks(
    losses: Callable[..., jax.Array],
    size: int,
    h_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
) -> jax.Array:
    """The sum of losses(chunk of each array), chunks of places, one alive at a time.

    On one device a chunk's gradients are computed beside its loss, with the logits at hand. Over a
    mesh its logits are computed again in the backward pass: partial sums of the weight's gradient
    are then left to the partitioner.

    Args:
      losses: of a chunk of each array, a float32 scalar.
      size: places of a chunk.
      h_BTD: finished hidden states; only they and what `losses` closes over have gradients.
      targets_BT: as in a batch.
      mask_BT: the loss mask.
    """

    def chunked(x: jax.Array) -> jax.Array:
        # Every (T / size)-th place: runs of places would move between the devices of a sequence.
        B, T = x.shape[:2]
        return jnp.moveaxis(x.reshape(B, size, T // size, *x.shape[2:]), 2, 0)

    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        # Recomputed in the backward pass, or the scan would keep every chunk's logits.
        return total + jax.checkpoint(losses, prevent_cse=False)(*chunk), None

    chunks, layout = tuple(map(chunked, (h_BTD, targets_BT, mask_BT))), current_layout()
    if layout is None or layout.mesh.size == 1:
        of_chunk, weights = jax.closure_convert(losses, *(x[0] for x in chunks))
        return _with_gradients(of_chunk, chunks, weights)
    return jax.lax.scan(add, jnp.zeros(()), chunks)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradients(losses: Callable[..., jax.Array], chunks: tuple, weights: list) -> jax.Array:
    """The sum of losses(*chunk, *weights); with its gradients where they are asked for."""

    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return total + losses(*chunk, *weights), None

    return jax.lax.scan(add, jnp.zeros(()), chunks)[0]


def _with_gradients_forward(
    losses: Callable[..., jax.Array], chunks: tuple, weights: list
) -> tuple[jax.Array, tuple]:
    def add(sums: tuple, chunk: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        h, *others = chunk
        loss, back = jax.vjp(lambda h, weights: losses(h, *others, *weights), h, weights)
        of_h, of_weights = back(jnp.ones(()))
        return jax.tree.map(jnp.add, sums, (loss, of_weights)), of_h

    # In float32 whatever the weights are in: the sum over chunks is no place to round.
    zeros = jnp.zeros(()), [jnp.zeros_like(weight, jnp.float32) for weight in weights]
    (total, of_weights), of_h = jax.lax.scan(add, zeros, chunks)
    return total, (of_h, of_weights, [jnp.zeros((), weight.dtype) for weight in weights])


def _with_gradients_backward(
    losses: Callable[..., jax.Array], kept: tuple, gradient: jax.Array
) -> tuple[tuple, list]:
    del losses
    of_h, of_weights, likes = kept
    scaled = [(x * gradient).astype(like.dtype) for x, like in zip(of_weights, likes, strict=True)]
    # Targets and the loss mask have no gradient.
    return ((of_h * gradient).astype(of_h.dtype), None, None), scaled


_with_gradients.defvjp(_with_gradients_forward, _with_gradients_backward)


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
