"""What import-hf and export-hf do."""

import argparse
import functools

from jaxtrain.config.buckets import place
from jaxtrain.models.model import reads_images
from jaxtrain.parallel.compilation import keep_compiled_programs
from jaxtrain.run.commands import open_run
from jaxtrain.run.huggingface.awq import export_awq
from jaxtrain.run.huggingface.importing import import_run
from jaxtrain.run.show.progress import say, terminal
from jaxtrain.run.status import DONE, FAILED
from jaxtrain.training.published import SCHEME
from jaxtrain.training.settings import load_config


def import_hf(arguments: argparse.Namespace) -> int:
    """Makes a run of a Hugging Face folder."""
    keep_compiled_programs()
    console, bindings = terminal(), list(arguments.gin_bindings)
    if arguments.simulate_devices is not None:
        bindings.append(f"Mesh.simulated_devices = {arguments.simulate_devices}")
    name = SCHEME + arguments.source.removeprefix(SCHEME)
    config = load_config(name, bindings, allow_imports=arguments.allow_imports)
    say(console, *config.notes)
    workdir = place(arguments.workdir)
    found = import_run(config, workdir, console=console, say=functools.partial(say, console))
    of_images = reads_images(config.train.model)
    first = (
        f"predict --workdir {workdir} IMAGE"
        if of_images
        else f"generate --workdir {workdir} --prompt TEXT"
    )
    say(
        console,
        f"To go on: jaxtrain {first}, or eval, or train {workdir}/config.gin --workdir {workdir}",
    )
    return DONE if found.passed else FAILED


def export_hf(arguments: argparse.Namespace) -> int:
    """Makes a Hugging Face folder of a run."""
    trainer = open_run(arguments, console=terminal())
    if arguments.adapter:
        trainer.export_adapter(arguments.out)
        return DONE
    if arguments.awq:
        found = export_awq(
            arguments.out, trainer.config, trainer.program.plain, trainer.state, trainer.workdir,
            ancestors=trainer.ancestors, console=trainer.console,
        )  # fmt: skip
        return DONE if found.passed else FAILED
    found = trainer.export_huggingface(arguments.out, dtype=arguments.dtype)
    return DONE if found.passed else FAILED
