"""`jaxtrain tokenizer`: train a byte-level BPE tokenizer on text, by the `tokenizers` library."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.config.buckets import on_disk
from jaxtrain.config.errors import UserError
from jaxtrain.config.files import path_errors, write_atomically
from jaxtrain.data.text.source import TextData
from jaxtrain.data.text.stores.prepare import training_text
from jaxtrain.data.tokenization.tokenizer_folder import SETTINGS
from jaxtrain.run.commands.prepare import text_of_arguments
from jaxtrain.run.show.progress import say, terminal
from jaxtrain.run.status import DONE

END = "<|endoftext|>"
LEAST = 257  # every byte, and the end of a text


def command(arguments: argparse.Namespace) -> int:
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
        characters, tokens = train(data, out, vocab_size=arguments.vocab_size)
    file = out / "tokenizer.json"
    say(
        console,
        f"{tokens:,} tokens learned from {characters:,} characters, in {file}",
        f"To train with it: -b 'TextData.tokenizer=\"{file}\"', with a model's vocab_size of at "
        f"least {tokens}",
    )
    return DONE


def train(data: TextData, folder: Path, *, vocab_size: int) -> tuple[int, int]:
    """Write tokenizer.json and tokenizer_config.json of a tokenizer trained on a source's text.

    Args:
      data: names the source; documents that are held out are left out.
      folder: of the files.
      vocab_size: tokens at most, with one for each byte and the one that ends a text.

    Returns:
      How many characters were read, and how many tokens there are.

    Raises:
      UserError: as of `texts_of`; or there is no text.
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
        raise UserError(f"TextData.source = {data.source!r}: empty text, nothing to learn from")
    write_atomically(folder / "tokenizer.json", made.to_str(pretty=True).encode())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    write_atomically(folder / SETTINGS, json.dumps(settings, indent=2).encode())
    return characters, made.get_vocab_size()
