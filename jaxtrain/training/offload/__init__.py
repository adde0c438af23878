"""Offload of training state to host memory or disk: its settings, and what applies them."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxtrain.config.reader import configurable

Where = Literal["none", "host", "disk"]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Offload of training state to the hosts: pinned memory (ZeRO-Offload, arXiv 2101.06840) or
    files on their disks (ZeRO-Infinity, arXiv 2104.07857).

    Each device's shard is in the memory, or on the disk, of its own host. The update reads it one
    layer at a time and writes it back; what is computed stays on the devices, bit for bit.

    Attributes:
      optimizer_state: 'host' keeps all of it in host memory, 8 bytes per parameter for adamw;
        'disk' in memory-mapped files in the run's folder (or in a temporary one where there is
        none, or it is in a bucket), updated in blocks while the next block is read.
      parameters: 'host' keeps trained parameters there, 4 bytes per parameter in float32; a
        step computes with a copy in Precision.compute on the devices. From ZeRO 1 on they are
        sharded over fsdp like the optimizer's state. 'disk' is rejected: a step computes with all
        of them.
      gradients: 'host' moves those of each layer's matrices there during the backward pass,
        and sums them there over microbatches; the update reads them back.
    """

    optimizer_state: Where = "none"
    parameters: Where = "none"
    gradients: Literal["none", "host"] = "none"


def validate(settings: Offload) -> Iterator[str]:
    """Yield an error message if parameters are offloaded to disk."""
    if settings.parameters == "disk":
        yield (
            "Offload.parameters='disk': a step computes with all parameters, which would come from "
            "the disk whole each time; use 'host', or 'none' with Offload.optimizer_state='disk', "
            "which has twice their bytes"
        )
