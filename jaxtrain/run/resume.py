"""Resume: checkpoint metadata, compatibility checks, restore into any layout."""

import dataclasses
import importlib.metadata
import math
import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError
from jaxtrain.config.reader import load
from jaxtrain.data.shuffle import VERSION
from jaxtrain.data.source import Dataset
from jaxtrain.data.text.source import TextData
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.run.ancestry import Ancestor
from jaxtrain.run.checkpoint.leaves import OtherLeavesError
from jaxtrain.run.checkpoint.manifest import FORMAT
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.training.balancing import biases_of
from jaxtrain.training.exchange.exchange_program import ExchangeProgram
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.finetune.tuning import partition
from jaxtrain.training.optimizers.optimizer import Optimizer
from jaxtrain.training.optimizers.schedule import Schedule, make_schedule
from jaxtrain.training.pipeline.stages import is_layer, rearrange
from jaxtrain.training.settings import Config
from jaxtrain.training.step import Program, TrainState, with_shardings

_DIGEST = "the data's sha256"
_OF_RATES = ("Optimizer.name", "Optimizer.learning_rate", "Schedule.")


def describe(
    config: Config,
    program: Program | ExchangeProgram,
    digest: str,
    next_batch: int,
    ancestors: Sequence[Ancestor] = (),
) -> dict[str, Any]:
    """What is saved beside a state.

    Args:
      config: the run's configuration.
      program: the run's program.
      digest: the data's sha256.
      next_batch: the number of the batch that the next step takes.
      ancestors: what the run's first parameters came from.
    """
    return {
        "format": FORMAT,
        "ancestors": list(ancestors),
        "config": config.operative(),
        "data": {"next_batch": next_batch, **_position(config, digest)},
        "layer_order": program.layer_order,
        "versions": versions(),
    }


def describe_parameters(
    config: Config, program: Program, ancestors: Sequence[Ancestor]
) -> dict[str, Any]:
    """Return what is saved next to parameters alone, of a run before its first step.

    Args:
      config: the run's configuration.
      program: whose layout and order of layers they have.
      ancestors: what they came from.
    """
    return {
        "format": FORMAT,
        "ancestors": list(ancestors),
        "config": config.operative(),
        "data": {"next_batch": 0},
        "layer_order": program.layer_order,
        "versions": versions(),
        "only_parameters": True,
    }


def versions() -> dict[str, str]:
    """The versions that a run's numbers depend on."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def require_same_run(
    extra: dict[str, Any], config: Config, dataset: Dataset, *, step: int, workdir: Place | None
) -> None:
    """Raises UserError where going on would be another run: other data, order or batches, or what
    another update rule keeps."""
    for name, now in _position(config, dataset.digest).items():
        saved = extra["data"].get(name)  # none of an order from before they had names
        if saved == now:
            continue
        setting, pythons = (name, repr(saved), repr(now)), None
        if name == _DIGEST:
            setting = _other_setting(extra["config"], config)
            pythons = _other_python(extra, config)
        if setting is not None:
            raise UserError(
                f"{workdir}: the checkpoint of step {step} was written with {setting[0]} = "
                f"{setting[1]}, this configuration has {setting[2]}: the data would not go on "
                "where it stopped; use the config.gin beside it, or another --workdir"
            )
        if pythons is not None:
            raise UserError(
                f"{workdir}: the checkpoint of step {step} was written under Python {pythons[0]}, "
                f"whose library is its text, this is {pythons[1]}: the data would not go on where "
                "it stopped; use that Python, or another --workdir"
            )
        raise UserError(
            f"{workdir}: the checkpoint of step {step} was written with {name} = {saved!r}, which "
            f"is {now!r} now: the data would not go on where it stopped; bring them back as they "
            "were, or use another --workdir"
        )
    rule = next(x for x in extra["config"].splitlines() if x.startswith("Optimizer.name = "))
    if rule.partition(" = ")[2] != repr(config.optimizer.name):
        raise UserError(
            f"{workdir}: the checkpoint of step {step} was written with {rule}, this configuration "
            f"has {config.optimizer.name!r}, to which its moments mean nothing; use "
            f'-b "{rule}", or another --workdir'
        )


def other_data(extra: dict[str, Any], config: Config, dataset: Dataset) -> str | None:
    """What makes the data others than those a checkpoint was trained on; None: they are the same.

    Args:
      extra: what the checkpoint says beside its state.
      config: the configuration that opened the data.
      dataset: the opened data.
    """
    saved = extra["data"].get(_DIGEST)
    if saved in (None, dataset.digest):  # parameters alone were trained on nothing here
        return None
    setting, pythons = _other_setting(extra["config"], config), _other_python(extra, config)
    if setting is not None:
        return f"{setting[0]} was {setting[1]}, is {setting[2]}"
    if pythons is not None:
        return f"the embedded text was that of Python {pythons[0]}, is that of {pythons[1]}"
    return f"{_DIGEST} was {saved[:16]}, is {dataset.digest[:16]}"


def _other_python(extra: dict[str, Any], config: Config) -> tuple[str, str] | None:
    """The Python of a checkpoint and this one, where they differ and their library is the text."""
    data = config.train.data
    saved, now = extra["versions"]["python"], platform.python_version()
    if isinstance(data, TextData) and data.source == "embedded" and saved != now:
        return saved, now
    return None


def _position(config: Config, digest: str) -> dict[str, Any]:
    """What decides the content of batch k, for every k: with it, the step is the position."""
    return {
        "Train.seed": config.train.seed,
        "Train.global_batch_size": config.train.global_batch_size,
        _DIGEST: digest,
        "order": VERSION,
    }


def _other_setting(saved: str, config: Config) -> tuple[str, str, str] | None:
    """A setting of the data that is another than in the saved config, and both values as text."""
    found = _differing(saved, config, "Train.data ", f"{type(config.train.data).__name__}.")
    # Where the text lies says the least: the same may lie elsewhere now.
    return min(found, key=lambda one: one[0].endswith(".source"), default=None)


def _differing(saved: str, config: Config, *beginnings: str) -> list[tuple[str, str, str]]:
    """Settings that are others than in the saved config: name, value there, value now."""
    before, now = (
        dict(line.split(" = ", 1) for line in _bindings(text, *beginnings))
        for text in (saved, config.operative())
    )
    return [(n, before[n], now[n]) for n in now if n in before and before[n] != now[n]]


# What decides which arrays a state consists of, what explains most first.
_OF_STATE = (
    ("Train.model ",),
    ("Finetune.", "Optimizer.", "Precision.", "Exchange.", "Guard.", "Train.noise_scale_every "),
)


def with_settings(error: OtherLeavesError, saved: str, config: Config) -> UserError:
    """The error with the settings that differ in place of the arrays, where there are such.

    Args:
      error: what the arrays of a checkpoint were rejected with.
      saved: the config that wrote them.
      config: the present one.
    """
    model, others = _OF_STATE
    for beginnings in ((*model, f"{type(config.train.model).__name__}."), others):
        found = _differing(saved, config, *beginnings)
        if found:
            lines = [f"  {n} = {a} wrote it, this configuration has {b}" for n, a, b in found]
            return UserError("\n".join([error.headline, *lines]))
    return error


@dataclasses.dataclass(frozen=True)
class _Rates:
    """What the learning rates of a run depend on beside its length."""

    optimizer: Optimizer
    schedule: Schedule
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Tuned:
    """What of a model a run trains."""

    finetune: Finetune
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _bindings(config: str, *beginnings: str) -> list[str]:
    """The settings of a saved config whose names begin so, as bindings."""
    return [x for x in config.splitlines() if x.startswith(beginnings) and " = " in x]


def other_settings(extra: dict[str, Any], config: Config, step: int) -> Iterator[str]:
    """A sentence where a run resumes from `step` with other settings than were saved.

    Most may change, such as the mesh; others change what the same parameters compute, such as the
    frequencies of positions, which no array shape shows. What `other_rate` reports is left out.
    """
    told = ("Train.steps", *_OF_RATES) if any(other_rate(extra, config, step)) else ()
    found = [one for one in _differing(extra["config"], config, "") if not one[0].startswith(told)]
    if found:
        changed = ", ".join(f"{name} = {now} (was {before})" for name, before, now in found)
        yield f"Set otherwise than for the checkpoint of step {step}: {changed}"


def other_rate(extra: dict[str, Any], config: Config, step: int) -> Iterator[str]:
    """A sentence where a run resumes from `step` with another learning rate than was saved.

    That is meant where someone changed it, and a surprise where a schedule that decays to the last
    step was given more steps.
    """
    saved = dict(line.split(" = ", 1) for line in extra["config"].splitlines() if " = " in line)
    bindings = _bindings(extra["config"], *_OF_RATES)
    try:
        before = load(_Rates, None, bindings, search_path=Path())
    except UserError:
        return  # of a version with other settings: there is nothing to compare with
    steps = int(saved["Train.steps"])
    old, new = (
        float(np.asarray(make_schedule(one.schedule, one.optimizer.learning_rate, length)(step)))
        for one, length in ((before, steps), (config, config.train.steps))
    )
    if math.isclose(old, new, rel_tol=1e-5):
        return
    now = dict(line.split(" = ", 1) for line in config.operative().splitlines() if " = " in line)
    names = [name for name in now if name.startswith((*_OF_RATES, "Train.steps")) and name in saved]
    changed = ", ".join(f"{n} = {now[n]} (was {saved[n]})" for n in names if now[n] != saved[n])
    kept = before.schedule.with_same_decay(steps)
    way_out = ""
    if kept != config.schedule and kept != before.schedule:
        way_out = f"; Schedule.decay_steps = {kept.decay_steps} keeps the decay as it was"
    yield (
        f"The learning rate of step {step + 1} is {new:.3g}, by the checkpoint's schedule it would "
        f"be {old:.3g}: {changed}{way_out}"
    )


def restore(checkpoints: Checkpoints, step: int, program: Program | ExchangeProgram) -> TrainState:
    """The state of `step` in the program's layout, whatever mesh and stages wrote it.

    A pipeline keeps its layers in stage order; where the saved order is another one they are read
    in that order and then dealt out again.
    """

    def read(part: Callable[[TrainState], Any]) -> Any:
        return _restore(checkpoints, step, program, part)

    plain: Any = program.plain
    offload = getattr(plain, "offload", None)
    if offload is None or offload.optimizer_state != "disk":
        return read(lambda state: state)
    checkpoints.reject_left_over(step, program.abstract_state())
    return plain.restored(read(plain.in_memory), read)


def restore_parameters(
    checkpoints: Checkpoints, step: int, program: Program, unread: Collection[str] = ()
) -> nnx.State:
    """The parameters and running statistics of `step`, in the layout of the program's `whole`;
    nothing else is read.

    Args:
      checkpoints: another run's, or this one's.
      step: of the checkpoint.
      program: what they are for.
      unread: names of those that are left out, with what stands beside them.
    """
    said = _bindings(checkpoints.extra(step)["config"], "Finetune.")
    saved = load(_Tuned, None, said, search_path=Path())
    tuning = tuning_of(saved.finetune, program.build, biases_of(program.build))
    source = dataclasses.replace(program, tuning=tuning)

    def wanted(state: TrainState) -> dict[str, nnx.State]:
        def reads(name: str, _: Any) -> bool:
            return not any(name == one or name.startswith(f"{one}/") for one in unread)

        parts = {"params": state.params, "frozen": state.frozen, "statistics": state.statistics}
        return {name: partition(part, reads)[0] for name, part in parts.items()}

    found = _restore(checkpoints, step, source, wanted)
    with program.layout.active():
        params = jax.jit(source.tuning.merged)((found["params"], found["frozen"]))
    return nnx.merge_state(params, found["statistics"])


def _restore(
    checkpoints: Checkpoints,
    step: int,
    program: Program | ExchangeProgram,
    part: Callable[[TrainState], Any],
) -> Any:
    """A part of the state, whatever mesh and stages wrote it."""
    saved, whole_state = checkpoints.extra(step).get("layer_order"), program.abstract_state()
    wanted_part = part(whole_state)
    partial = wanted_part is not whole_state
    if saved == program.layer_order:
        return checkpoints.restore(step, wanted_part, partial=partial)
    num_layers = _num_layers(program.plain)
    present = list(range(num_layers)) if saved is None else saved
    if (found := sum(layer >= 0 for layer in present)) != num_layers:
        raise OtherLeavesError(
            f"the checkpoint of step {step} in {checkpoints.folder} has {found} layers, this "
            f"configuration's model {num_layers}; use {checkpoints.folder.parent / 'config.gin'}, "
            "which wrote it, or another workdir",
            (),
        )
    wanted = program.layer_order or list(range(num_layers))
    state = checkpoints.restore(step, part(_in_order(program, present)), partial=partial)
    whole = program.layout.with_manual("pipe")

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
    with program.layout.active():
        return jax.jit(deal, out_shardings=shardings)(state)


def _num_layers(program: Program) -> int:
    sizes = {
        variable.get_value().shape[0]
        for variable in jax.tree.leaves(program.abstract_state().weights, is_leaf=is_variable)
        if is_layer(variable)
    }
    order = program.layer_order
    return sizes.pop() if order is None else sum(layer >= 0 for layer in order)


def _in_order(program: Program | ExchangeProgram, present: list[int]) -> TrainState:
    """The abstract state with its layers in another order, over pipe where their number divides."""

    def one(variable: Any) -> Any:
        if not (is_variable(variable) and is_layer(variable)):
            return variable
        shape = variable.get_value()
        return variable.replace(jax.ShapeDtypeStruct((len(present), *shape.shape[1:]), shape.dtype))

    shapes = jax.tree.map(one, program.shapes(), is_leaf=is_variable)
    # Programs with another exchange have no stages.
    if isinstance(program, Program) and len(present) % program.layout.mesh.shape["pipe"]:
        layout = program.layout.with_manual("pipe")
        program = dataclasses.replace(program, layout=layout)
    return with_shardings(shapes, program.state_shardings(shapes))
