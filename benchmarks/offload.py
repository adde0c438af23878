"""The optimizer's state on a disk: MB/s of the update against the disk's own, and against memory.

    python -m benchmarks.offload [--folder DIR] [--layers 4] [--rounds 3]

The disk's own speed is that of one thread which reads a file of the state's size and writes it in
blocks of the same size, mapped as ours are; with `cached` what the system keeps in memory is left
to it, with `synced` each round ends when the disk has it all. A step's time without files is taken
off: what is left is what the files cost.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxtrain.run.trainer import Trainer
from jaxtrain.training.offload.on_disk import BLOCK_BYTES
from jaxtrain.training.settings import load_config


def disk_seconds(folder: Path, size: int, *, synced: bool) -> float:
    """Of reading a file of so many bytes and writing it, a block after the other."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        block = np.ones(min(BLOCK_BYTES, size), np.uint8)
        for _ in range(size // block.size):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        begun = time.perf_counter()
        for first in range(0, size // block.size * block.size, block.size):
            np.copyto(block, np.memmap(file.name, np.uint8, "r", first, block.shape))
            np.memmap(file.name, np.uint8, "r+", first, block.shape)[...] = block
        if synced:
            os.fsync(file.fileno())
        return time.perf_counter() - begun


def step_seconds(where: str, folder: Path, layers: int, rounds: int) -> tuple[float, int]:
    """The median of a step's seconds, and the bytes of the optimizer's state."""
    config = load_config(
        "gpt_quickstart",
        [
            f"Offload.optimizer_state = {where!r}", f"GPT.num_layers = {layers}",
            "GPT.embed_dim = 512", "GPT.num_heads = 8", "GPT.context_length = 16",
            "GPT.vocab_size = 256", "TextData.source = 'synthetic'",
            "TextData.synthetic_vocab_size = 256", "TextData.sequence_length = 16",
            "Train.global_batch_size = 1", f"Train.steps = {rounds + 2}", "Train.eval_batches = 1",
            "Train.eval_every = 0", "Train.save_every = 0", "Mesh.fsdp = 1",
            "Mesh.tensor = 1", "Mesh.data = 1",
        ],
    )  # fmt: skip
    trainer = Trainer(config, folder / where, devices=jax.devices()[:1])
    batch = jax.tree.map(np.zeros_like, jax.tree.map(lambda x: np.empty(x.shape, x.dtype),
                                                     trainer.abstract_batch()))  # fmt: skip
    seconds = []
    for _ in range(rounds + 2):
        begun = time.perf_counter()
        jax.block_until_ready(trainer.step(batch))
        jax.block_until_ready(trainer.state.params)
        seconds.append(time.perf_counter() - begun)
    size = sum(x.nbytes for x in jax.tree.leaves(trainer.state.opt_state) if x.ndim)
    trainer.close()
    return float(np.median(seconds[2:])), size


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        arguments = folder, options.layers, options.rounds
        (without, _), (on_disk, size) = (step_seconds(x, *arguments) for x in ("none", "disk"))
        own = {
            name: min(disk_seconds(folder, size, synced=synced) for _ in range(options.rounds))
            for name, synced in (("cached", False), ("synced", True))
        }
    moved = 2 * size / 1e6  # read and written
    found = {
        "state_megabytes": size / 1e6,
        "step_seconds": {"none": without, "disk": on_disk},
        "megabytes_per_second": {
            "step": moved / on_disk,
            "files": moved / max(on_disk - without, 1e-9),
            **{f"disk_{name}": moved / seconds for name, seconds in own.items()},
        },
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
