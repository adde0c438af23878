"""Transforms of a step that change its gradient or its update alone: curvature, balance, guard."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.nn.transformer.language_model import EXPERT_LOAD
from jaxtrain.parallel.sharding import reshard
from jaxtrain.training.balancing import update_biases
from jaxtrain.training.guard import Guard, History, judge, select
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import Gradient, TrainState, Updated
from jaxtrain.training.step import Step, transform


@transform
def estimate_curvature(step: Step, estimate: Callable[[Setup, TrainState, Batch], Any]) -> Step:
    """The step whose optimizer is given an estimate of the Hessian's diagonal.

    Args:
      step: whose gradient is at the same parameters.
      estimate: as of `curvature.estimate_of`.
    """

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        found = step.gradient(state, batch, counts)
        return found._replace(extra={"curvature": estimate(step.setup, state, batch)})

    return step._replace(gradient=gradient)


@transform
def balance_experts(step: Step, speed: float | None) -> Step:
    """The step that moves the biases of routers, which are frozen, by the batch's load.

    Args:
      step: whose metrics have the load.
      speed: by how much; see `balancing`. None: they stay.
    """

    def update(state: TrainState, found: Gradient) -> Updated:
        with jax.named_scope("optimizer"):
            load, order = found.metrics.get(EXPERT_LOAD), step.setup.layer_order
            frozen = update_biases(state.frozen, load, speed, order)
            frozen = select(found.good, frozen, state.frozen)
        done = step.update(state, found)
        return done._replace(state=done.state.replace(frozen=frozen))

    return step._replace(update=update)


@transform
def guard_update(step: Step, settings: Guard) -> Step:
    """The step that judges the gradient before it is taken, and scales the loss dynamically.

    `TrainState.guard` has the last good steps' numbers, where spikes are looked for.

    Args:
      step: whose update keeps the old bits where `Gradient.good` is false.
      settings: which steps are bad.
    """
    layout, dynamic = step.setup.layout, step.setup.precision.loss_scale == "dynamic"

    def init(*arguments: Any) -> TrainState:
        state = step.init(*arguments)
        if settings.spike_sigma is None:
            return state
        return state.replace(guard=History.empty(settings.window))

    def shardings(state: TrainState) -> TrainState:
        everywhere = jax.tree.map(lambda _: layout.named(P()), state.guard)
        return step.shardings(state).replace(guard=everywhere)

    def update(state: TrainState, found: Gradient) -> Updated:
        with jax.named_scope("optimizer"):
            grads = reshard(found.grads, layout.moment, layout)
            metrics = {**found.metrics, "grad_norm": optax.global_norm(grads)}
            verdict = judge(
                settings,
                metrics,
                history=state.guard,
                loss_scale=state.loss_scale,
                dynamic=dynamic,
            )
        metrics |= verdict.metrics
        done = step.update(state, found._replace(grads=grads, metrics=metrics, good=verdict.good))
        new = done.state.replace(loss_scale=verdict.loss_scale, guard=verdict.history)
        return done._replace(state=new)

    return step._replace(init=init, shardings=shardings, update=update)
