"""The first examples that a run trains on, as people read them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from jaxtrain.data.bad_records import BadRecord, BadRecords
from jaxtrain.data.batch import Batch
from jaxtrain.data.pipeline import batches
from jaxtrain.data.source import Dataset
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.training.settings import Train

CHARACTERS = 400  # of an example's text
TOKENS = 20  # of one that no tokenizer made


def show_examples(console: Console, train: Train, dataset: Dataset, count: int) -> None:
    """Prints the first `count` examples of the first step, in its order and with its augmentation.

    Raises:
      BadRecordError: more of them than Train.bad_records allows cannot be read.
    """

    if count == 0:
        return

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    def say_bad(record: BadRecord) -> None:
        say(f"{record}: left out")

    stream = batches(
        dataset.train,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        rows=np.arange(min(count, train.global_batch_size)),
        threads=0,
        bad_records=BadRecords(train.bad_records, say_bad),
        mixing=dataset.mixing,
    )
    batch = next(stream)
    for row in range(len(batch.inputs)):
        example = Batch(*(None if leaf is None else leaf[row] for leaf in vars(batch).values()))
        if dataset.unit in ("images", "vectors"):
            say(f"Example {row + 1}: {_numbers(example, dataset)}")
        else:
            say(f"Example {row + 1}: {_tokens(example)}")
            say(_text(example.inputs, example.segment_ids, dataset.tokenizer))


def _numbers(example: Batch, dataset: Dataset) -> str:
    numbers, what = example.inputs, "pixels" if dataset.unit == "images" else "numbers"
    size = " x ".join(map(str, numbers.shape))
    return (
        f"{_told(example.targets, dataset.facts)}, {size} {what} from {numbers.min():.3g} to "
        f"{numbers.max():.3g}, mean {numbers.mean():.3g}, standard deviation {numbers.std():.3g}"
    )


def _told(targets: np.ndarray, facts: Mapping[str, Any]) -> str:
    if not np.issubdtype(targets.dtype, np.integer):
        return "targets " + " ".join(f"{number:.3g}" for number in targets)
    names, label = str(facts.get("class_names", "")).split(", "), int(targets)
    return f"label {label}" + (f" ({names[label]})" if label < len(names) else "")


def _tokens(example: Batch) -> str:
    counted, length = int((example.loss_mask > 0).sum()), len(example.inputs)
    told = f"{length} tokens, {counted} targets that count"
    if example.segment_ids is None:
        return told
    documents = len(np.unique(example.segment_ids[example.segment_ids > 0]))
    return f"{told}, of {documents} document{'s' * (documents > 1)}"


def _text(ids: np.ndarray, segment_ids: np.ndarray | None, tokenizer: Tokenizer | None) -> str:
    real = ids if segment_ids is None else ids[segment_ids > 0]
    if tokenizer is None:
        shown = " ".join(map(str, real[:TOKENS].tolist()))
        return shown + " ..." * (len(real) > TOKENS)
    text = tokenizer.decode(real.tolist())
    return text[:CHARACTERS] + " ..." * (len(text) > CHARACTERS)
