"""LAMB: AdamW with layer-wise trust ratios, for large batches."""

import dataclasses
from typing import ClassVar

import optax

from jaxtrain.config.reader import configurable
from jaxtrain.training.optimizers.direction import AdamRule
from jaxtrain.training.optimizers.groups import Decay
from jaxtrain.training.optimizers.matrices import scale_by_trust_ratio
from jaxtrain.training.optimizers.moments import Moments


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LAMB(AdamRule):
    """LAMB (arXiv 1904.00962): AdamW's update, decay included, times |w| / |update| of each matrix
    of each layer."""

    name: ClassVar[str] = "lamb"
    epsilon: float = 1e-6

    def chain(
        self, rate: optax.Schedule, *, decay: Decay, moments: Moments
    ) -> list[optax.GradientTransformation]:
        *update, scale = super().chain(rate, decay=decay, moments=moments)
        return [*update, scale_by_trust_ratio(), scale]
