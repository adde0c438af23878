"""AdamW: Adam with decoupled weight decay."""

import dataclasses
from typing import ClassVar

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import AdamRule


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(AdamRule):
    """AdamW (arXiv 1711.05101): m / (sqrt(v) + epsilon), both moments debiased; decay beside it."""

    name: ClassVar[str] = "adamw"
    b2: float = 0.95
