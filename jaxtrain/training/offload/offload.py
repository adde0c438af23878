"""Offload settings, and incompatible features."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from jaxtrain.config.reader import configurable
from jaxtrain.parallel.sharding import Sharding

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
        over fsdp as the optimizer's state is. 'disk' is rejected: a step computes with all of them.
      gradients: 'host' takes those of each layer's matrices there as the backward pass makes them,
        and sums them there over microbatches; the update has them back.
    """

    optimizer_state: Where = "none"
    parameters: Where = "none"
    gradients: Literal["none", "host"] = "none"


def refuse(
    settings: Offload,
    sizes: Mapping[str, int],
    *,
    exchange: str,
    compares: str | None,
    sharding: Sharding,
    layers_per_iteration: int,
) -> Iterator[str]:
    """A sentence for each reason why a run cannot keep its state so.

    Args:
      settings: what lies where.
      sizes: of every axis in Mesh.
      exchange: the method of exchange over `data`.
      compares: the setting of Corruption that is on; None: none is.
      sharding: how the state is split.
      layers_per_iteration: `Scan.layers_per_iteration`.
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
    if settings.gradients == "host":
        yield from _refuse_gradients(sizes, sharding, layers_per_iteration)
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


def _refuse_gradients(
    sizes: Mapping[str, int], sharding: Sharding, layers_per_iteration: int
) -> Iterator[str]:
    """Where no layer's gradient is done, in its shard, as the backward pass leaves the layer."""
    for axis in ("data", "expert", "context"):
        if sizes[axis] > 1:
            yield (
                f"Offload.gradients='host' with Mesh.{axis}={sizes[axis]}: gradients cross that "
                f"axis once a step, on the devices; use Mesh.{axis}=1, and Mesh.fsdp in its place"
            )
    if sharding.accumulate == "local":
        yield (
            "Offload.gradients='host' with Sharding.accumulate='local': whole gradients are summed "
            "there, on the devices; use Sharding.accumulate='shard'"
        )
    if sizes["fsdp"] > 1 and sharding.zero < 3:
        yield (
            f"Offload.gradients='host' with Sharding.zero={sharding.zero}: gradients lie as the "
            "parameters do, and only 3 shards these; use Sharding.zero=3"
        )
    if layers_per_iteration != 1:
        yield (
            f"Offload.gradients='host' with Scan.layers_per_iteration={layers_per_iteration}: they "
            "go one layer at a time; use Scan.layers_per_iteration=1"
        )


def _on(settings: Offload) -> list[tuple[str, str]]:
    return [(name, where) for name, where in vars(settings).items() if where != "none"]
