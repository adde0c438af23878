"""`Batch`: the one batch that every data source yields and every model reads."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import UserError

# jax.Array on devices, numpy.ndarray on the host; trees of shapes or shardings have the same
# structure.
Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Batch of text, pairs, images or vectors; `B` rows, `T` tokens per row (`S` of a source),
    `HWC` pixels, `D` features.

    Attributes:
      inputs: int32 tokens [B, T], for pairs the decoder's inputs; or float32 vectors instead of
        tokens [B, T, F]; float32 images [B, H, W, C], or float32 vectors [B, D].
      targets: int32 tokens to predict [B, T], or labels [B], for mixed images both labels [B, 2];
        or float32 regression targets [B, K].
      loss_mask: float32 of the shape of labels or tokens, for regression targets [B]; 1 where the
        target counts, 0 where it does not: there targets may be anything.
      segment_ids: int32 [B, T]; the document a token belongs to, counted from 1 within the row,
        0 for padding. None for all but text and pairs.
      positions: int32 [B, T]; the token's position in its document, from 0. None for all but text.
      rows: int32 [B]; which row of the global batch each is. None: the step numbers them if an
        objective needs it.
      reference: float32 [B, T]; a reference model's log-probability of each target, where an
        objective compares with one. None: none does.
      source: int32 tokens [B, S] of pairs' sources. None for all but pairs.
      source_segment_ids: int32 [B, S]; which of its row's targets a source belongs to, as
        `segment_ids` counts them, 0 for padding. None for all but pairs.
      answers: further right targets of the same sources, each of them a batch of inputs, targets,
        loss_mask and segment_ids that is 0 in the rows which have no such target. None: none has.
      further: the same rows shifted by 1, 2, ... positions, for objectives that predict more than
        the next token: their inputs, their targets, and loss_mask and segment_ids where they belong
        to the same document, else 0. None for other objectives.
    """

    inputs: Array
    targets: Array
    loss_mask: Array
    segment_ids: Array | None = None
    positions: Array | None = None
    rows: Array | None = None
    reference: Array | None = None
    source: Array | None = None
    source_segment_ids: Array | None = None
    answers: tuple["Batch", ...] | None = None
    further: tuple["Batch", ...] | None = None


def on_host(batch: Batch) -> Batch:
    """Convert a batch with arrays of other libraries, such as PyTorch CPU tensors, to NumPy.

    They are copied: a tensor may be changed while a step still reads it. Arrays of NumPy and JAX,
    and other values, are unchanged.

    Raises:
      UserError: NumPy cannot read one, such as a tensor on a GPU.
    """
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return dataclasses.replace(
        batch, **{name: _on_host(f"Batch.{name}", value) for name, value in fields.items()}
    )


def _on_host(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on_host(one) if isinstance(one, Batch) else one for one in value)
    ours = isinstance(value, np.ndarray | np.generic | jax.Array)
    if ours or not hasattr(value, "__array__"):
        return value
    try:
        return np.array(value)
    except (TypeError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{name} is a {type(value).__name__} that NumPy cannot read ({error}); use an array of "
            "NumPy or JAX, or a tensor on the CPU without a gradient, such as "
            "x.detach().float().cpu()"
        ) from error


def kind_of(batch: Batch) -> Literal["tokens", "images", "vectors", "pairs"]:
    """Return the kind of inputs of a batch, or of its shapes.

    Vectors instead of tokens are "tokens" too.
    """
    if batch.source is not None:
        return "pairs"
    if batch.positions is not None or jnp.issubdtype(batch.inputs.dtype, jnp.integer):
        return "tokens"
    return "vectors" if batch.inputs.ndim == 2 else "images"


def example_shape(batch: Batch) -> tuple[int, ...]:
    """Return the shape of one example's inputs, as `Model.flops` takes it: (S, T) for pairs."""
    if batch.source is not None:
        return batch.source.shape[1], batch.inputs.shape[1]
    return batch.inputs.shape[1:]


def stack(examples: Sequence[Batch]) -> Batch:
    """Stack examples into one batch, along a new first dimension."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)
