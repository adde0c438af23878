"""The commands `eval`, `evaluate-tasks`, `predict` and `inspect`, and opening a run to read it."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from jaxtrain.config.buckets import AnyPath, BucketPath, require, to_path
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import path_errors
from jaxtrain.models.model import token_model
from jaxtrain.parallel.compilation import keep_compiled_programs
from jaxtrain.run.attempts import DONE, USER_ERROR
from jaxtrain.run.checkpoint.sealing import FOLDER, require_sealed, sealed_steps
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.generation.answer import tokenizer_of
from jaxtrain.run.metrics.compare import list_names, runs_in
from jaxtrain.run.metrics.files import strict
from jaxtrain.run.show import report
from jaxtrain.run.show.progress import print_lines, terminal
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.optimizers.schedule import notes as notes_of_schedule
from jaxtrain.training.settings import Checkpoint, load_config


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate a checkpoint and print one JSON line."""
    trainer = open_run(arguments)
    values = trainer.evaluate()
    other = trainer.other_data()
    if other is not None:
        line = f"jaxtrain: the data differ from those that the run was trained on: {other}"
        print(line, file=sys.stderr)  # noqa: T201
    line = strict({"step": trainer.steps_done, **values})
    print(json.dumps(line, allow_nan=False))  # noqa: T201
    return DONE


def evaluate_tasks(arguments: argparse.Namespace) -> int:
    """Print a trained language model's scores on tasks."""
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size {arguments.batch_size}: use at least 1")
    # Imported here: the other commands of this module do not score continuations.
    from jaxtrain.run.tasks.tasks import pairs, read_task, results, scores

    tasks = [read_task(path) for path in arguments.tasks]
    trainer = open_run(arguments)
    train, program = trainer.config.train, trainer.program.setup
    tokenizer, sizes = tokenizer_of(train, command="evaluate-tasks"), token_model(train.model)
    state = trainer.program.eval_state(trainer.state)
    questions = [
        pairs(task, tokenizer, delimiter=arguments.delimiter, length=sizes.context_length)
        for task in tasks
    ]
    for task, own in zip(tasks, questions, strict=True):
        answers = scores(program, sizes, state, own, batch_size=arguments.batch_size)
        line = {"step": trainer.steps_done, **results(task, own, answers)}
        print(json.dumps(strict(line), allow_nan=False), flush=True)  # noqa: T201
    return DONE


def predict(arguments: argparse.Namespace) -> int:
    """Print the model's prediction for each readable image, text or vector.

    Returns:
      2 if an input cannot be read; these are listed on standard error.
    """
    skipped = list[UserError]()
    trainer = open_run(arguments)
    for prediction in trainer.predict(arguments.inputs, top=arguments.top, skip=skipped.append):
        print(prediction)  # noqa: T201
    for error in skipped:
        print(f"jaxtrain: {error}", file=sys.stderr)  # noqa: T201
    return USER_ERROR if skipped else DONE


def inspect(arguments: argparse.Namespace) -> int:
    """Print a checkpoint's contents; read its arrays only to verify them."""
    workdir = _existing_run(arguments.workdir, arguments.step)
    checkpoints = Checkpoints(workdir, Checkpoint(), read_only=True)
    step = max(checkpoints.steps()) if arguments.step is None else arguments.step
    console, folder = terminal(), checkpoints.folder / str(step)
    report.show_checkpoint(console, folder, checkpoints.extra(step), checkpoints.tree(step))
    if arguments.verify:
        checkpoints.verify(step)
        console.print("Verified: every array can be read and has the fingerprint it was saved with")
    return DONE


def open_run(arguments: argparse.Namespace, *, console: Console | None = None) -> Trainer:
    """Return the trainer of a run's folder with a checkpoint restored, read-only.

    Args:
      arguments: the parsed command line.
      console: for warnings; None is standard error.
    """
    keep_compiled_programs()
    folder = _existing_run(arguments.workdir, arguments.step)
    bindings, allow_imports = arguments.gin_bindings, arguments.allow_imports
    with tempfile.TemporaryDirectory() as copies:
        file = folder / "config.gin"
        if isinstance(file, BucketPath):
            file = Path(copies) / file.name
            file.write_bytes((folder / file.name).read_bytes())
        config = load_config(file, bindings, allow_imports=allow_imports)
    # Standard output is for the result; a damaged checkpoint that is skipped is reported on
    # standard error.
    console = console or Console(stderr=True)
    of_training = set(notes_of_schedule(config.schedule, config.train.steps))
    print_lines(console, *(note for note in config.notes if note not in of_training))
    return Trainer(config, folder, read_only=True, step=arguments.step, console=console)


def _existing_run(workdir: str, step: int | None) -> AnyPath:
    """Return a run's folder that can be read and holds a checkpoint, of this step unless it is
    None."""
    folder = to_path(workdir)
    if isinstance(folder, BucketPath):
        require("--workdir", folder)
    with path_errors(f"--workdir {workdir}", needs="use a run's folder that can be read"):
        if not (folder / "config.gin").is_file():
            if isinstance(folder, BucketPath):
                siblings = folder.parent
                runs = [str(path) for path in siblings.iterdir()] if siblings.is_dir() else []
            else:
                inside = runs_in(folder, "config.gin") if folder.is_dir() else []
                if inside:
                    raise UserError(
                        f"--workdir {workdir} is not a run (no config.gin); it contains: "
                        f"{list_names(inside)}"
                    )
                runs = [str(path.parent) for path in folder.parent.glob("*/config.gin")]
            hint = did_you_mean(workdir, runs) if runs else ""
            raise UserError(f"--workdir {workdir}: no run there (no config.gin){hint}")
        # Not through `Checkpoints`: Orbax initializes the backend, and then CPU devices cannot be
        # simulated.
        if not sealed_steps(folder / FOLDER):
            raise UserError(f"--workdir {workdir}: there is no complete checkpoint in it")
        if step is not None:
            require_sealed(folder / FOLDER, step)
    return folder
