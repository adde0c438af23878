"""Files of jaxtrain whose code runs on the path of a batch, a request and a checkpoint.

    python -m benchmarks.journeys

The config is `gpt_quickstart` on one device, in a temporary folder. Each path is taken once before
it is counted: what a run does once (compile, trace layers, count a step's FLOPs, open its log,
describe itself for its checkpoints) is not on the path of a batch, a request or a save. The text is
opened anew: that is where a batch comes from.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGE = Path(__file__).parent.parent / "jaxtrain"
# One device, and small: what runs is the same.
BINDINGS = (
    "Mesh.fsdp = 1", "Mesh.tensor = 1", "Train.steps = 4", "Train.global_batch_size = 4",
    "TextData.sequence_length = 64", "GPT.num_layers = 1", "Train.save_every = 0",
    "Train.eval_every = 0", "Train.eval_batches = 1", "Train.log_every = 1",
)  # fmt: skip


@contextlib.contextmanager
def files_that_run() -> Iterator[set[str]]:
    """Within, the files of jaxtrain whose functions are called, in this thread and in new ones."""
    found: set[str] = set()
    root = f"{PACKAGE}{os.sep}"

    def note(frame: Any, event: str, argument: Any) -> None:
        del argument
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found.add(frame.f_code.co_filename.removeprefix(root))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def journeys() -> dict[str, set[str]]:
    """The files of each path."""
    from jaxtrain.run.trainer import Trainer
    from jaxtrain.training.settings import load_config

    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text("A line of text for a small model.\n" * 400)
        config = load_config("gpt_quickstart", [*BINDINGS, f"TextData.source = {str(text)!r}"])
        trainer = Trainer(config, folder / "run")
        trainer.train(2)
        loop = trainer._loop
        with trainer.layout.active(), trainer._feed.training(trainer.dataset, 2) as stream:
            loop.step(next(stream))
        trainer.generate("A line", max_new_tokens=8)
        with trainer.layout.active(), files_that_run() as found["batch: from text to metrics"]:
            dataset = config.train.data.open(seed=0)
            with trainer._feed.training(dataset, 3) as stream:
                loop.step(next(stream))
            loop._own_log.flush()  # writes the line
        with files_that_run() as found["request: from a prompt to an answer"]:
            trainer.generate("A line", max_new_tokens=8)
        with files_that_run() as found["checkpoint: from the state to a sealed folder"]:
            loop._save()
            loop.saved.wait()
        trainer.close()
    return found


def show(found: dict[str, set[str]], console: Console) -> None:
    """Prints a row for each path."""
    table = Table("path", "files", "which")
    for path, files in found.items():
        table.add_row(path, str(len(files)), ", ".join(sorted(files)))
    console.print(table)


if __name__ == "__main__":
    show(journeys(), Console(width=160))
