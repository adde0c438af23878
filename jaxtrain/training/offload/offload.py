"""What of a state lies on hosts or their disks, and what that does not go together with."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from jaxtrain.config.reader import configurable

Where = Literal["none", "host", "disk"]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """What lies in pinned memory of the hosts between its uses (ZeRO-Offload, arXiv 2101.06840), or
    in files on their disks (ZeRO-Infinity, arXiv 2104.07857).

    Each device's shard lies in the memory, or on the disk, of its own host. The update reads it one
    layer at a time and writes it back; what is computed stays on the devices, bit for bit.

    Attributes:
      optimizer_state: 'host' keeps every array of it there, 8 bytes a parameter of adamw's; 'disk'
        in memory-mapped files in the run's folder (or in a temporary one where there is none, or
        where it is in a bucket), updated in blocks while the next block is read.
      parameters: 'host' keeps those that are trained there, 4 bytes a parameter in float32; a step
        computes with a copy in Precision.compute on the devices. From ZeRO 1 on they are sharded
        over fsdp as the optimizer's state is. 'disk' is refused: a step computes with all of them.
    """

    optimizer_state: Where = "none"
    parameters: Where = "none"


def refuse(
    settings: Offload, sizes: Mapping[str, int], *, exchange: str, compares: str | None
) -> Iterator[str]:
    """A sentence for each reason why a run cannot keep its state so.

    Args:
      settings: what lies where.
      sizes: of every axis in Mesh.
      exchange: the method of exchange over `data`.
      compares: the setting of Corruption that is on; None: none is.
    """
    said = next((f"Offload.{name}={where!r}" for name, where in _on(settings)), None)
    if said is None:
        return
    if settings.parameters == "disk":
        yield (
            "Offload.parameters='disk': a step computes with all parameters, which would come from "
            "the disk whole each time; use 'host', or 'none' with Offload.optimizer_state='disk', "
            "which has twice their bytes"
        )
    if sizes["pipe"] > 1:
        yield (
            f"{said} with Mesh.pipe={sizes['pipe']}: a state is streamed one layer at a time, and "
            "the layers of a pipeline are split over its stages; use Mesh.pipe=1"
        )
    if exchange != "synchronous":
        yield (
            f"{said} with Exchange.method={exchange!r}: replicas with a state of their own keep it "
            "on their devices; use Exchange.method='synchronous'"
        )
    if compares is not None:
        yield (
            f"{said} with {compares}: bits are compared in the memory of the devices, which the "
            f"state is kept out of; set {compares.partition('=')[0]}=0"
        )


def _on(settings: Offload) -> list[tuple[str, str]]:
    return [(name, where) for name, where in vars(settings).items() if where != "none"]
