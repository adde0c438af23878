"""Validation of user-provided batches.

The values of NumPy arrays are checked. Only shape and dtype of arrays on devices are checked: their
values would have to be copied.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data.batch import Batch

DTYPES = {"int32": jnp.integer, "float32": jnp.floating}


def validate_form(batch: Batch, name: str, dtype: str, shape: Sequence[int | str]) -> Iterator[str]:
    """Yield an error for each field that is not an array, or has another dtype or shape.

    Args:
      batch: the batch.
      name: the field.
      dtype: of `DTYPES`; integers and floats of other sizes are accepted too, as in JAX.
      shape: required dimensions; a letter means any size above 0.
    """
    x = getattr(batch, name)
    written = f"{dtype} [{', '.join(map(str, shape))}]"
    if not isinstance(x, np.ndarray | jax.Array):
        yield f"Batch.{name} is {_describe(x)}; use an array of NumPy or JAX, {written}"
    elif not jnp.issubdtype(x.dtype, DTYPES[dtype]):
        yield f"Batch.{name} has the dtype {x.dtype}; use {written}"
    elif not _fits(x.shape, shape):
        yield f"Batch.{name} has the shape {list(x.shape)}; use {written}"


def _describe(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def _fits(shape: tuple[int, ...], wanted: Sequence[int | str]) -> bool:
    if len(shape) != len(wanted):
        return False
    return all(n > 0 if isinstance(w, str) else n == w for n, w in zip(shape, wanted, strict=True))


def validate_values(
    batch: Batch, name: str, least: int, most: int | None, *, why: str = "", counted: bool = False
) -> Iterator[str]:
    """Yield an error with the first value of a field that is out of bounds.

    Args:
      batch: with valid dtypes and shapes.
      name: the field.
      least, most: the bounds; None is none, but values must be finite.
      why: where the bound comes from, such as ' (GPT.vocab_size=256)'.
      counted: whether values are arbitrary where the loss mask is 0; a mask on a device is not
        read, so nothing is checked then.
    """
    x = getattr(batch, name)
    if not isinstance(x, np.ndarray) or (counted and not isinstance(batch.loss_mask, np.ndarray)):
        return
    right = (x >= least) & (np.isfinite(x) if most is None else x <= most)
    if counted:
        right |= batch.loss_mask == 0
    if not right.all():
        index = np.unravel_index(np.argmin(right), x.shape)
        allowed = f"{least} or more, and finite" if most is None else f"{least} to {most}"
        where = ", ".join(map(str, index))
        yield f"Batch.{name}[{where}] is {x[index]}; use {allowed}{why}"
