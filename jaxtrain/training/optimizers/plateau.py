"""Reduce the learning rate on plateau."""

import jax
import jax.numpy as jnp
import optax

from jaxtrain.training.guard import updates_taken
from jaxtrain.training.optimizers.schedule import Schedule

# A mean of losses is better where it is below the best by this part of it: PyTorch's threshold.
_BETTER = 1e-4


def on_plateau(settings: Schedule) -> list[optax.GradientTransformation]:
    """What multiplies updates once their mean loss has not fallen for long enough; [] never does.

    Its update takes `value`, the step's loss. What it knows is part of the optimizer's state.
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
    """The learning rate of an update, float32: the schedule's times what plateaus have left of it.

    Args:
      schedule: updates already taken -> learning rate; it does not move with those left out.
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
