"""Offload of parameters, gradients and optimizer state to host memory (pinned_host)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.data.batch import Batch
from jaxtrain.nn.precision import to_compute
from jaxtrain.parallel.gathering import HOST, is_pinned, pin_to_host, with_slice
from jaxtrain.parallel.sharding import Layout, is_variable, reshard, shardings
from jaxtrain.training.finetune.tuning import join, part
from jaxtrain.training.guard import select
from jaxtrain.training.objectives.losses import Sums
from jaxtrain.training.offload import Offload
from jaxtrain.training.offload.streaming import is_matrix_of_layers, on_device, over_layers, stacks
from jaxtrain.training.optimizers.moments import apply_updates
from jaxtrain.training.optimizers.rule import EvaluationParams
from jaxtrain.training.setup import Setup, Storage, Targets, add_gradients
from jaxtrain.training.state import Applied, Gradient, TrainState
from jaxtrain.training.step import Step, transform


@transform
def offload_to_host(step: Step, offload: Offload) -> Step:
    """Return the step that keeps state selected by `offload` in pinned host memory between uses.

    Args:
      step: its optimizer is `streaming.stream_update` if its state is offloaded.
      offload: the offload settings.
    """
    changes: dict[str, Any] = {}
    if offload.optimizer_state != "disk":
        changes["apply"] = _apply_from_host(offload)
    if offload.gradients == "host":
        changes["targets"] = _IN_HOST_MEMORY
    if offload.parameters == "host":
        changes["storage"] = _PINNED
    step = step.rebuild(**changes)
    setup, layout = step.setup, step.setup.layout

    def init(key: jax.Array, params: nnx.State | None = None) -> TrainState:
        return step.init(key, None if params is None else on_device(params))

    def state_shardings(state: TrainState) -> TrainState:
        of = step.shardings(state)
        if offload.optimizer_state != "host":
            return of
        # Counts stay on the devices.
        where = jax.tree.map(
            lambda x, sharding: pin_to_host(sharding) if x.ndim else sharding,
            state.opt_state,
            of.opt_state,
        )
        return of.replace(opt_state=where)

    def gradient(state: TrainState, batch: Batch, counts: Sums | None = None) -> Gradient:
        held = fetch_params(setup, state) if offload.parameters == "host" else state
        return step.gradient(held, batch, counts)

    def current_state(state: TrainState) -> TrainState:
        state = step.current_state(state)
        if offload.parameters != "host":
            return state
        where = shardings(state.params, layout.parameter, layout)
        return state.replace(params=jax.device_put(state.params, where))

    def eval_state(state: TrainState) -> TrainState:
        parts = jax.tree.map(
            lambda x: _copy_to_devices(x) if isinstance(x, EvaluationParams) else x,
            state.opt_state,
            is_leaf=lambda x: isinstance(x, EvaluationParams),
        )
        return step.eval_state(current_state(state).replace(opt_state=parts))

    def set_weights(state: TrainState, params: nnx.State, statistics: nnx.State) -> TrainState:
        # New arrays are on the devices.
        return step.set_weights(state, on_device(params), statistics)

    return step._replace(
        init=init,
        shardings=state_shardings,
        gradient=gradient,
        current_state=current_state,
        eval_state=eval_state,
        set_weights=set_weights,
    )


# -- gradients -------------------------------------------------------------------------------------


def _select(layout: Layout, trained: nnx.State) -> nnx.State:
    """Return the parameters, with matrices of layers replaced by unread placeholders on
    the host.
    """
    del layout

    def one(variable: nnx.Variable) -> nnx.Variable:
        if not is_matrix_of_layers(variable):
            return variable
        return variable.replace(jax.device_put(jnp.zeros_like(variable.get_value()), HOST))

    return jax.tree.map(one, trained, is_leaf=is_variable)


def _bind(layout: Layout, trained: nnx.State, of: nnx.State) -> nnx.State:
    del layout

    def one(weight: nnx.Variable, of: nnx.Variable) -> nnx.Variable:
        return with_slice(weight, of) if is_matrix_of_layers(weight) else of

    return jax.tree.map(one, trained, of, is_leaf=is_variable)


def _add(total: nnx.State, grads: nnx.State) -> nnx.State:
    """Return the sum of gradients with a microbatch's, layer by layer."""

    def add(total: nnx.State, grads: nnx.State, _: Any) -> tuple[nnx.State, tuple[()]]:
        return add_gradients(total, grads), ()

    parts = []
    for layers, names in stacks(total):
        mine, more = part(total, names), part(grads, names)
        if layers is None:
            parts.append(add(mine, more, None)[0])
        else:
            parts.append(over_layers(add, mine, more)[0])
    return join(parts)


_IN_HOST_MEMORY = Targets(_select, _bind, _add, on_device)


# -- parameters ------------------------------------------------------------------------------------


def _host_shardings(layout: Layout, params: nnx.State) -> nnx.State:
    return jax.tree.map(pin_to_host, shardings(params, layout.moment, layout))


# The update writes them in place.
_PINNED = Storage(_host_shardings, lambda layout, params: params)


def fetch_params(setup: Setup, state: TrainState) -> TrainState:
    """Return the state with a copy of the parameters on the devices, to compute with."""
    dtype, layout = setup.precision.compute, setup.layout

    def cast(_: tuple[()], params: nnx.State, layer: jax.Array) -> tuple[tuple[()], nnx.State]:
        del layer
        return (), to_compute(params, dtype)

    parts = []
    for layers, names in stacks(state.params):
        mine = part(state.params, names)
        if layers is None or dtype == setup.precision.params:
            parts.append(to_compute(on_device(mine), dtype))
        else:
            parts.append(over_layers(cast, (), mine)[1])
    return state.replace(params=reshard(join(parts), layout.parameter, layout))


def _apply_from_host(offload: Offload) -> Callable[..., Applied]:
    """Return the update for state in host memory, like `apply_on_devices`.

    A bad step never writes host memory.
    """
    streams, keeps_params = offload.optimizer_state == "host", offload.parameters == "host"

    def apply(
        setup: Setup,
        old: TrainState,
        grads: nnx.State,
        good: jax.Array | None,
        extra: Mapping[str, Any],
    ) -> Applied:
        optimizer: Any = optax.with_extra_args_support(setup.optimizer)
        # A rule that is not streamed needs all of them.
        params = old.params if streams else on_device(old.params)
        updates, opt_state = optimizer.update(
            grads, old.opt_state, params, layers=setup.layer_order, good=good, **extra
        )
        if not streams:
            opt_state = select(good, opt_state, old.opt_state)

        def add(params: nnx.State, updates: nnx.State, layer: Any) -> tuple[nnx.State, tuple[()]]:
            new = apply_updates(params, updates, old.step, layer)
            return select(good, new, params), ()

        if not keeps_params:
            return Applied(add(old.params, updates, setup.layer_order)[0], opt_state)
        parts = []
        for layers, names in stacks(old.params):
            mine, theirs = part(old.params, names), part(updates, names)
            if layers is None:
                new = add(on_device(mine), theirs, None)[0]
                parts.append(jax.tree.map(_to_memory_of, new, mine))
            else:
                parts.append(over_layers(add, mine, theirs)[0])
        return Applied(join(parts), opt_state)

    return apply


def _copy_to_devices(tree: Any) -> Any:
    """Copy arrays from the hosts to their devices, outside of a compiled program."""
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, x.sharding.with_memory_kind("device")) if is_pinned(x.sharding) else x
        ),
        tree,
    )


def _to_memory_of(x: jax.Array, like: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.typeof(like).memory_space)
