"""Estimators of the Hessian's diagonal (Hutchinson, Gauss-Newton-Bartlett)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.nn.precision import to_compute
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.training.microbatches import split_microbatches, with_row_ids
from jaxtrain.training.objectives.objective import at_least_one
from jaxtrain.training.optimizers.rounding import hash_bits, place_in_array
from jaxtrain.training.optimizers.rule import Rule
from jaxtrain.training.optimizers.sophia import SophiaRule
from jaxtrain.training.setup import ON_DEVICES, Setup
from jaxtrain.training.state import TrainState

Estimate = Callable[[Setup, TrainState, Batch], nnx.State]


def estimate_of(rule: Rule) -> Callable[[Setup, TrainState, Batch], Any] | None:
    """What estimates for a rule whether an estimate is due, and that, else zeros; None: nothing."""
    if not isinstance(rule, SophiaRule):
        return None
    return functools.partial(_when_due, _ESTIMATES[rule.curvature], rule.every)


def _when_due(
    estimate: Estimate, every: int, setup: Setup, state: TrainState, batch: Batch
) -> tuple[jax.Array, nnx.State]:
    due = state.step % every == 0
    # One microbatch, the first, is the part of the batch that the paper takes.
    micro = jax.tree.map(lambda x: x[0], split_microbatches(batch, setup.accumulation))
    # Its gradients stay on the devices, as the parameters that it is given.
    one = setup.replace(accumulation=1, targets=ON_DEVICES)

    def zeros() -> nnx.State:
        return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), state.params)

    def estimate_now() -> nnx.State:
        of = jax.tree.map(_reshard_like, estimate(one, state, micro), state.params)
        return jax.tree.map(lambda x: x.astype(jnp.float32), of)

    return due, jax.lax.cond(due, estimate_now, zeros)


def hutchinson(setup: Setup, state: TrainState, batch: Batch) -> nnx.State:
    """u * (H u) for the Hessian H of a batch's mean loss and random signs u: its diagonal, on
    average."""

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

    # H is symmetric: the gradient of u^T g is H u. Forward mode would stop at custom rules.
    return jax.tree.map(jnp.multiply, u, jax.grad(along_u)(state.params))


def signs(state: TrainState) -> nnx.State:
    """1 or -1 for each number of the parameters, float32: a hash of its place and of the step."""

    def sign(path: Any, variable: Any) -> Any:
        bits = hash_bits(path, variable, state.step, _SIGNS, None)
        return variable.replace(jnp.where(bits >> 31 == 0, 1.0, -1.0))

    return jax.tree_util.tree_map_with_path(sign, state.params, is_leaf=is_variable)


def gauss_newton_bartlett(setup: Setup, state: TrainState, batch: Batch) -> nnx.State:
    """n g^2 for the gradient g of the mean loss of n targets that the model itself draws: the
    diagonal of the Gauss-Newton matrix, on average (arXiv 2305.14342, section 2.3)."""
    drawn = dataclasses.replace(batch, targets=draw_targets(setup, state, batch))
    gradients, _, _ = setup.gradients(state, drawn)
    n = setup.objective.counts(batch)["weight"]
    return jax.tree.map(lambda g: n * g * g, gradients)


def draw_targets(setup: Setup, state: TrainState, batch: Batch) -> jax.Array:
    """Targets in the form of a batch's, each drawn from the softmax of the model's logits.

    The largest of logits + Gumbel noise is such a draw. The noise is a hash of the place and of the
    step: the same on every mesh.
    """
    objective: Any = setup.objective
    model = setup.model(state)
    logits = objective.logits(model, state.statistics, batch, setup.execution)
    bits = place_in_array(logits, state.step, _LABELS)
    uniform = ((bits >> 8).astype(jnp.float32) + 0.5) / 2**24
    drawn = (logits - jnp.log(-jnp.log(uniform))).argmax(-1).astype(batch.targets.dtype)
    if drawn.ndim < batch.targets.ndim:  # all labels of an example are the one that was drawn
        drawn = jnp.repeat(drawn[:, None], batch.targets.shape[1], 1)
    return jax.sharding.reshard(drawn, setup.layout.activation(("batch",)))


def _reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """x laid out as another array is."""
    return jax.sharding.reshard(x, jax.typeof(like).sharding)


_ESTIMATES: dict[str, Estimate] = {
    "hutchinson": hutchinson,
    "gauss_newton_bartlett": gauss_newton_bartlett,
}
# Distinguish these draws from the stochastic roundings of the same step.
_SIGNS, _LABELS = 2**20, 2**20 + 1
