"""Where a run's first parameters come from, when they are not drawn: `Train.start_from`."""

from pathlib import Path

from flax import nnx

from jaxtrain.config.buckets import place
from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.folder import CONFIG
from jaxtrain.models.weights.published import published
from jaxtrain.run import resume
from jaxtrain.run.checkpoint.leaves import OtherLeavesError
from jaxtrain.run.checkpoint.retention import FOLDER, sealed_steps
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.huggingface.parameters import read_parameters
from jaxtrain.training.finetune.finetune import matching
from jaxtrain.training.finetune.tuning import named
from jaxtrain.training.settings import Config
from jaxtrain.training.step import Program, parameter_shapes


def first_parameters(source: str, config: Config, program: Program) -> nnx.State:
    """The parameters of another run's newest checkpoint, a Hugging Face folder or a GGUF file.

    Args:
      source: the folder or the file.
      config: the run that starts with them.
      program: its program, in whose layout they come.

    Raises:
      UserError: there is neither there, or another model.
      CheckpointError: the checkpoint is damaged.
    """
    folder = place(source)
    if isinstance(folder, Path) and (folder.suffix == ".gguf" or (folder / CONFIG).is_file()):
        found = published(source, named="Train.start_from")
        return read_parameters(found, program, config.train.model, _fresh(config, program))
    if not sealed_steps(folder / FOLDER):
        raise UserError(
            f"Train.start_from={source!r}: no run with a complete checkpoint there, and no Hugging "
            f"Face folder (no {CONFIG}); name one of them, or None to draw the parameters"
        )
    checkpoints = Checkpoints(folder, config.checkpoint, read_only=True)
    try:
        return restored_parameters(checkpoints, max(checkpoints.steps()), config, program)
    finally:
        checkpoints.close()


def restored_parameters(
    checkpoints: Checkpoints, step: int, config: Config, program: Program
) -> nnx.State:
    """The parameters of a checkpoint but for `Finetune.fresh`; UserError, with the settings that
    differ, if another's."""
    try:
        return resume.restore_parameters(checkpoints, step, program, _fresh(config, program))
    except OtherLeavesError as error:
        raise resume.with_settings(error, checkpoints.extra(step)["config"], config) from error


def _fresh(config: Config, program: Program) -> list[str]:
    """Names of the parameters that are drawn."""
    return matching(config.finetune.fresh, list(named(parameter_shapes(program.build))))
