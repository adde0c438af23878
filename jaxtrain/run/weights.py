"""Weights by name as NumPy arrays: get and set."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxtrain.config.errors import UserError, nearest
from jaxtrain.nn.parameters import is_layer
from jaxtrain.parallel.sharding import by_name, is_variable, name_of
from jaxtrain.training.finetune.tuning import TEACHER, partition
from jaxtrain.training.pipeline.schedules import Stages
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState
from jaxtrain.training.step import Step, base_step

Weights = Mapping[str, Any]
_MAX_SHOWN = 8


def on_host(tree: Any, stages: Stages | None) -> dict[str, np.ndarray]:
    """Return every variable's unsharded array by name, the layers in the model's order.

    Call on all processes of a run; each gets everything, array by array.

    Args:
      tree: parameters, gradients or statistics on devices, in the form of a synchronous step's
        state.
      stages: that step's.
    """
    found = {}
    for name, variable in by_name(tree).items():
        x = variable.get_value()
        if not x.is_fully_addressable:
            x = multihost_utils.process_allgather(x, tiled=True)
        # A copy: the result survives when a step donates the array.
        found[name] = np.array(x)
        if stages is not None and is_layer(variable):
            found[name] = found[name][_layer_order(stages)]
    return found


def weights(step: Step, state: TrainState) -> dict[str, np.ndarray]:
    """Parameters and running statistics of one model by name.

    Args:
      step: the state's step.
      state: from its `current_state` or `eval_state`.
    """
    stages = step.setup.stages
    found = {}
    for part in (*state.weights, state.statistics):
        found |= on_host(part, stages)
    return found


def with_weights(step: Step, state: TrainState, given: Weights) -> TrainState:
    """Return the state with these weights in all its replicas and stages; moments are kept.

    Args:
      step: the step of this state.
      state: the state.
      given: as from `weights`, for every name.

    Raises:
      UserError: names are missing or unknown, or an array has another shape or dtype.
    """
    stages, shapes = step.setup.stages, base_step(step.setup).abstract_state()
    parts = (*shapes.weights, shapes.statistics)
    validate({n: v for part in parts for n, v in by_name(part).items()}, given, stages)
    params, frozen, statistics = (shard_weights(part, given, stages) for part in parts)
    with step.setup.layout.active():
        return _set(step, state, params, statistics, frozen)


def with_trained(step: Step, state: TrainState, given: Weights) -> TrainState:
    """Return the state with new values of trained parameters; the rest is unchanged.

    Args:
      step: the step of this state.
      state: the state.
      given: arrays by name, with valid names, shapes and dtypes.
    """
    shapes = base_step(step.setup).abstract_state().params
    params = shard_weights(shapes, given, step.setup.stages)
    with step.setup.layout.active():
        return _set(step, state, params, state.statistics, state.frozen)


def _set(
    step: Step,
    state: TrainState,
    params: nnx.State,
    statistics: nnx.State,
    frozen: nnx.State,
) -> TrainState:
    after = _with_weights(step, step.in_memory(state), params, statistics)
    after = dataclasses.replace(after, frozen=frozen)
    after = jax.device_put(after, step.shardings(after))
    return step.attach_files(after, before=state)


def shard_weights(shapes: nnx.State, given: Weights, stages: Stages | None) -> nnx.State:
    """Return the caller's arrays on the devices, the layers in the order of the stages.

    Args:
      shapes: target shapes, dtypes and shardings.
      given: as from `weights`, with valid names, shapes and dtypes.
      stages: the step's.
    """

    def one(path: Any, variable: Any) -> Any:
        leaf, value = variable.get_value(), np.asarray(given[name_of(path)])
        if stages is not None and is_layer(variable):
            value = value[np.maximum(stages.order, 0)]
            value[~stages.valid] = 0
        return variable.replace(
            jax.make_array_from_callback(value.shape, leaf.sharding, lambda index: value[index])
        )

    return jax.tree_util.tree_map_with_path(one, shapes, is_leaf=is_variable)


def merge_adapters(setup: Setup, state: TrainState) -> nnx.State:
    """Return the model's parameters, adapters added to their weights: in the form of `train_all`'s,
    without a teacher's."""
    if not setup.tuning.frozen:
        return state.params
    with setup.layout.active():
        found = _merge(setup, state.weights)
    return partition(found, lambda name, _: not name.startswith(f"{TEACHER}/"))[0]


@functools.partial(jax.jit, static_argnums=0)
def _merge(setup: Setup, weights: Any) -> nnx.State:
    return setup.tuning.merge(weights)


@functools.partial(jax.jit, static_argnums=0)
def _with_weights(
    step: Step, state: TrainState, params: nnx.State, statistics: nnx.State
) -> TrainState:
    return step.set_weights(state, params, statistics)


def validate(wanted: Mapping[str, nnx.Variable], given: Weights, stages: Stages | None) -> None:
    """Raise UserError with all arrays that are missing, unknown or of another form, in one message.

    Args:
      wanted: shapes and dtypes by name, with the structure of a state.
      given: arrays by name.
      stages: the state's.
    """
    missing = [name for name in wanted if name not in given]
    unknown = [f"{name}{_perhaps(name, missing)}" for name in given if name not in wanted]
    found = {
        "missing": missing,
        "unknown": unknown,
        "of another form": list(_misshapen(wanted, given, stages)),
    }
    parts = [f"{what}: {_format_list(names)}" for what, names in found.items() if names]
    if parts:
        raise UserError(
            f"Trainer.set_weights: the weights do not match this model; {'; '.join(parts)}; "
            "Trainer.weights() has the names, shapes and dtypes"
        )


def _misshapen(
    wanted: Mapping[str, nnx.Variable], given: Weights, stages: Stages | None
) -> Iterator[str]:
    for name, variable in wanted.items():
        if name not in given:
            continue
        leaf, value = variable.get_value(), given[name]
        shape = leaf.shape
        if stages is not None and is_layer(variable):
            shape = (sum(stages.cut), *shape[1:])
        if not isinstance(value, np.ndarray | jax.Array):
            yield f"{name} (a {type(value).__name__}; use {_form(leaf.dtype, shape)})"
        elif (tuple(value.shape), value.dtype) != (shape, leaf.dtype):
            yield f"{name} ({_form(value.dtype, value.shape)}; use {_form(leaf.dtype, shape)})"


def _form(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{np.dtype(dtype).name}[{', '.join(map(str, shape))}]"


def _perhaps(name: str, missing: list[str]) -> str:
    close = nearest(name, missing)
    return "" if close is None else f" (perhaps {close})"


def _format_list(names: list[str]) -> str:
    rest = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _layer_order(stages: Stages) -> np.ndarray:
    """Return each layer's index in the order of the stages; int [layers]."""
    return np.flatnonzero(stages.valid)[np.argsort(stages.order[stages.valid])]
