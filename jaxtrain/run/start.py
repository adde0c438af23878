"""Initial parameters from another run or a published model (`Train.start_from`)."""

import dataclasses
from pathlib import Path

from flax import nnx

from jaxtrain.config.buckets import AnyPath, on_disk, to_path
from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.folder import CONFIG, open_published
from jaxtrain.parallel.sharding import by_name
from jaxtrain.run.checkpoint import metadata, saved
from jaxtrain.run.checkpoint.leaves import OtherLeavesError
from jaxtrain.run.checkpoint.metadata import Ancestor, of_checkpoint, of_published
from jaxtrain.run.checkpoint.sealing import FOLDER, sealed_steps
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.huggingface.parameters import read_parameters, weight_shapes
from jaxtrain.training.finetune.finetune import Finetune, matching
from jaxtrain.training.finetune.tuning import TEACHER, Tuning
from jaxtrain.training.objectives.distillation import Distillation
from jaxtrain.training.settings import Checkpoint, Config
from jaxtrain.training.setup import Setup


def first_parameters(
    source: str,
    config: Config,
    setup: Setup,
    *,
    named: str = "Train.start_from",
    step: int | None = None,
) -> nnx.State:
    """Return the parameters of another run's newest checkpoint, a Hugging Face folder or a GGUF
    file, and running statistics, where there are such.

    Args:
      source: the folder or the file.
      config: of the new run.
      setup: its program, which determines their layout.
      named: the source's setting, for messages.
      step: of the run's checkpoint; None: its newest.

    Raises:
      UserError: there is neither, or it is of another model.
      CheckpointError: the checkpoint is damaged.
    """
    folder, setup = to_path(source), _of_model(config, setup)
    if _is_published(folder):
        found = open_published(source, named=named)
        return read_parameters(found, setup, config.train.model, _fresh(config, setup))
    if not _steps(folder):
        raise UserError(
            f"{named}={source!r}: no run with a complete checkpoint there, and no Hugging "
            f"Face folder (no {CONFIG}); name one of them, or None to draw the parameters"
        )
    checkpoints = Checkpoints(folder, config.checkpoint, read_only=True)
    try:
        step = max(checkpoints.steps()) if step is None else step
        return restore_parameters(checkpoints, step, config, setup)
    finally:
        checkpoints.close()


def _steps(folder: AnyPath) -> list[int]:
    """Return the steps of a run's checkpoints; [] where a file has the folder's name."""
    try:
        return sealed_steps(folder / FOLDER)
    except NotADirectoryError:
        return []


def newest_step(source: str) -> int | None:
    """Return the step of a run's newest checkpoint; None if there is none."""
    folder = to_path(source)
    return None if _is_published(folder) else max(_steps(folder), default=None)


def ancestors_of(source: str, step: int | None, settings: Checkpoint) -> list[Ancestor]:
    """Return the ancestors of the parameters from `first_parameters`, the nearest first.

    Args:
      source: as there.
      step: of the run's checkpoint; None for a published model.
      settings: of checkpoints.
    """
    folder = to_path(source)
    if step is None:
        return of_published(on_disk(source))
    checkpoints = Checkpoints(folder, settings, read_only=True)
    try:
        return of_checkpoint(checkpoints, folder, step)
    finally:
        checkpoints.close()


def _is_published(folder: AnyPath) -> bool:
    return isinstance(folder, Path) and (folder.suffix == ".gguf" or (folder / CONFIG).is_file())


def restore_parameters(
    checkpoints: Checkpoints, step: int, config: Config, setup: Setup
) -> nnx.State:
    """Return the parameters of a checkpoint except `Finetune.reinitialize`; UserError, with the
    settings that differ, if of another model."""
    setup = _of_model(config, setup)
    try:
        return saved.restore_parameters(checkpoints, step, setup, _fresh(config, setup))
    except OtherLeavesError as error:
        raise metadata.with_settings(error, checkpoints.extra(step)["config"], config) from error


def with_teacher(params: nnx.State | None, config: Config, setup: Setup) -> nnx.State | None:
    """Return a run's initial parameters and, if its objective has a teacher, the teacher's.

    Args:
      params: the model's; None initializes them.
      config: of the run.
      setup: its program.

    Raises:
      UserError: as in `first_parameters`, for the teacher.
    """
    task = config.train.task
    if not isinstance(task, Distillation):
        return params
    assert task.teacher is not None, "asked for its sizes before"
    train = dataclasses.replace(config.train, model=task.sizes, objective=None)
    theirs = dataclasses.replace(config, train=train, finetune=Finetune())
    layout = setup.tuning.teacher_layout(setup.layout)
    found = first_parameters(
        task.teacher, theirs, dataclasses.replace(setup, layout=layout),
        named="Distillation.teacher",
    )  # fmt: skip
    teacher = nnx.from_flat_state(
        {(TEACHER, *path): variable for path, variable in nnx.to_flat_state(found)}
    )
    return teacher if params is None else nnx.merge_state(params, teacher)


def _of_model(config: Config, setup: Setup) -> Setup:
    """Return the program without the objective's wrapper around the model."""
    return dataclasses.replace(setup, build=config.train.model.build, tuning=Tuning())


def _fresh(config: Config, setup: Setup) -> list[str]:
    """Return names of newly initialized parameters, and of statistics that are reset."""
    return matching(config.finetune.reinitialize, list(by_name(weight_shapes(setup.build))))
