"""The command `prepare`: tokenize text into a store, with progress."""

import argparse
import os

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxtrain.config.buckets import BucketPath, Place, place
from jaxtrain.config.errors import UserError, count_of
from jaxtrain.config.files import path_errors
from jaxtrain.config.shipped import shipped_headers
from jaxtrain.data.bad_records import sentences
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import prepare, source_characters
from jaxtrain.data.text.stores.store import Store
from jaxtrain.data.text.stores.transfer import prepare_in_bucket
from jaxtrain.run.show.progress import quantity, say, terminal
from jaxtrain.run.status import DONE
from jaxtrain.training.settings import load_config


def command(arguments: argparse.Namespace) -> int:
    """Makes the store and says what is in it, and how to train on it."""
    console = terminal()
    data, out = text_of_arguments(arguments, console), place(arguments.out)
    workers = arguments.workers
    most = os.cpu_count() or 1
    if not 1 <= workers <= most:
        raise UserError(
            f"--workers {workers}: use 1 to {most}, the processors of this machine; with 1 the "
            "tokenizer uses them all by threads"
        )
    with Progress(
        TextColumn("prepare"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=source_characters(data), figures="")

        def show(characters: int, tokens: int) -> None:
            figures = f"{quantity(characters)} characters  {quantity(tokens)} tokens"
            bar.update(task, completed=characters, figures=figures)

        with path_errors(f"--out {arguments.out}", needs="name a folder that can be written"):
            if isinstance(out, BucketPath):
                store = prepare_in_bucket(
                    data, out, workers=workers, progress=show, say=bar.console.print
                )
            else:
                store = prepare(data, out, workers=workers, progress=show)
    _tell(console, store, out, data)
    return DONE


def text_of_arguments(arguments: argparse.Namespace, console: Console) -> TextData:
    """The text that a command names: a config's, or the source itself."""
    source, bindings = arguments.source, list(arguments.gin_bindings)
    if getattr(arguments, "tokenizer", None) is not None:
        bindings.insert(0, f"TextData.tokenizer = {arguments.tokenizer!r}")
    is_config = source.endswith(".gin") or source in [one.name for one in shipped_headers()]
    if not is_config:
        bindings.insert(0, f"TextData.source = {source!r}")
    config = load_config(
        source if is_config else "gpt_quickstart", bindings, allow_imports=arguments.allow_imports
    )
    say(console, *config.notes)
    data = config.train.data
    if not isinstance(data, TextData):
        raise UserError(
            f"{arguments.command} {source}: its data are {type(data).__name__}; name text, or a "
            "config with TextData"
        )
    return data


def _tell(console: Console, store: Store, out: Place, data: TextData) -> None:
    train, heldout = store.parts["train"], store.parts["heldout"]
    lines = [
        f"{train.tokens:,} tokens of {count_of(train.texts, 'document')} to train on, "
        f"{heldout.tokens:,} of "
        f"{heldout.texts:,} held out, {store.bytes:,} bytes in {out}",
        f"To train on them: -b 'TextData.source=\"{out}\"'"
        + ("" if data.tokenizer == "byte" else f" -b 'TextData.tokenizer=\"{data.tokenizer}\"'"),
    ]
    say(console, *sentences(store.facts), *lines)
