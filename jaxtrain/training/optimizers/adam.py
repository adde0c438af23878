"""Adam with L2 regularization (decay in the gradient)."""

import dataclasses
from typing import ClassVar

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import AdamRule


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(AdamRule):
    """Adam (arXiv 1412.6980): m / (sqrt(v) + epsilon), both moments debiased; decay in the
    gradient."""

    name: ClassVar[str] = "adam"
    decay_in_gradient: ClassVar[bool] = True
