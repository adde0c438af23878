"""Orbax handler that writes memory-mapped arrays one at a time."""

import asyncio
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain.training.offload.files import FileArray


class _ArrayByArray(ocp.type_handlers.ArrayHandler):
    """Orbax's way with arrays, after which come those in files, each read, written and let go."""

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(vars(ocp.type_handlers.get_type_handler(jax.Array)))

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Returns when arrays in memory have left the devices; those in files are read while what
        is returned is waited for, and nothing may change them until then."""
        entries = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
        there = [one for one in entries if isinstance(one[0], FileArray)]
        here = [one for one in entries if not isinstance(one[0], FileArray)]
        written = list(await super().serialize(*zip(*here, strict=True)))
        own = super().serialize

        async def array_by_array() -> None:
            # One after the other: Orbax adds a line to one file for each.
            for begun in written:
                await asyncio.to_thread(begun.result)
            for value, info, arg in there:
                for begun in await own([value.read()], [info], [arg]):
                    await asyncio.to_thread(begun.result)

        if not there:
            return written
        return [
            ocp.future.CommitFutureAwaitingContractedSignals(
                array_by_array(), name="arrays_in_files"
            )
        ]


def of_arrays_in_files() -> Any:
    """What Orbax is to know of a state's leaves: arrays, in memory or in files."""
    registry = ocp.type_handlers.create_type_handler_registry()
    registry.add(jax.Array, _ArrayByArray(), lambda kind: issubclass(kind, jax.Array | FileArray))
    return registry
