"""Our text pipeline against torch's DataLoader: the same tokens in one memory-mapped uint16 file.

    python -m benchmarks.loader [--rounds 7] [--batches 150] [--json FILE]

Batches of 64 x 1024 tokens on the host. Ours is what `jaxtrain train` reads: shuffled anew each
epoch, exact after a resume, with loss mask, segment ids and positions, documents apart; once also
without documents' marks, which is nearer to the peers. Theirs are a sequential data set (row i is
tokens [i * T, i * T + T]) that DataLoader shuffles, and nanoGPT's random offsets; both yield int64
inputs and targets, nothing else. Sequential rows are compared with ours first. Where Hugging Face's
`datasets` is installed, rows of T + 1 tokens that it saved, shuffled by it and given as NumPy's
arrays, are another.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from jaxtrain.data.loader import batches
from jaxtrain.data.text.packing import PackedText

ROWS, LENGTH, TOKENS = 64, 1024, 40_000_000


class Sequential(torch.utils.data.Dataset):
    """Row i and, one further, its targets."""

    def __init__(self, file: str) -> None:
        self._file, self._tokens = file, None

    def __len__(self) -> int:
        return (TOKENS - 1) // LENGTH

    def tokens(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets from a place in the file, opened once in each worker."""
        if self._tokens is None:
            self._tokens = np.asarray(np.memmap(self._file, np.uint16, mode="r"))
        window = torch.from_numpy(self._tokens[start : start + LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens(index * LENGTH)


class RandomOffsets(Sequential):
    """Rows that begin anywhere, as nanoGPT draws them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens(int(torch.randint(TOKENS - LENGTH - 1, ())))


def forever(loader: torch.utils.data.DataLoader) -> Iterator[Any]:
    """A loader's epochs, one after the other."""
    while True:
        yield from loader


def theirs(dataset: type[Sequential], file: str, workers: int) -> Iterator[Any]:
    """DataLoader's batches."""
    return forever(
        torch.utils.data.DataLoader(
            dataset(file),
            ROWS,
            shuffle=dataset is Sequential,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
    )


def saved_rows(tokens: np.ndarray, folder: str) -> bool:
    """Saves the rows as `datasets` does; False where it is not installed."""
    try:
        import datasets
        import pyarrow as pa
    except ImportError:
        return False
    rows = (TOKENS - 1) // LENGTH
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)[::LENGTH][:rows]
    ends = pa.array(np.arange(rows + 1) * (LENGTH + 1), pa.int32())
    column = pa.ListArray.from_arrays(ends, pa.array(np.ascontiguousarray(windows).reshape(-1)))
    datasets.Dataset(pa.table({"input_ids": column})).save_to_disk(folder)
    return True


def of_datasets(folder: str) -> Iterator[Any]:
    """Batches of what `datasets` saved: inputs and targets."""
    import datasets

    saved = datasets.load_from_disk(folder)
    seed = 0
    while True:
        seed += 1
        shuffled = saved.shuffle(seed=seed).with_format("numpy")
        for batch in shuffled.iter(ROWS, drop_last_batch=True):
            yield batch["input_ids"][:, :-1], batch["input_ids"][:, 1:]


def assert_equal_rows(packed: PackedText, file: str) -> None:
    """Both read the same tokens: row i of one is row i of the other."""
    peer = Sequential(file)
    for index in (0, 1, len(peer) // 2, len(peer) - 1):
        row = packed.example(index, None)
        inputs, targets = peer[index]
        np.testing.assert_array_equal(row.inputs, inputs.numpy())
        np.testing.assert_array_equal(row.targets, targets.numpy())


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "tokens.bin")
        rng.integers(0, 50257, TOKENS, np.uint16).tofile(file)
        sizes = rng.integers(50, 2000, TOKENS // 1025)
        offsets = np.append(np.cumsum(np.append(0, sizes)), TOKENS)
        offsets = np.unique(offsets[offsets <= TOKENS])
        # Plain arrays over the file on both sides: slicing a memmap is slower.
        tokens = np.asarray(np.memmap(file, np.uint16, mode="r"))

        def ours(separate: bool, threads: int | None) -> Iterator[Any]:
            packed = PackedText(tokens, offsets, LENGTH, separate)
            assert_equal_rows(packed, file)
            return batches(packed, global_batch_size=ROWS, seed=0, threads=threads)

        makers: dict[str, Callable[[], Iterator[Any]]] = {
            "jaxtrain, packed": lambda: ours(True, None),
            "jaxtrain, packed, 2 threads": lambda: ours(True, 2),
            "jaxtrain, one text": lambda: ours(False, None),
            "torch sequential, 0 workers": lambda: theirs(Sequential, file, 0),
            "torch sequential, 2 workers": lambda: theirs(Sequential, file, 2),
            "torch random offsets, 0 workers": lambda: theirs(RandomOffsets, file, 0),
            "torch random offsets, 2 workers": lambda: theirs(RandomOffsets, file, 2),
        }
        saved = str(Path(folder) / "saved")
        if saved_rows(tokens, saved):
            makers["datasets, shuffled"] = lambda: of_datasets(saved)
        found = summarised(
            side_by_side.interleave_streams(
                makers, rounds=arguments.rounds, count=arguments.batches, ahead=8
            )
        )
    names = ("loader", "batches/s", "Mtokens/s", "CPU ms", "first batch, ms", "ours packed / it")
    table = Table(*names)
    for name, row in found.items():
        times = "" if "ours_over" not in row else f"{row['ours_over']['median']:.2f}x"
        per_second, first = row["batches_per_second"], f"{1e3 * row['first_seconds']:.0f}"
        speed = f"{per_second * ROWS * LENGTH / 1e6:.1f}"
        cpu = f"{1e3 * row['cpu_seconds']:.2f}"
        table.add_row(name, f"{per_second:.0f}", speed, cpu, first, times)
    Console(width=120).print(table)
    about = side_by_side.circumstances(["jax", "grain", "numpy", "torch"])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**about, "rows": found}, indent=1))
    Console(width=120).print_json(json.dumps(about))


def summarised(streamed: dict[str, side_by_side.Streamed]) -> dict[str, Any]:
    """Medians of the rounds, and how much longer a peer's batch takes than our first stream's."""
    own, found = np.array(next(iter(streamed.values())).seconds), {}
    for name, of in streamed.items():
        found[name] = {
            "batches_per_second": 1 / float(np.median(of.seconds)),
            "first_seconds": float(np.median(of.first_seconds)),
            "cpu_seconds": float(np.median(of.cpu_seconds)),  # of this process, not of workers
        }
        if not name.startswith("jaxtrain"):
            found[name]["ours_over"] = side_by_side.spread((np.array(of.seconds) / own).tolist())
    return found


if __name__ == "__main__":
    main()
