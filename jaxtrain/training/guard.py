"""Dynamic loss scaling, and bad steps: non-finite and spiking losses, skip or rewind.

A step is bad if its loss or its gradient's norm is not finite, or is a spike compared with the last
good steps. Both are scalars that every step computes and that are equal on all devices, so
the verdict costs no communication and is the same everywhere. Dynamic loss scaling is part of it:
one mechanism keeps the old state, whatever the reason. `Setup.gradients` multiplies the loss by the
scale, and `Precision.loss_scale` is the setting.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import configurable
from jaxtrain.training.objectives.losses import Sums

# Dynamic loss scaling (arXiv 1710.03740, section 3.2). Below the smallest scale there is nothing to
# gain: a gradient that overflows unscaled is a bad step, not a scale that is too large. Above the
# largest one float16 (65,504 = 2^16) only overflows.
FIRST_LOSS_SCALE, GOOD_STEPS_TO_DOUBLE = 2.0**15, 1000
SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 1.0, 2.0**24


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
    """Reaction to a bad step: a loss or a gradient norm that is not finite, or a spike.

    Attributes:
      policy: 'stop' ends the run; 'skip' omits the update, leaving the state bit for bit unchanged,
        and continues with the next batch; 'rewind' goes back to an earlier checkpoint and skips
        the batches around the bad one (PaLM, arXiv 2204.02311, section 5.1).
      spike_sigma: a loss or gradient norm above the mean of the last good steps by more than this
        many of their standard deviations is bad too; None: only non-finite values are.
      window: number of good steps of that mean; spikes are detected once half of them
        are there.
      rewind_steps: minimum number of steps that 'rewind' goes back.
      skip_batches: number of batches that 'rewind' skips from there, including the bad one.
      max_bad_steps: the run stops after this many consecutive bad steps, or, with 'rewind', if it
        would go back more often than that without passing the bad step.
    """

    policy: Literal["stop", "skip", "rewind"] = "stop"
    spike_sigma: float | None = None
    window: int = 128
    rewind_steps: int = 100
    skip_batches: int = 200
    max_bad_steps: int = 10

    def __post_init__(self) -> None:
        if self.spike_sigma is not None and not self.spike_sigma > 0:
            raise UserError(f"Guard.spike_sigma={self.spike_sigma}; use None or a number above 0")
        if self.window < 4:
            raise UserError(f"Guard.window={self.window}; use at least 4 steps")
        for name in ("rewind_steps", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"Guard.{name}={getattr(self, name)}; use at least 1")
        if self.skip_batches < self.rewind_steps:
            raise UserError(
                f"Guard.skip_batches={self.skip_batches} is below Guard.rewind_steps="
                f"{self.rewind_steps}: the bad batch would be read again; use at least "
                f"{self.rewind_steps}"
            )
        rewinds, goes_on = self.policy == "rewind", self.policy != "stop"
        read = {
            "window": (self.spike_sigma is not None, "set Guard.spike_sigma"),
            "rewind_steps": (rewinds, "set Guard.policy='rewind'"),
            "skip_batches": (rewinds, "set Guard.policy='rewind'"),
            "max_bad_steps": (goes_on, "set Guard.policy to 'skip' or 'rewind'"),
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_read, way_out = read.get(field.name, (True, ""))
            if value != field.default and not is_read:
                raise UserError(
                    f"Guard.{field.name}={value!r} has no effect for Guard.policy={self.policy!r} "
                    f"and Guard.spike_sigma={self.spike_sigma!r}; leave it at {field.default!r} or "
                    f"{way_out}"
                )

    @property
    def in_step(self) -> bool:
        """Whether the compiled step judges its own loss and gradient norm; else only the
        host does.
        """
        return self.policy != "stop" or self.spike_sigma is not None

    @property
    def shortest_window(self) -> int:
        """Number of good steps after which spikes are detected."""
        return self.window // 2

    def batches_to_skip(self, bad_step: int, restored_step: int) -> int:
        """Return the batches that 'rewind' skips from the restored step on; the bad one is always
        among them.
        """
        return max(self.skip_batches, bad_step - restored_step)


# -- inside the compiled step ---------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """Losses and gradient norms of the last good steps, on every device.

    Attributes:
      losses: float32 [window], each at index count mod window of its step.
      grad_norms: float32 [window], the same.
      count: int32 scalar, good steps so far.
    """

    losses: jax.Array
    grad_norms: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls, window: int) -> "History":
        """Return the history of a run before its first step."""
        zeros = jnp.zeros(window, jnp.float32)
        return cls(zeros, zeros, jnp.zeros((), jnp.int32))

    def with_step(self, loss: jax.Array, grad_norm: jax.Array) -> "History":
        """Return the history with one more good step, which replaces the oldest."""
        window = self.losses.shape[0]
        here = jnp.arange(window) == self.count % window
        return History(
            jnp.where(here, loss, self.losses),
            jnp.where(here, grad_norm, self.grad_norms),
            self.count + 1,
        )

    def threshold(self, values: jax.Array, settings: Guard) -> jax.Array:
        """Mean + spike_sigma standard deviations of the known steps; infinite while there are too
        few.

        Args:
          values: `losses` or `grad_norms`.
          settings: number of deviations, and minimum number of steps.
        """
        assert settings.spike_sigma is not None, "a history, but no spikes to look for"
        filled = jnp.arange(settings.window) < self.count
        total = jnp.clip(self.count, 1, settings.window).astype(jnp.float32)
        mean = jnp.where(filled, values, 0.0).sum() / total
        variance = jnp.where(filled, jnp.square(values - mean), 0.0).sum() / total
        threshold = mean + settings.spike_sigma * jnp.sqrt(variance)
        return jnp.where(self.count >= settings.shortest_window, threshold, jnp.inf)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict on a step: whether it is good, and the guard's state after it.

    Attributes:
      good: bool scalar: whether the update counts.
      history: the new history; () if unused.
      loss_scale: the new scale and its good steps, float32 [2].
      metrics: `bad` (0 or 1); with spike detection
        `loss_threshold` and `grad_norm_threshold`; with a dynamic scale `loss_scale` and `skipped`
        (1 if a gradient overflowed at a scale that can be lowered, which is not bad).
    """

    good: jax.Array
    history: History | tuple[()]
    loss_scale: jax.Array
    metrics: Sums


def judge(
    settings: Guard,
    metrics: Sums,
    *,
    history: History | tuple[()],
    loss_scale: jax.Array,
    dynamic: bool,
) -> Verdict:
    """Judge a step by its metrics `loss` and `grad_norm`, both unscaled.

    Args:
      settings: the guard's.
      metrics: the step's.
      history: of the previous good steps; () without spike detection.
      loss_scale: the loss scale, and good steps since it last changed.
      dynamic: whether an overflow halves that scale.
    """
    loss, grad_norm = metrics["loss"], metrics["grad_norm"]
    finite_loss = jnp.isfinite(loss)
    good = finite_loss & jnp.isfinite(grad_norm)
    overflow = jnp.zeros_like(good)
    more: Sums = {}
    if dynamic:
        # The loss itself is not scaled: if it is not finite, no scale helps.
        overflow = finite_loss & ~good & (loss_scale[0] > SMALLEST_LOSS_SCALE)
        more |= {"loss_scale": loss_scale[0], "skipped": overflow.astype(jnp.float32)}
    if isinstance(history, History):
        highest_loss = history.threshold(history.losses, settings)
        highest_norm = history.threshold(history.grad_norms, settings)
        good &= (loss <= highest_loss) & (grad_norm <= highest_norm)
        more |= {"loss_threshold": highest_loss, "grad_norm_threshold": highest_norm}
        history = _where(good, history.with_step(loss, grad_norm), history)
    if dynamic:
        loss_scale = _rescale(loss_scale, good, overflow)
    more["bad"] = (~good & ~overflow).astype(jnp.float32)
    return Verdict(good, history, loss_scale, more)


def select(good: jax.Array | None, new: Any, old: Any) -> Any:
    """Return the new tree after a good step, else the old one; `good` None counts as good."""
    if good is None:
        return new
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def updates_taken(opt_state: optax.OptState, steps: jax.Array) -> jax.Array:
    """Return the number of updates counted by the learning-rate schedule; `steps` without a
    schedule.
    """

    def counts(x: Any) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    found = [x.count for x in jax.tree.leaves(opt_state, is_leaf=counts) if counts(x)]
    return found[-1] if found else steps


def _rescale(loss_scale: jax.Array, good: jax.Array, overflow: jax.Array) -> jax.Array:
    """Return the new loss scale: halved at an overflow, doubled after enough good steps."""
    scale, good_steps = loss_scale[0], loss_scale[1]
    grown = good_steps + 1 >= GOOD_STEPS_TO_DOUBLE
    doubled = jnp.minimum(scale * 2, LARGEST_LOSS_SCALE)
    after_good = jnp.stack([jnp.where(grown, doubled, scale), (good_steps + 1) * ~grown])
    halved = jnp.stack([jnp.maximum(scale / 2, SMALLEST_LOSS_SCALE), jnp.zeros_like(scale)])
    return jnp.where(good, after_good, jnp.where(overflow, halved, loss_scale))


def _where(condition: jax.Array, new: History, old: History) -> History:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


# -- on the host ----------------------------------------------------------------------------------


class BadStepError(FloatingPointError):
    """Error of a run that stops at bad steps; `step` is the first of them, or the last tolerated
    one.
    """

    def __init__(self, step: int, why: str, *, policy: str = "stop", in_a_row: int = 1) -> None:
        """Format the message that the run ends with.

        Args:
          step: the bad step.
          why: from `what_is_bad`.
          policy: the guard's policy.
          in_a_row: bad steps (rewinds, with 'rewind') since the last good one, this one included.
        """
        way_out = (
            "lower Optimizer.learning_rate, lengthen Schedule.warmup_steps or set "
            "Optimizer.clip_norm, and resume from the last checkpoint"
        )
        if policy == "stop":
            reason = "training stops, because later steps would be bad too"
            way_out += ", or let Guard.policy='skip' or 'rewind' continue automatically"
        else:
            reason = f"training stops after {in_a_row} in a row (Guard.max_bad_steps)"
        super().__init__(f"step {step} is bad, {why}: {reason}; {way_out}")
        self.step = step


class Rewind(Exception):  # noqa: N818 - control flow, not an error
    """Request to resume from an earlier checkpoint because `step` is bad; `why` is the reason."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step} is bad, {why}: going back to an earlier checkpoint")
        self.step, self.why = step, why


class Rewinds:
    """Counter of how often a run has gone back from the same bad step."""

    def __init__(self, settings: Guard) -> None:
        self._settings = settings
        self._farthest = self._count = 0

    def target(self, rewind: Rewind) -> int:
        """Return the step to go back to; the checkpoint restored is this one or an earlier one.

        Raises:
          BadStepError: it went back too often without passing the bad step.
        """
        self._count = self._count + 1 if rewind.step <= self._farthest else 1
        self._farthest = max(self._farthest, rewind.step)
        if self._count > self._settings.max_bad_steps:
            raise BadStepError(rewind.step, rewind.why, policy="rewind", in_a_row=self._count)
        return max(rewind.step - self._settings.rewind_steps, 0)
