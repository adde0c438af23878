"""From settings to an optax transformation."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import optax

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.config.values import ByName
from jaxtrain.training.optimizers.adamw import AdamW
from jaxtrain.training.optimizers.average import keep_average
from jaxtrain.training.optimizers.moments import ROUNDED, Moments
from jaxtrain.training.optimizers.rule import Kept, Rule, rules


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The update rule, and what all rules have in common.

    Attributes:
      rule: the update rule; its own settings are its own section, such as `AdamW.b2`.
      learning_rate: the peak that the schedule scales.
      weight_decay: matrices only, never norm scales and biases; times the learning rate beside the
        gradient or in the gradient, as the rule says.
      clip_norm: gradients whose global norm is larger are scaled down to it; None never clips.
      average_decay: the decay rate of an exponential moving average of the parameters, such as
        0.999, which evaluation and generation use instead of the parameters; None keeps none.
        It costs 4 bytes a parameter, sharded as the moments are.
      moments: the dtype of what the rule keeps, such as adamw's two moments, lion's and sgd's one;
        'bfloat16' halves their bytes and their traffic, rounding stochastically. Which way is a
        hash of the element and the update's number: the same on every mesh and after every restart.
    """

    rule: Annotated[Rule, ByName("name", rules)] = AdamW()
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    average_decay: float | None = None
    moments: Moments = "float32"

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise UserError(f"Optimizer.learning_rate={self.learning_rate}; use a number above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"Optimizer.clip_norm={self.clip_norm}; use None or a number above 0")
        if self.weight_decay < 0:
            raise UserError(f"Optimizer.weight_decay={self.weight_decay}; use 0 or more")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise UserError(
                f"Optimizer.average_decay={self.average_decay}; use None, or a number above 0 and "
                "below 1 such as 0.999"
            )
        if self.average_decay is not None and self.rule.averages:
            raise UserError(
                f"Optimizer.average_decay={self.average_decay} with Optimizer.name="
                f"{self.name!r}, which averages the parameters by itself; use None"
            )

        if self.moments != "float32" and self.rule.dtype is not None:
            raise UserError(
                f"Optimizer.moments={self.moments!r} with Optimizer.name={self.name!r}, which "
                f"keeps its own in {self.rule.dtype}; use 'float32', the default"
            )

    @property
    def name(self) -> str:
        """The rule's."""
        return self.rule.name

    def keeps(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Kept, ...]:
        """The arrays kept for a parameter: the rule's, and the average."""
        average = () if self.average_decay is None else (Kept(shape, axes, dtype="float32"),)
        return (*self.rule.keeps(shape, axes), *average)


def refuse(settings: Optimizer, *, exchange: str) -> Iterator[str]:
    """A sentence where what is kept does not go with this method of exchange."""
    said, instead = f"Optimizer.name={settings.name!r}", "another rule"
    reason = settings.rule.no_mean
    if settings.moments != "float32":
        said, instead = f"Optimizer.moments={settings.moments!r}", "Optimizer.moments='float32'"
        reason = ROUNDED
    if reason is not None and exchange == "local_sgd":
        yield (
            f"{said} with Exchange.method='local_sgd': {reason}; use {instead}, or "
            "Exchange.method='diloco', which averages none"
        )


def make_optimizer(settings: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optax transformation: clip, update rule, learning rate, and the average behind them.

    Its update takes `layers` too, as `moments.keep_moments` does.
    """
    clip = [] if settings.clip_norm is None else [optax.clip_by_global_norm(settings.clip_norm)]
    rule = settings.rule.chain(
        schedule, weight_decay=settings.weight_decay, moments=settings.moments
    )
    average = [] if settings.average_decay is None else [keep_average(settings.average_decay)]
    return optax.chain(*clip, *rule, *average)
