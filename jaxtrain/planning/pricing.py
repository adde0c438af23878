"""Prices a configuration on a target by closed forms alone: memory, traffic and time."""

import dataclasses

from jaxtrain import preflight
from jaxtrain.planning.memory import Memory, memory
from jaxtrain.planning.targets import Target
from jaxtrain.planning.timing import StepTime, step_time
from jaxtrain.planning.traffic import expected
from jaxtrain.planning.variants import slices_of
from jaxtrain.settings import Config


@dataclasses.dataclass(frozen=True)
class Price:
    """What a configuration costs on a target; an estimate.

    Attributes:
      memory: of one device.
      time: of a step.
      hbm_bytes: what a device has; None: as much as it takes.
    """

    memory: Memory
    time: StepTime
    hbm_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether the estimate is within a device's memory."""
        return self.hbm_bytes is None or self.memory.total <= self.hbm_bytes

    @property
    def seconds(self) -> float:
        """Of a step; where the chip's speed is not known, 0: then memory alone decides."""
        return self.time.seconds or 0.0


def price(config: Config, target: Target) -> Price:
    """The price of a configuration that `variants.refusal` has nothing against."""
    layout = preflight.abstract_layout(config, target.devices * slices_of(config, target))
    needed = memory(config, layout, target.chip.kind)
    update = needed.arguments.params + needed.arguments.optimizer + needed.gradients
    time = step_time(config, layout, target, expected(config, layout), update_bytes=update)
    return Price(needed, time, target.chip.hbm_bytes)
