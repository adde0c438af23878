"""Learning rate schedules: cosine, linear, constant, WSD, warmup, reduction on plateau."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.training.guard import updates_taken

# Use of decay_steps by schedules: at the run's end, any length, required.
_TO_THE_END = ("wsd",)
_OF_ANY_LENGTH = ("linear", "cosine", "polynomial", "exponential", "one_cycle")
_IN_CYCLES = ("warm_restarts",)
# Start of one_cycle, as a fraction of the peak: PyTorch's div_factor.
_FIRST_OF_ONE_CYCLE = 1 / 25


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate schedule: decay and warmup, as a fraction of the peak, Optimizer.learning_rate.

    Steps count from 1. The warm-up's step s has s / warmup_steps of the peak, so that its first
    step is not wasted and its last has the peak; without a warm-up step 1 has it. A decay starts
    from there, and its last step has final_fraction of the peak: in the run's last step, unless
    decay_steps says otherwise.

    Attributes:
      name: the schedule after the warm-up: 'constant'; 'linear', 'cosine' (half a wave),
        'polynomial' or 'exponential' decay; 'wsd': constant, then linear decay over the run's last
        decay_steps (arXiv 2404.06395); 'inverse_sqrt': sqrt(warmup_steps / s), at least
        final_fraction (arXiv 1706.03762); 'one_cycle': as 'cosine', the warm-up too half a wave,
        from 1/25 (arXiv 1708.07120, without its momentum schedule); 'warm_restarts': 'cosine' again
        and again, decay_steps each, restarting at the peak (arXiv 1608.03983); 'piecewise':
        multiplied by factor from some steps on.
      warmup_steps: steps of linear growth. A shorter run ends during it.
      final_fraction: the fraction that decay ends at.
      decay_steps: the length of a decay. Of linear, cosine, polynomial, exponential and one_cycle:
        counted from the peak, later steps stay at final_fraction; 0: until the run's last step.
        With it, an extended run keeps its learning rates.
      power: exponent of polynomial decay: (1 - progress)^power.
      factors: piecewise's factors of the learning rate after a step, such as {60: 0.1, 80: 0.1};
        earlier factors stay.
      plateau_patience: on top of any schedule: once the mean loss of `plateau_window` steps has not
        fallen by 1e-4 of the lowest for this many consecutive windows, learning rates are
        multiplied by `plateau_factor`, repeatedly; 0: never. The loss is the training loss.
      plateau_factor: factor of the learning rates after each plateau.
      plateau_window: steps whose mean loss is compared.
    """

    name: Literal[
        "constant", "linear", "cosine", "polynomial", "wsd", "inverse_sqrt", "one_cycle",
        "warm_restarts", "piecewise", "exponential",
    ] = "cosine"  # fmt: skip
    warmup_steps: int = 0
    final_fraction: float = 0.1
    decay_steps: int = 0
    power: float = 2.0
    factors: dict[int, float] = dataclasses.field(default_factory=dict)
    plateau_patience: int = 0
    plateau_factor: float = 0.5
    plateau_window: int = 100

    def __post_init__(self) -> None:
        require_at_least(0, self, "warmup_steps", "decay_steps", "plateau_patience")
        require_at_least(1, self, "plateau_window")
        if not 0 < self.plateau_factor < 1:
            raise UserError(
                f"Schedule.plateau_factor={self.plateau_factor}; use above 0 and below 1, such as "
                "0.5"
            )
        for name in ("plateau_factor", "plateau_window"):
            if not self.plateau_patience and vars(self)[name] != getattr(type(self), name):
                raise UserError(
                    f"Schedule.{name}={vars(self)[name]} has no effect with "
                    "Schedule.plateau_patience=0; set that above 0, such as 5"
                )
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"Schedule.final_fraction={self.final_fraction}; use 0 to 1")
        if self.name == "exponential" and not self.final_fraction:
            raise UserError(
                "Schedule.final_fraction=0.0 with Schedule.name='exponential', which never reaches "
                "0; use above 0, such as 0.01"
            )
        if not self.power > 0:
            raise UserError(f"Schedule.power={self.power}; use a number above 0")
        if self.name != "polynomial" and self.power != type(self).power:
            raise UserError(
                f"Schedule.power={self.power} has no effect for Schedule.name={self.name!r}; leave "
                f"it at {type(self).power} or set Schedule.name='polynomial'"
            )
        if (self.name == "piecewise") != bool(self.factors):
            raise UserError(
                f"Schedule.factors={self.factors} with Schedule.name={self.name!r}: these belong "
                "to 'piecewise', such as {60: 0.1, 80: 0.1}; set both or neither"
            )
        for step, factor in self.factors.items():
            if step < 1 or not factor > 0:
                raise UserError(
                    f"Schedule.factors: {step} has {factor}; use steps from 1 on and factors above "
                    "0"
                )
        needs = self.name in (*_TO_THE_END, *_IN_CYCLES)
        if needs and not self.decay_steps:
            raise UserError(
                f"Schedule.name={self.name!r} with Schedule.decay_steps=0; set the number of decay "
                "steps, such as a tenth of Train.steps"
            )
        if self.decay_steps and not needs and self.name not in _OF_ANY_LENGTH:
            raise UserError(
                f"Schedule.decay_steps={self.decay_steps} has no effect for Schedule.name="
                f"{self.name!r}, which does not end; use 0"
            )

    @property
    def top(self) -> int:
        """First step at the peak, in a run that is long enough."""
        return max(self.warmup_steps, 1)

    def decay_of(self, steps: int) -> tuple[int, int]:
        """Return the last step before the decay of a run of `steps` steps, and the decay's
        length."""
        if self.name in _TO_THE_END:
            start = max(self.top, steps - self.decay_steps)
            return start, max(steps - start, 0)
        return self.top, self.decay_steps or max(steps - self.top, 0)

    def with_same_decay(self, steps: int) -> "Schedule":
        """Return the schedule that gives a longer run the rates of a run of `steps` steps."""
        if self.name not in _OF_ANY_LENGTH:
            return self
        return dataclasses.replace(self, decay_steps=self.decay_of(steps)[1])


def make_schedule(settings: Schedule, peak: float, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the steps already taken: s - 1 gives that of step
    s.

    Args:
      settings: the shape.
      peak: the learning rate at the end of the warm-up.
      steps: optimizer steps of the whole run.
    """
    start, length = settings.decay_of(steps)

    def rate(count: Any) -> jax.Array:
        step = jnp.asarray(count) + 1
        grown = jnp.minimum(step / settings.top, 1.0)
        if settings.name == "one_cycle":
            progress = jnp.clip((step - 1) / max(settings.top - 1, 1), 0.0, 1.0)
            wave = _FIRST_OF_ONE_CYCLE + (1 - _FIRST_OF_ONE_CYCLE) * _rise(progress)
            grown = jnp.where(step < settings.top, wave, 1.0)
        return peak * grown * _fraction(settings, step, start, length)

    return rate


def notes(settings: Schedule, steps: int) -> Iterator[str]:
    """Yield notes on a schedule in a run of `steps` steps."""
    warmup, decay = settings.warmup_steps, settings.decay_steps
    if warmup > steps:
        yield (
            f"Schedule.warmup_steps={warmup} is more than Train.steps={steps}: the learning rate "
            f"grows to {steps / warmup:.0%} of Optimizer.learning_rate, and the run ends there"
        )
    elif settings.name in _TO_THE_END and warmup + decay > steps:
        yield (
            f"Schedule.warmup_steps={warmup} + Schedule.decay_steps={decay} is more than "
            f"Train.steps={steps}: the learning rate decays over {settings.decay_of(steps)[1]} "
            "steps"
        )


def _fraction(settings: Schedule, step: jax.Array, start: int, length: int) -> jax.Array:
    """Return the fraction of the peak learning rate after decay; 1 up to step `start`."""
    final = settings.final_fraction
    if settings.name == "constant":
        return jnp.ones(())
    if settings.name == "inverse_sqrt":
        return jnp.maximum(jnp.sqrt(start / jnp.maximum(step, start)), final)
    if settings.name == "piecewise":
        fraction = jnp.ones(())
        for after, factor in settings.factors.items():
            fraction = fraction * jnp.where(step > after, factor, 1.0)
        return fraction
    if settings.name in _IN_CYCLES:
        since = jnp.maximum(step - start, 0) % (length + 1)
    else:
        since = jnp.clip(step - start, 0, length)
    progress = since / max(length, 1)
    match settings.name:
        case "exponential":
            return final**progress
        case "linear" | "wsd":
            fraction = 1 - progress
        case "polynomial":
            fraction = (1 - progress) ** settings.power
        case _:
            fraction = 1 - _rise(progress)
    # Exact at both ends: a difference times the remainder would round.
    return fraction + final * (1 - fraction)


def _rise(progress: jax.Array) -> jax.Array:
    """Return half a cosine wave from 0 to 1."""
    return (1 - jnp.cos(math.pi * progress)) / 2


# A mean loss is an improvement if it is below the best by this fraction: PyTorch's threshold.
_BETTER = 1e-4


def on_plateau(settings: Schedule) -> list[optax.GradientTransformation]:
    """Return the transformations that scale updates down when the loss plateaus; [] if disabled.

    Its update takes `value`, the step's loss. Its state is part of the optimizer's.
    """
    if settings.plateau_patience == 0:
        return []
    return [
        optax.contrib.reduce_on_plateau(
            factor=settings.plateau_factor,
            patience=settings.plateau_patience,
            rtol=_BETTER,
            accumulation_size=settings.plateau_window,
        )
    ]


def rate_taken(
    schedule: optax.Schedule, before: optax.OptState, after: optax.OptState, steps: jax.Array
) -> jax.Array:
    """Return the learning rate of an update, float32: the schedule's, reduced by plateaus.

    Args:
      schedule: updates taken -> learning rate; skipped updates do not count.
      before: the optimizer's state before the update.
      after: the same after it.
      steps: optimizer steps taken before it.
    """

    def is_plateau(x: object) -> bool:
        return isinstance(x, optax.contrib.ReduceLROnPlateauState)

    rate = jnp.asarray(schedule(updates_taken(before, steps)), jnp.float32)
    for part in jax.tree.leaves(after, is_leaf=is_plateau):
        if is_plateau(part):
            rate = rate * part.scale
    return rate
