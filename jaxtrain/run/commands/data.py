"""The command `data`: describe a config's data and show examples."""

import argparse
import functools

from jaxtrain.config.errors import UserError
from jaxtrain.config.files import writable, write_atomically
from jaxtrain.data.cached_stores import with_stores
from jaxtrain.run.show import report
from jaxtrain.run.show.examples import (
    SHEET_IMAGES,
    STATISTICS_ROWS,
    first_batch,
    show_examples,
    show_tokens,
)
from jaxtrain.run.show.progress import say, terminal
from jaxtrain.run.status import DONE
from jaxtrain.training.settings import load_config


def command(arguments: argparse.Namespace) -> int:
    """Prints what is known of a config's data, its digest and the first batch; draws them."""
    console, picture = terminal(), writable("--png", arguments.png)
    if arguments.examples < 0:
        raise UserError(f"--examples {arguments.examples}: use 0 (none) or more")
    config = load_config(
        arguments.config, arguments.gin_bindings, allow_imports=arguments.allow_imports
    )
    print_line = functools.partial(say, console)
    say(console, *config.notes)
    dataset = with_stores(config.train.data, print_line).open(seed=config.train.seed)
    report.show_facts(console, dataset.facts, dataset.digest)
    report.show_mixing(console, dataset, config.train)
    say(console, f"Digest: sha256 {dataset.digest}")
    # Text is cheap to read, and statistics are of many rows; images are decoded.
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
            from jaxtrain.run.show.data_picture import data_picture

            write_atomically(picture, data_picture(batch, dataset).png())
            say(console, f"Drawn: {picture}")
    return DONE
