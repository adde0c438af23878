"""The commands `data`, `prepare` and `tokenizer`: show data, tokenize text, train a BPE."""

import argparse
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxtrain.config.buckets import AnyPath, BucketPath, on_disk, to_path
from jaxtrain.config.errors import UserError, count_of
from jaxtrain.config.files import path_errors, writable, write_atomically
from jaxtrain.config.shipped import shipped_headers
from jaxtrain.data.source import sentences
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import (
    prepare,
    prepare_in_bucket,
    source_characters,
    training_text,
)
from jaxtrain.data.text.stores.store import Store
from jaxtrain.data.tokenization.tokenizer_folder import SETTINGS
from jaxtrain.run.attempts import DONE
from jaxtrain.run.feed import with_stores
from jaxtrain.run.show import report
from jaxtrain.run.show.examples import (
    SHEET_IMAGES,
    STATISTICS_ROWS,
    data_picture,
    first_batch,
    show_examples,
    show_tokens,
)
from jaxtrain.run.show.progress import print_lines, quantity, terminal
from jaxtrain.training.settings import load_config


def describe_data(arguments: argparse.Namespace) -> int:
    """Print facts of a config's data, its digest and the first batch, and draw them."""
    console, picture = terminal(), writable("--png", arguments.png)
    if arguments.examples < 0:
        raise UserError(f"--examples {arguments.examples}: use 0 (none) or more")
    config = load_config(
        arguments.config, arguments.gin_bindings, allow_imports=arguments.allow_imports
    )
    print_line = functools.partial(print_lines, console)
    print_lines(console, *config.notes)
    dataset = with_stores(config.train.data, print_line).open(seed=config.train.seed)
    report.show_facts(console, dataset.facts, dataset.digest)
    report.show_mixing(console, dataset, config.train)
    print_lines(console, f"Digest: sha256 {dataset.digest}")
    # Text is cheap to read, and statistics need many rows; images are decoded.
    rows = arguments.examples
    if dataset.unit == "tokens":
        rows = max(rows, STATISTICS_ROWS)
    elif picture is not None:
        rows = max(rows, SHEET_IMAGES)
    if rows:
        learned = config.train.task.dataset(dataset, config.train.model)
        batch = first_batch(config.train, learned, rows, print_line)
        if dataset.unit == "tokens":
            show_tokens(batch, dataset, print_line)
        show_examples(batch, dataset, arguments.examples, print_line)
        if picture is not None:
            write_atomically(picture, data_picture(batch, dataset).png())
            print_lines(console, f"Drawn: {picture}")
    return DONE


def prepare_store(arguments: argparse.Namespace) -> int:
    """Make the store and print what is in it, and how to train on it."""
    console = terminal()
    data, out = text_of_arguments(arguments, console), to_path(arguments.out)
    workers = arguments.workers
    most = os.cpu_count() or 1
    if not 1 <= workers <= most:
        raise UserError(
            f"--workers {workers}: use 1 to {most}, the CPUs of this machine; with 1 the tokenizer "
            "uses them all in threads"
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
                    data, out, workers=workers, progress=show, report=bar.console.print
                )
            else:
                store = prepare(data, out, workers=workers, progress=show)
    _report_store(console, store, out, data)
    return DONE


def text_of_arguments(arguments: argparse.Namespace, console: Console) -> TextData:
    """Return the text that a command names: a config's, or the source itself."""
    source, bindings = arguments.source, list(arguments.gin_bindings)
    if getattr(arguments, "tokenizer", None) is not None:
        bindings.insert(0, f"TextData.tokenizer = {arguments.tokenizer!r}")
    is_config = source.endswith(".gin") or source in [one.name for one in shipped_headers()]
    if not is_config:
        bindings.insert(0, f"TextData.source = {source!r}")
    config = load_config(
        source if is_config else "gpt_quickstart", bindings, allow_imports=arguments.allow_imports
    )
    print_lines(console, *config.notes)
    data = config.train.data
    if not isinstance(data, TextData):
        raise UserError(
            f"{arguments.command} {source}: its data are {type(data).__name__}; name text, or a "
            "config with TextData"
        )
    return data


def _report_store(console: Console, store: Store, out: AnyPath, data: TextData) -> None:
    train, heldout = store.parts["train"], store.parts["heldout"]
    lines = [
        f"{train.tokens:,} tokens of {count_of(train.texts, 'document')} to train on, "
        f"{heldout.tokens:,} of "
        f"{heldout.texts:,} held out, {store.bytes:,} bytes in {out}",
        f"To train on them: -b 'TextData.source=\"{out}\"'"
        + ("" if data.tokenizer == "byte" else f" -b 'TextData.tokenizer=\"{data.tokenizer}\"'"),
    ]
    print_lines(console, *sentences(store.facts), *lines)


END = "<|endoftext|>"
LEAST = 257  # every byte, and the end-of-text token


def train_tokenizer(arguments: argparse.Namespace) -> int:
    """Train a tokenizer on the documents that are trained on, and write its files."""
    console, out = terminal(), on_disk(arguments.out)
    if arguments.vocab_size < LEAST:
        raise UserError(
            f"--vocab-size {arguments.vocab_size}: use at least {LEAST}, a token for each byte and "
            "one that ends a text"
        )
    with path_errors(f"--out {arguments.out}", needs="name a folder that can be written"):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out {arguments.out} is there already; name a folder that is new")
        data = text_of_arguments(arguments, console)
        out.mkdir(parents=True, exist_ok=True)
        characters, tokens = train_bpe(data, out, vocab_size=arguments.vocab_size)
    file = out / "tokenizer.json"
    print_lines(
        console,
        f"{tokens:,} tokens learned from {characters:,} characters, in {file}",
        f"To train with it: -b 'TextData.tokenizer=\"{file}\"', with a model's vocab_size of at "
        f"least {tokens}",
    )
    return DONE


def train_bpe(data: TextData, folder: Path, *, vocab_size: int) -> tuple[int, int]:
    """Write tokenizer.json and tokenizer_config.json of a tokenizer trained on a source's text.

    Args:
      data: the source; held-out documents are excluded.
      folder: of the files.
      vocab_size: maximum number of tokens, including one per byte and the end-of-text token.

    Returns:
      The number of characters read, and of tokens.

    Raises:
      UserError: as in `texts_of`; or there is no text.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    characters = 0

    def texts() -> Iterator[str]:
        nonlocal characters
        for part in training_text(data):
            characters += len(part)
            yield part

    made.train_from_iterator(texts(), trainer)
    if not characters:
        raise UserError(
            f"TextData.source = {data.source!r}: the text is empty, so there is nothing to train on"
        )
    write_atomically(folder / "tokenizer.json", made.to_str(pretty=True).encode())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    write_atomically(folder / SETTINGS, json.dumps(settings, indent=2).encode())
    return characters, made.get_vocab_size()
