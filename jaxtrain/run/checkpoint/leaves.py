"""Leaves of a checkpoint: names, shapes, dtypes, and how they differ from a state's."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, nearest

_MAX_SHOWN = 8
_MOST_AT_ONCE = 1 << 28  # bytes


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One array of a checkpoint, from its metadata.

    Attributes:
      shape: global shape.
      dtype: the dtype it was saved with.
      mesh: axis sizes of the mesh it was saved from; None for an array on a single device.
      spec: its PartitionSpec's entries on that mesh; None for an array on a single device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    mesh: dict[str, int] | None = None
    spec: tuple[Any, ...] | None = None


class OtherLeavesError(UserError):
    """The requested arrays differ from the stored ones.

    Attributes:
      headline: the message without the list of differences.
    """

    def __init__(self, headline: str, lines: Iterable[str]) -> None:
        super().__init__("\n".join([headline, *lines]))
        self.headline = headline


def require_same_leaves(
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    stored: Mapping[str, StoredLeaf],
    *,
    partial: bool,
    folder: AnyPath,
) -> None:
    """Raise OtherLeavesError, at most one screen, if the requested arrays differ from the stored
    ones.

    Args:
      wanted: by name.
      stored: all arrays of the checkpoint, by name.
      partial: ignore stored arrays that are not requested.
      folder: the checkpoint's, `workdir/checkpoints/<step>`.
    """
    found = list(_differences(wanted, stored, partial=partial))
    if not found:
        return
    rest = len(found) - _MAX_SHOWN
    lines = [f"  {line}" for line in found[:_MAX_SHOWN]]
    lines += [f"  and {rest} more"] if rest > 0 else []
    raise OtherLeavesError(
        f"the checkpoint of step {folder.name} in {folder.parent} was written by a different "
        f"model or optimizer than this configuration's ({len(found)} of its leaves differ); use "
        f"{folder.parent.parent / 'config.gin'}, which wrote it, or another workdir:",
        lines,
    )


def _differences(
    wanted: Mapping[str, jax.ShapeDtypeStruct], stored: Mapping[str, StoredLeaf], *, partial: bool
) -> Iterable[str]:
    """Yield a clause for each leaf that is missing, unexpected, or of another shape or dtype."""
    for name, leaf in wanted.items():
        if name not in stored:
            close = nearest(name, stored.keys() - wanted.keys())
            hint = f" (it has {close})" if close else ""
            yield f"{name}: not in the checkpoint{hint}"
        elif (tuple(leaf.shape), leaf.dtype) != (stored[name].shape, stored[name].dtype):
            yield (
                f"{name}: {_form(stored[name])} in the checkpoint, {_form(leaf)} in this "
                "configuration"
            )
    if not partial:
        for name in stored.keys() - wanted.keys():
            yield f"{name}: {_form(stored[name])} in the checkpoint, absent from this configuration"


def _form(leaf: jax.ShapeDtypeStruct | StoredLeaf) -> str:
    return f"{np.dtype(leaf.dtype).name}[{', '.join(map(str, leaf.shape))}]"


def groups(stored: Mapping[str, StoredLeaf]) -> Iterator[dict[str, StoredLeaf]]:
    """Yield the arrays in groups of at most 256 MiB, or of one array, that are read at once."""
    part: dict[str, StoredLeaf] = {}
    size = 0
    for name, leaf in stored.items():
        size += math.prod(leaf.shape) * leaf.dtype.itemsize
        if part and size > _MOST_AT_ONCE:
            yield part
            part, size = {}, math.prod(leaf.shape) * leaf.dtype.itemsize
        part[name] = leaf
    if part:
        yield part


def stored_leaf(leaf: Any) -> StoredLeaf:
    """Return the leaf that Orbax's metadata describe."""
    sharding = leaf.sharding
    mesh = spec = None
    if hasattr(sharding, "partition_spec"):
        mesh = dict(zip(sharding.axis_names, map(int, sharding.shape), strict=True))
        spec = tuple(sharding.partition_spec)
    return StoredLeaf(tuple(leaf.shape), np.dtype(leaf.dtype), mesh, spec)
