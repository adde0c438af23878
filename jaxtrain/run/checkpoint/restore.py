"""Restore of a checkpoint into any layout: other meshes and stages, parameters alone."""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtrain.config.reader import load
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.run.checkpoint.leaves import OtherLeavesError
from jaxtrain.run.checkpoint.metadata import bindings_of
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.finetune.tuning import partition
from jaxtrain.training.pipeline.stages import is_layer, rearrange
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState, with_shardings
from jaxtrain.training.step import Step, base_step
from jaxtrain.training.transforms import biases_of


@dataclasses.dataclass(frozen=True)
class _Tuned:
    """What of a model a run trains."""

    finetune: Finetune
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def restore(checkpoints: Checkpoints, step: int, program: Step) -> TrainState:
    """The state of `step` in the program's layout, whatever mesh and stages wrote it.

    A pipeline keeps its layers in stage order; where the saved order is another one they are read
    in that order and then dealt out again.
    """

    def read(part: Callable[[TrainState], Any]) -> Any:
        return _restore(checkpoints, step, program, part)

    if program.files is None:
        return read(lambda state: state)
    checkpoints.reject_left_over(step, program.abstract_state())
    return program.files.restore(read(program.in_memory), read)


def restore_parameters(
    checkpoints: Checkpoints, step: int, setup: Setup, unread: Collection[str] = ()
) -> nnx.State:
    """The parameters and running statistics of `step`, in the sharding of a state of
    `train_all`; nothing else is read.

    Args:
      checkpoints: another run's, or this one's.
      step: of the checkpoint.
      setup: what they are for.
      unread: names of those that are left out, with what stands beside them.
    """
    said = bindings_of(checkpoints.extra(step)["config"], "Finetune.")
    saved = load(_Tuned, None, said, search_path=Path())
    tuning = tuning_of(saved.finetune, setup.build, biases_of(setup.build))
    source = base_step(setup.replace(tuning=tuning))

    def select_parts(state: TrainState) -> dict[str, nnx.State]:
        def reads(name: str, _: Any) -> bool:
            return not any(name == one or name.startswith(f"{one}/") for one in unread)

        parts = {"params": state.params, "frozen": state.frozen, "statistics": state.statistics}
        return {name: partition(part, reads)[0] for name, part in parts.items()}

    found = _restore(checkpoints, step, source, select_parts)
    with setup.layout.active():
        params = jax.jit(tuning.merge)((found["params"], found["frozen"]))
    return nnx.merge_state(params, found["statistics"])


def _restore(
    checkpoints: Checkpoints,
    step: int,
    program: Step,
    part: Callable[[TrainState], Any],
) -> Any:
    """A part of the state, whatever mesh and stages wrote it."""
    saved, whole_state = checkpoints.extra(step).get("layer_order"), program.abstract_state()
    wanted_part = part(whole_state)
    partial = wanted_part is not whole_state
    if saved == program.setup.layer_order:
        return checkpoints.restore(step, wanted_part, partial=partial)
    num_layers = _num_layers(program.setup)
    present = list(range(num_layers)) if saved is None else saved
    if (found := sum(layer >= 0 for layer in present)) != num_layers:
        raise OtherLeavesError(
            f"the checkpoint of step {step} in {checkpoints.folder} has {found} layers, this "
            f"configuration's model {num_layers}; use {checkpoints.folder.parent / 'config.gin'}, "
            "which wrote it, or another workdir",
            (),
        )
    wanted = program.setup.layer_order or list(range(num_layers))
    state = checkpoints.restore(step, part(_in_order(program, present)), partial=partial)
    whole = program.setup.layout.with_manual("pipe")

    def deal(state: Any) -> Any:
        def one(variable: Any) -> Any:
            if not (is_variable(variable) and is_layer(variable)):
                return variable
            value, axes = variable.get_value(), variable.get_metadata()["axes"]
            # Layers are taken from all stages: first they have to be at hand on each.
            value = jax.sharding.reshard(value, whole.moment(axes))
            return rearrange(variable.replace(value), present, wanted)

        return jax.tree.map(one, state, is_leaf=is_variable)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted_part)
    with program.setup.layout.active():
        return jax.jit(deal, out_shardings=shardings)(state)


def _num_layers(setup: Setup) -> int:
    sizes = {
        variable.get_value().shape[0]
        for variable in jax.tree.leaves(
            base_step(setup).abstract_state().weights, is_leaf=is_variable
        )
        if is_layer(variable)
    }
    order = setup.layer_order
    return sizes.pop() if order is None else sum(layer >= 0 for layer in order)


def _in_order(program: Step, present: list[int]) -> TrainState:
    """The abstract state with its layers in another order, over pipe where their number divides."""

    def one(variable: Any) -> Any:
        if not (is_variable(variable) and is_layer(variable)):
            return variable
        shape = variable.get_value()
        return variable.replace(jax.ShapeDtypeStruct((len(present), *shape.shape[1:]), shape.dtype))

    shapes = jax.tree.map(one, program.shapes(), is_leaf=is_variable)
    layout = program.setup.layout
    if len(present) % layout.mesh.shape["pipe"]:
        program = program.rebuild(layout=layout.with_manual("pipe"))
    return with_shardings(shapes, program.shardings(shapes))
