"""The commands `import-hf` and `export-hf`."""

import argparse
import functools

from jaxtrain.config.buckets import AnyPath, to_path
from jaxtrain.config.shipped import HUGGING_FACE
from jaxtrain.data.text.source import TextData
from jaxtrain.data.tokenization.tokenizer import no_end_of_text
from jaxtrain.models.model import Model, classifies, pooling_of, reads_images, reads_tokens
from jaxtrain.models.weights.folder import TOKENIZER
from jaxtrain.parallel.compilation import keep_compiled_programs
from jaxtrain.run.attempts import DONE, FAILED
from jaxtrain.run.attempts.folder import CARRIED_FOLDER
from jaxtrain.run.commands.read_run import open_run
from jaxtrain.run.huggingface.awq import export_awq
from jaxtrain.run.huggingface.importing import import_run
from jaxtrain.run.show.progress import print_lines, terminal
from jaxtrain.training.settings import load_config


def import_hf(arguments: argparse.Namespace) -> int:
    """Import a Hugging Face folder as a run."""
    keep_compiled_programs()
    console, bindings = terminal(), list(arguments.gin_bindings)
    if arguments.simulate_devices is not None:
        bindings.append(f"Mesh.simulated_devices = {arguments.simulate_devices}")
    name = HUGGING_FACE + arguments.source.removeprefix(HUGGING_FACE)
    config = load_config(name, bindings, allow_imports=arguments.allow_imports)
    print_lines(console, *config.notes)
    workdir = to_path(arguments.workdir)
    found = import_run(
        config, workdir, console=console, report=functools.partial(print_lines, console)
    )
    # From the file: the imported tokenizer may have replaced that of `config`.
    data = load_config(
        str(workdir / "config.gin"), allow_imports=arguments.allow_imports
    ).train.data
    has_tokenizer = (workdir / CARRIED_FOLDER / TOKENIZER).is_file()
    if isinstance(data, TextData) and data.source == "synthetic" and not has_tokenizer:
        print_lines(
            console,
            "It has no tokenizer: to use it with text, bind TextData.source and "
            "TextData.tokenizer to those it was trained with",
        )
    elif isinstance(data, TextData) and data.open_tokenizer().end_of_text is None:
        print_lines(console, no_end_of_text("TextData", data.tokenizer))
    print_lines(
        console,
        f"To continue: jaxtrain {first_use(config.train.model, workdir)}, or train "
        f"{workdir}/config.gin --workdir {workdir}",
    )
    return DONE if found.passed else FAILED


def first_use(model: Model, workdir: AnyPath) -> str:
    """Return the commands that use an imported model."""
    if reads_images(model):
        return f"predict --workdir {workdir} IMAGE, or eval"
    if pooling_of(model) is not None:
        return f"predict --workdir {workdir} TEXT"
    if classifies(model):
        return f"predict --workdir {workdir} TEXT, or eval"
    if reads_tokens(model) and not model.cached:
        return f"eval --workdir {workdir}"
    return f"generate --workdir {workdir} --prompt TEXT, or eval"


def export_hf(arguments: argparse.Namespace) -> int:
    """Export a run as a Hugging Face folder."""
    trainer = open_run(arguments, console=terminal())
    if arguments.adapter:
        trainer.export_adapter(arguments.out)
        return DONE
    if arguments.awq:
        found = export_awq(
            arguments.out, trainer.config, trainer.program.setup, trainer.state, trainer.workdir,
            ancestors=trainer.ancestors, console=trainer.console,
        )  # fmt: skip
        return DONE if found.passed else FAILED
    found = trainer.export_huggingface(arguments.out, dtype=arguments.dtype)
    return DONE if found.passed else FAILED
