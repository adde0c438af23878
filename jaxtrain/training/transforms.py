"""Transforms of a step: curvature, router balance, guard, sharpness (SAM), gradient noise scale.

Sources: SAM, Foret et al. 2020 (arXiv 2010.01412), algorithm 1 with p = 2; balance without a loss,
arXiv 2408.15664; noise scale, McCandlish et al. 2018 (arXiv 1812.06162), equations 2.9 and A.1: for
the gradient G of the whole distribution and the covariance S of one example's, it is tr(S) / |G|^2,
in examples. A batch of b examples has E |g|^2 = |G|^2 + tr(S) / b: the norms of two batches of
different sizes give both.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.data.batch import Batch
from jaxtrain.nn.parameters import is_layer, role_of
from jaxtrain.nn.precision import to_compute
from jaxtrain.nn.transformer.language_model import EXPERT_LOAD
from jaxtrain.parallel.ordering import run_between
from jaxtrain.parallel.sharding import is_variable, reshard
from jaxtrain.training.finetune.tuning import TEACHER
from jaxtrain.training.guard import Guard, History, judge, select
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.objectives.objective import at_least_one
from jaxtrain.training.optimizers.moments import hash_array_bits, hash_bits
from jaxtrain.training.optimizers.rule import Rule
from jaxtrain.training.optimizers.rules.sophia import SophiaRule
from jaxtrain.training.setup import ON_DEVICES, Setup, split_microbatches, with_row_ids
from jaxtrain.training.state import Gradient, TrainState, Updated
from jaxtrain.training.step import Step, transform


def update_biases(
    frozen: nnx.State, load_LE: jax.Array | None, speed: float | None, order: list[int] | None
) -> nnx.State:
    """Return the frozen parameters after a step: router biases updated, everything else (a teacher,
    too) unchanged.

    Args:
      frozen: what is not trained.
      load_LE: of the experts of each layer in the whole batch, unstacked layers last;
        None: no router has biases.
      speed: as in `model.bias_speed_of`.
      order: the layer at each index of stacked arrays, -1 for padding; None: the model's.
    """
    if load_LE is None or not speed:
        return frozen
    found: dict[Any, Any] = dict(nnx.to_flat_state(frozen))
    own = [p for p, one in found.items() if role_of(one) == "balance" and p[0] != TEACHER]
    alone = [path for path in own if not is_layer(found[path])]
    stacked = load_LE.shape[0] - len(alone)
    layers = np.arange(stacked) if order is None else np.maximum(order, 0)
    for path in own:
        bias = found[path].get_value()
        load = load_LE[stacked + alone.index(path) if path in alone else layers]
        load = jax.sharding.reshard(load, jax.typeof(bias).sharding.spec)
        found[path] = found[path].replace(update_bias(bias, load.astype(jnp.float32), speed))
    return nnx.from_flat_state(found)


def update_bias(bias_LE: jax.Array, load_LE: jax.Array, speed: float) -> jax.Array:
    """Return the biases after a step, each changed by `speed` against its expert's load error.

    Source: arXiv 2408.15664, algorithm 1.

    Args:
      bias_LE: of the experts of each layer.
      load_LE: tokens routed to them in the whole batch, or a multiple.
      speed: its update rate u; 1e-3 there.
    """
    error_LE = load_LE.mean(-1, keepdims=True) - load_LE
    return bias_LE + speed * jnp.sign(error_LE)


Estimate = Callable[[Setup, TrainState, Batch], nnx.State]


def estimate_of(rule: Rule) -> Callable[[Setup, TrainState, Batch], Any] | None:
    """Return the curvature estimator of a rule, or None if it needs no estimate.

    The estimator returns whether an estimate is due and the estimate, or else zeros.
    """
    if not isinstance(rule, SophiaRule):
        return None
    return functools.partial(_when_due, _ESTIMATES[rule.curvature], rule.every)


def _when_due(
    estimate: Estimate, every: int, setup: Setup, state: TrainState, batch: Batch
) -> tuple[jax.Array, nnx.State]:
    due = state.step % every == 0
    # The first microbatch is the paper's sub-batch.
    micro = jax.tree.map(lambda x: x[0], split_microbatches(batch, setup.accumulation))
    # Its gradients stay on the devices, like its parameters.
    one = setup.replace(accumulation=1, targets=ON_DEVICES)

    def zeros() -> nnx.State:
        return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), state.params)

    def estimate_now() -> nnx.State:
        of = jax.tree.map(_reshard_like, estimate(one, state, micro), state.params)
        return jax.tree.map(lambda x: x.astype(jnp.float32), of)

    return due, jax.lax.cond(due, estimate_now, zeros)


def hutchinson(setup: Setup, state: TrainState, batch: Batch) -> nnx.State:
    """Return u * (H u) for the Hessian H of a batch's mean loss and random signs u: H's diagonal,
    on average.
    """

    u = signs(state)

    objective = setup.objective
    rows = with_row_ids(batch) if objective.draws or setup.tuning.draws else batch
    scales = {name: 1 / at_least_one(count) for name, count in objective.counts(batch).items()}

    def loss(params: nnx.State) -> jax.Array:
        weights = to_compute((params, state.frozen), setup.precision.compute)
        joined = setup.tuning.join(weights)
        sums, _ = setup.sums(joined, state.statistics, rows, train=True, step=state.step)
        return objective.total(sums, scales)

    def along_u(params: nnx.State) -> jax.Array:
        parts = jax.tree.map(lambda g, u: (g * u).sum(), jax.grad(loss)(params), u)
        return sum(jax.tree.leaves(parts), start=jnp.zeros(()))

    # H is symmetric: the gradient of u^T g is H u. Forward mode fails at custom derivative rules.
    return jax.tree.map(jnp.multiply, u, jax.grad(along_u)(state.params))


def signs(state: TrainState) -> nnx.State:
    """Return 1 or -1 for each element of the parameters, float32: a hash of its index and of the
    step.
    """

    def sign(path: Any, variable: Any) -> Any:
        bits = hash_bits(path, variable, state.step, _SIGNS, None)
        return variable.replace(jnp.where(bits >> 31 == 0, 1.0, -1.0))

    return jax.tree_util.tree_map_with_path(sign, state.params, is_leaf=is_variable)


def gauss_newton_bartlett(setup: Setup, state: TrainState, batch: Batch) -> nnx.State:
    """Return n g^2 for the gradient g of the mean loss of n targets drawn from the model's
    distribution.

    On average it is the diagonal of the Gauss-Newton matrix (arXiv 2305.14342, section 2.3).
    """
    drawn = dataclasses.replace(batch, targets=draw_targets(setup, state, batch))
    gradients, _, _ = setup.gradients(state, drawn)
    n = setup.objective.counts(batch)["weight"]
    return jax.tree.map(lambda g: n * g * g, gradients)


def draw_targets(setup: Setup, state: TrainState, batch: Batch) -> jax.Array:
    """Sample targets shaped like a batch's from the softmax of the model's logits.

    The argmax of logits + Gumbel noise is such a sample. The noise is a hash of the position and of
    the step: the same on every mesh.
    """
    objective: Any = setup.objective
    model = setup.model(state)
    logits = objective.logits(model, state.statistics, batch, setup.execution)
    bits = hash_array_bits(logits, state.step, _LABELS)
    uniform = ((bits >> 8).astype(jnp.float32) + 0.5) / 2**24
    drawn = (logits - jnp.log(-jnp.log(uniform))).argmax(-1).astype(batch.targets.dtype)
    if drawn.ndim < batch.targets.ndim:  # all labels of an example are the sampled one
        drawn = jnp.repeat(drawn[:, None], batch.targets.shape[1], 1)
    return jax.sharding.reshard(drawn, setup.layout.activation(("batch",)))


def _reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return x with the sharding of another array."""
    return jax.sharding.reshard(x, jax.typeof(like).sharding)


_ESTIMATES: dict[str, Estimate] = {
    "hutchinson": hutchinson,
    "gauss_newton_bartlett": gauss_newton_bartlett,
}
# Distinguish these draws from the stochastic roundings of the same step.
_SIGNS, _LABELS = 2**20, 2**20 + 1


@transform
def estimate_curvature(step: Step, estimate: Callable[[Setup, TrainState, Batch], Any]) -> Step:
    """Return the step whose optimizer receives an estimate of the Hessian's diagonal (Sophia).

    Args:
      step: its gradient is at the same parameters.
      estimate: as in `curvature.estimate_of`.
    """

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        found = step.gradient(state, batch, counts)
        run = functools.partial(estimate, step.setup)
        found, curvature = run_between(run, found, state, batch)
        return found._replace(extra={"curvature": curvature})

    return step._replace(gradient=gradient)


@transform
def balance_experts(step: Step, speed: float | None) -> Step:
    """Return the step that updates the frozen router biases by the batch's expert load.

    Args:
      step: its metrics include the load.
      speed: the update rate; see `balancing`. None: no update.
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
    """Return the step that judges the gradient before the update, and scales the loss dynamically.

    `TrainState.guard` has the last good steps' metrics for spike detection.

    Args:
      step: its update keeps the old values if `Gradient.good` is false.
      settings: the guard's.
    """
    layout, dynamic = step.setup.layout, step.setup.precision.loss_scale == "dynamic"

    def init(*arguments: Any) -> TrainState:
        state = step.init(*arguments)
        if settings.spike_sigma is None:
            return state
        return state.replace(guard=History.empty(settings.window))

    def shardings(state: TrainState) -> TrainState:
        everywhere = jax.tree.map(lambda _: layout.sharding_of(P()), state.guard)
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


_LEAST_NORM = 1e-12  # of a gradient that is divided by it


@transform
def minimize_sharpness(step: Step, radius: float) -> Step:
    """Return the step with gradients at w + radius g / |g|, for g the gradient at w (SAM).

    Metrics are those of the loss at w; `grad_norm` is of the gradient of the update,
    and `sharpness` the increase of the loss there.

    Args:
      step: its gradient is computed twice.
      radius: rho, a distance in parameter space over all parameters.
    """
    layout = step.setup.layout

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        at = step.current_state(state)
        here = step.gradient(at, batch, counts)
        length = radius / (optax.global_norm(here.grads) + _LEAST_NORM)
        uphill = reshard(here.grads, layout.parameter, layout)

        def move(w: jax.Array, g: jax.Array) -> jax.Array:
            return (w.astype(jnp.float32) + length * g).astype(w.dtype)

        there = at.replace(params=jax.tree.map(move, at.params, uphill))
        found = step.gradient(there, batch, counts)
        sharpness = found.metrics["loss"] - here.metrics["loss"]
        return here._replace(grads=found.grads, metrics={**here.metrics, "sharpness": sharpness})

    return step._replace(gradient=gradient)


# From the moving means of both estimates: a single step's estimate is mostly noise.
_DECAY = 0.95


@transform
def measure_noise(step: Step, every: int) -> Step:
    """Return the step that measures the gradient noise scale from its first microbatch's gradient.

    Its metrics have `noise_scale`, in rows of the batch: the quotient of the means so far, 0 before
    the first. `TrainState.exchange` has the moving means of |G|^2 and of tr(S), float32 [2], and
    their total weight for debiasing, float32.

    Args:
      step: of several microbatches.
      every: steps from one estimate to the next.
    """
    of_one = step.rebuild(accumulation=1)
    parts, layout = step.setup.accumulation, step.setup.layout

    def init(*arguments: Any) -> TrainState:
        nothing = {"means": jnp.zeros(2), "weight": jnp.zeros(())}
        return step.init(*arguments).replace(exchange=nothing)

    def shardings(state: TrainState) -> TrainState:
        everywhere = jax.tree.map(lambda _: layout.sharding_of(P()), state.exchange)
        return step.shardings(state).replace(exchange=everywhere)

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        found, kept = step.gradient(state, batch, counts), state.exchange
        rows = jax.tree.leaves(batch)[0].shape[0]
        large = jnp.square(optax.global_norm(found.grads))

        def estimate() -> dict[str, jax.Array]:
            micro = jax.tree.map(lambda x: x[0], split_microbatches(batch, parts))
            small = jnp.square(optax.global_norm(of_one.gradient(state, micro).grads))
            pair = jnp.stack(signal_and_noise(small, large, rows // parts, rows))
            weight = _DECAY * kept["weight"] + (1 - _DECAY)
            return {"means": _DECAY * kept["means"] + (1 - _DECAY) * pair, "weight": weight}

        kept = jax.lax.cond(state.step % every == 0, estimate, lambda: kept)
        signal, noise = kept["means"]
        scale = noise / jnp.where(signal == 0, 1.0, signal)
        return found._replace(metrics={**found.metrics, "noise_scale": scale}, exchange=kept)

    def base_state(state: TrainState) -> TrainState:
        return state.replace(exchange=())

    def set_weights(state: TrainState, *weights: Any) -> TrainState:
        return step.set_weights(base_state(state), *weights).replace(exchange=state.exchange)

    return step._replace(
        init=init,
        shardings=shardings,
        gradient=gradient,
        current_state=lambda state: step.current_state(base_state(state)),
        eval_state=lambda state: step.eval_state(base_state(state)),
        set_weights=set_weights,
    )


def signal_and_noise(
    small: jax.Array, large: jax.Array, few: int, many: int
) -> tuple[jax.Array, jax.Array]:
    """Return unbiased estimates of |G|^2 and of tr(S), either of which may be negative.

    Args:
      small: |g|^2 of a small batch.
      large: |g|^2 of a large batch.
      few: examples of the small batch.
      many: examples of the large batch.
    """
    signal = (many * large - few * small) / (many - few)
    return signal, (small - large) / (1 / few - 1 / many)
