"""What a checkpoint says beside the state, and the state restored into any layout."""

import dataclasses
import importlib.metadata
import platform
from typing import Any

import jax

from jaxtrain.buckets import Place
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.checkpoint.manifest import FORMAT
from jaxtrain.data.source import Dataset
from jaxtrain.errors import UserError
from jaxtrain.exchange import ExchangeProgram
from jaxtrain.pipeline.stages import is_layer, rearrange
from jaxtrain.settings import Config
from jaxtrain.sharding import is_variable
from jaxtrain.step import Program, TrainState, with_shardings

_DIGEST = "the data's sha256"


def describe(
    config: Config, program: Program | ExchangeProgram, digest: str, next_batch: int
) -> dict[str, Any]:
    """What is saved beside a state.

    Args:
      config: the run's configuration.
      program: the run's program.
      digest: the data's sha256.
      next_batch: the number of the batch that the next step takes.
    """
    return {
        "format": FORMAT,
        "config": config.operative(),
        "data": {"next_batch": next_batch, **_position(config, digest)},
        "layer_order": program.layer_order,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """The versions that a run's numbers depend on."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def refuse_other_run(
    extra: dict[str, Any], config: Config, dataset: Dataset, *, step: int, workdir: Place | None
) -> None:
    """Raises UserError where going on would be another run: other data, order or batches."""
    for name, now in _position(config, dataset.digest).items():
        saved = extra["data"][name]
        if saved != now:
            other = (name, repr(saved), repr(now))
            if name == _DIGEST:
                other = _other_setting(extra["config"], config) or other
            raise UserError(
                f"{workdir}: the checkpoint of step {step} was written with {other[0]} = "
                f"{other[1]}, this configuration has {other[2]}: the data would not go on where it "
                "stopped; use the config.gin beside it, or another --workdir"
            )


def _position(config: Config, digest: str) -> dict[str, Any]:
    """What decides the content of batch k, for every k: with it, the step is the position."""
    return {
        "Train.seed": config.train.seed,
        "Train.global_batch_size": config.train.global_batch_size,
        _DIGEST: digest,
    }


def _other_setting(saved: str, config: Config) -> tuple[str, str, str] | None:
    """A setting of the data that is another than in the saved config, and both values as text."""
    data = ("Train.data ", f"{type(config.train.data).__name__}.")
    before, now = (
        dict(line.split(" = ", 1) for line in text.splitlines() if line.startswith(data))
        for text in (saved, config.operative())
    )
    # Where the text lies says the least: the same may lie elsewhere now.
    names = sorted(now.keys() & before.keys(), key=lambda name: name.endswith(".source"))
    return next(((n, before[n], now[n]) for n in names if before[n] != now[n]), None)


def restore(checkpoints: Checkpoints, step: int, program: Program | ExchangeProgram) -> TrainState:
    """The state of `step` in the program's layout, whatever mesh and stages wrote it.

    A pipeline keeps its layers in stage order; where the saved order is another one they are read
    in that order and then dealt out again.
    """
    saved = checkpoints.extra(step).get("layer_order")
    if saved == program.layer_order or not isinstance(program, Program):
        return checkpoints.restore(step, program.abstract_state())
    num_layers = _num_layers(program)
    present = list(range(num_layers)) if saved is None else saved
    wanted = program.layer_order or list(range(num_layers))
    state = checkpoints.restore(step, _in_order(program, present))
    whole = dataclasses.replace(program.layout, manual=frozenset({"pipe"}))

    def deal(state: TrainState) -> TrainState:
        def one(variable: Any) -> Any:
            if not (is_variable(variable) and is_layer(variable)):
                return variable
            value, axes = variable.get_value(), variable.get_metadata()["axes"]
            # Layers are taken from all stages: first they have to be at hand on each.
            value = jax.sharding.reshard(value, whole.moment(axes))
            return rearrange(variable.replace(value), present, wanted)

        return jax.tree.map(one, state, is_leaf=is_variable)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state())
    with program.layout.active():
        return jax.jit(deal, out_shardings=shardings)(state)


def _num_layers(program: Program) -> int:
    sizes = {
        variable.get_value().shape[0]
        for variable in jax.tree.leaves(program.abstract_state().params, is_leaf=is_variable)
        if is_layer(variable)
    }
    order = program.layer_order
    return sizes.pop() if order is None else sum(layer >= 0 for layer in order)


def _in_order(program: Program, present: list[int]) -> TrainState:
    """The abstract state with its layers in another order, over pipe where their number divides."""
    ranks = program.layout.mesh.shape["pipe"]
    layout = program.layout
    if len(present) % ranks:
        layout = dataclasses.replace(layout, manual=frozenset({"pipe"}))

    def one(variable: Any) -> Any:
        if not (is_variable(variable) and is_layer(variable)):
            return variable
        shape = variable.get_value()
        return variable.replace(jax.ShapeDtypeStruct((len(present), *shape.shape[1:]), shape.dtype))

    shapes = jax.tree.map(one, program.shapes(), is_leaf=is_variable)
    return with_shardings(
        shapes, dataclasses.replace(program, layout=layout).state_shardings(shapes)
    )
