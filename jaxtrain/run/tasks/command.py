"""The command `evaluate-tasks`: a JSON line for each task file."""

import argparse
import json

from jaxtrain.config.errors import UserError
from jaxtrain.models.model import token_model
from jaxtrain.run.commands.train import open_run
from jaxtrain.run.generation.answer import tokenizer_of
from jaxtrain.run.metrics.files import strict
from jaxtrain.run.status import DONE
from jaxtrain.run.tasks.scoring import scores
from jaxtrain.run.tasks.tasks import pairs, read_task, results


def evaluate_tasks(arguments: argparse.Namespace) -> int:
    """Prints what a trained language model's answers are worth."""
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size {arguments.batch_size}: use at least 1")
    tasks = [read_task(path) for path in arguments.tasks]
    trainer = open_run(arguments)
    train, program = trainer.config.train, trainer.program.setup
    tokenizer, sizes = tokenizer_of(train, command="evaluate-tasks"), token_model(train.model)
    state = trainer.program.eval_state(trainer.state)
    asked = [
        pairs(task, tokenizer, delimiter=arguments.delimiter, length=sizes.context_length)
        for task in tasks
    ]
    for task, own in zip(tasks, asked, strict=True):
        told = scores(program, sizes, state, own, batch_size=arguments.batch_size)
        line = {"step": trainer.steps_done, **results(task, own, told)}
        print(json.dumps(strict(line), allow_nan=False), flush=True)  # noqa: T201
    return DONE
