"""The one batch that every data source yields and every model reads."""

import dataclasses
from typing import Any

import jax

# jax.Array on devices, numpy.ndarray on the host; trees of shapes or shardings have the same form.
Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of text or images; `B` rows, `T` tokens a row, `HWC` pixels.

    Attributes:
      inputs: int32 tokens [B, T], or float32 images [B, H, W, C].
      targets: int32 tokens to be told [B, T], or labels [B].
      loss_mask: float32 [B, T] or [B]; 1 where the target counts, 0 where it does not: there
        targets may be anything.
      segment_ids: int32 [B, T]; the document a token belongs to, counted from 1 within the row,
        0 for padding. None for images.
      positions: int32 [B, T]; the token's place in its document, from 0. None for images.
    """

    inputs: Array
    targets: Array
    loss_mask: Array
    segment_ids: Array | None = None
    positions: Array | None = None
