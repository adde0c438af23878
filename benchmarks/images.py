"""Our image pipeline against torchvision's: the same JPEG files in class folders.

    python -m benchmarks.images [--rounds 3] [--batches 6] [--workers 2] [--json FILE]

Batches of 64 images of 224 x 224 on the host, for ResNet-50: a random resized crop, mirrored half
of the time, normalized. The files are drawn: smooth colors with noise, 500 x 375, JPEG quality 90,
77 kB on average (ImageNet's have 400 x 350 and 110 kB). Theirs is an `ImageFolder` with
torchvision's transforms behind torch's DataLoader, of as many workers; where torchvision is not
installed, what those do to Pillow's images is spelled out. A core's images a second are one over
the processor's time of an image, which other work on the machine changes little; of workers the
time is not this process's.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.images.transform import Augment
from jaxtrain.data.loader import batches

FILES, ROWS, SIZE = 256, 64, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def draw(folder: Path) -> int:
    """Writes the files, of two classes; the mean of their sizes in bytes."""
    rng = np.random.default_rng(0)
    sizes = []
    for number in range(FILES):
        small = rng.integers(0, 256, (12, 16, 3), np.uint8)
        image = Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC)
        noise = rng.normal(0, 12, (375, 500, 3))
        noisy = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
        path = folder / f"class{number % 2}" / f"{number:04}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy).save(path, quality=90)
        sizes.append(path.stat().st_size)
    return round(sum(sizes) / FILES)


class Spelled(torch.utils.data.Dataset):
    """What `ImageFolder` with RandomResizedCrop, flip, ToTensor and Normalize does."""

    def __init__(self, folder: str) -> None:
        self._files = sorted(Path(folder).glob("*/*.jpg"))
        self._mean = torch.tensor(MEAN).view(3, 1, 1)
        self._std = torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self._files[index % FILES]
        with path.open("rb") as file:
            image = Image.open(file).convert("RGB")
        image = image.crop(self._box(*image.size)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(self._mean).div_(self._std), int(path.parent.name[-1])

    def _box(self, width: int, height: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = width * height * torch.empty(1).uniform_(0.08, 1.0).item()
            ratio = math.exp(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3)).item())
            wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                left = int(torch.randint(0, width - wide + 1, (1,)))
                top = int(torch.randint(0, height - high + 1, (1,)))
                return left, top, left + wide, top + high
        return 0, 0, width, height


def peer(folder: str) -> tuple[str, torch.utils.data.Dataset]:
    """torchvision's data set, or what stands for it, and its name."""
    try:
        from torchvision import datasets, transforms
    except (ImportError, RuntimeError):  # RuntimeError: made for another build of torch
        return "Pillow, spelled out", Spelled(folder)
    made = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    return "torchvision", datasets.ImageFolder(folder, made)


def theirs(dataset: torch.utils.data.Dataset, workers: int) -> Iterator[Any]:
    """DataLoader's batches, epoch after epoch."""
    loader = torch.utils.data.DataLoader(
        dataset, ROWS, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in a worker of DataLoader's: more take the cores from each other
    with tempfile.TemporaryDirectory() as name:
        size = draw(Path(name))
        label, dataset = peer(name)

        def ours(workers: int, augment: Augment | None = None) -> Iterator[Any]:
            data = ImageData(
                source=name, image_size=SIZE, channels=3, num_classes=2, crop="resized", flip=True,
                mean=MEAN, std=STD, augment=augment, heldout_fraction=0.01,
            )  # fmt: skip
            examples = data.open(seed=0).train
            return batches(
                examples, global_batch_size=ROWS, seed=0, threads=0, workers=workers, prefetch=2
            )

        heavy = Augment(rand_augment=2, mixup=0.2, cutmix=1.0)
        some = arguments.workers
        makers: dict[str, Callable[[], Iterator[Any]]] = {
            "jaxtrain, in the process": lambda: ours(0),
            f"{label}, in the process": lambda: theirs(dataset, 0),
            f"jaxtrain, {some} workers": lambda: ours(some),
            f"{label}, {some} workers": lambda: theirs(dataset, some),
            "jaxtrain, RandAugment, mixup or cutmix": lambda: ours(0, heavy),
        }
        streamed = side_by_side.interleave_streams(
            makers, rounds=arguments.rounds, count=arguments.batches, ahead=3
        )
        found = {name: summarised(name, of) for name, of in streamed.items()}
    table = Table("loader", "images/s", "images/s of a core", "first batch, s")
    for name, row in found.items():
        speed, first = f"{row['speed']:.0f}", f"{row['first_seconds']:.1f}"
        of_core = f"{row['of_core']:.0f}" if "of_core" in row else ""
        table.add_row(name, speed, of_core, first)
    Console(width=120).print(table)
    about = side_by_side.circumstances(["jax", "numpy", "pillow", "torch"])
    Console(width=120).print_json(json.dumps({**about, "mean file, bytes": size}))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**about, "rows": found}, indent=1))


def summarised(name: str, of: side_by_side.Streamed) -> dict[str, float]:
    """The best of the rounds, for what else the machine does only slows down."""
    found = {"speed": ROWS / min(of.seconds), "first_seconds": min(of.first_seconds)}
    if "workers" not in name:
        found["of_core"] = ROWS / min(of.cpu_seconds)
    return found


if __name__ == "__main__":
    main()
