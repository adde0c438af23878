"""Image folders with one subfolder per class (ImageFolder): classes, files, implied settings."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from jaxtrain.config.buckets import AnyPath, BucketPath
from jaxtrain.config.errors import UserError
from jaxtrain.data.bad_records import ending_of
from jaxtrain.data.images.stores import IMAGE_SUFFIXES, FileImages
from jaxtrain.data.images.transform import convert
from jaxtrain.data.source import walk_files

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
