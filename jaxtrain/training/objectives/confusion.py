"""Classification metrics: top-5 accuracy, confusion matrix, F1.

All are sums over examples, counted where they lie: a mesh adds them exactly, and a padded last
batch adds nothing. Letters: C classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.training.objectives.losses import CONFUSION, Sums

MOST_COUNTED = 1024  # classes: a matrix of 4 MB; of more none is counted
MOST_TOLD = 100  # classes whose matrix stands among the metrics: some 30 kB a line
TOP = 5


def evaluation_sums(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> Sums:
    """`top5_accuracy`, where there are more classes than that, and `confusion`.

    Args:
      logits: [..., C].
      targets: int32 [...]; anything where the mask is 0.
      mask: float32 [...], a loss mask.
    """
    classes, found = logits.shape[-1], Sums()
    if classes > TOP:
        within = _before(logits, jnp.where(mask != 0, targets, 0)) < TOP
        found[f"top{TOP}_accuracy"] = (within * mask).sum()
    if classes <= MOST_COUNTED:
        found[CONFUSION] = confusion(logits.argmax(-1), targets, mask, classes)
    return found


def _before(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """How many classes come before the target, int32 [...]; of equals the first one does, as of
    argmax."""
    places = jnp.arange(logits.shape[-1])
    is_target = targets[..., None] == places
    own = jnp.where(is_target, logits, 0).sum(-1, keepdims=True)
    before = (logits > own) | ((logits == own) & (places < targets[..., None]))
    return before.sum(-1)


def confusion(told: jax.Array, targets: jax.Array, mask: jax.Array, classes: int) -> jax.Array:
    """Count how often each label (row) was predicted as each class (column): int32 [C, C], on every
    device.

    A label that counts is counted once, by how much it counts.

    Args:
      told: int32 [...], the predicted class.
      targets: int32 [...], the labels.
      mask: float32 [...]; where it is 0 nothing is counted.
      classes: C.
    """
    places = jnp.arange(classes)
    label = (targets[..., None] == places) & (mask != 0)[..., None]
    said = told[..., None] == places
    letters = "bt"[: told.ndim]
    # Zeros and ones: exact in float32, and on a GPU or TPU in what its float32 products are made
    # of, up to 2^24 of a kind in one batch.
    counts = jnp.einsum(
        f"{letters}c,{letters}d->cd",
        label.astype(jnp.float32),
        said.astype(jnp.float32),
        out_sharding=None if jax.sharding.get_abstract_mesh().empty else P(None, None),
    )
    return counts.astype(jnp.int32)


def metrics_of(counts: np.ndarray) -> dict[str, Any]:
    """`macro_f1`, and of few classes the matrix itself, `confusion`.

    Args:
      counts: [C, C], as of `confusion`, of all held-out examples.
    """
    found: dict[str, Any] = {"macro_f1": macro_f1(counts)}
    if len(counts) <= MOST_TOLD:
        found[CONFUSION] = counts.tolist()
    return found


def macro_f1(counts: np.ndarray) -> float:
    """The mean over classes of F1, the harmonic mean of precision and recall.

    Of a class it is 2 right / (labels + predictions). A class that is no label and was never
    predicted is left out.
    """
    either = counts.sum(0) + counts.sum(1)
    return float(np.mean(2 * np.diagonal(counts)[either > 0] / either[either > 0]))
