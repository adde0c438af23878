"""Image transforms: decode, resize, crop, flip, normalize to float32 pixels."""

import math
from typing import Literal

import numpy as np
from PIL import Image

# The ranges of Szegedy et al. 2015 (arXiv:1409.4842), as torchvision's RandomResizedCrop has them.
CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10

# Evaluation after resized crops: the middle 224 of a shorter side of 256 (He et al. 2015).
EVALUATION_ZOOM = 256 / 224

_MODES = {1: "L", 3: "RGB"}

Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]


def convert(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image to 1 (gray) or 3 (RGB) channels of 8 bits; transparency is dropped."""
    mode = _MODES[channels]
    if image.mode.startswith("I"):
        # 16-bit gray: Pillow would clip all values over 255 to white.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


def to_array(image: Image.Image) -> np.ndarray:
    """Return the pixels as uint8 [H, W, C]."""
    pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def from_array(pixels: np.ndarray) -> Image.Image:
    """Return the Pillow image of uint8 [H, W, C] with 1 or 3 channels."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def center_crop(
    image: Image.Image, size: int, *, zoom: float = 1.0, resample: Filter = "bilinear"
) -> Image.Image:
    """Crop the middle size x size after resizing the shorter side to size * zoom pixels."""
    width, height = image.size
    shorter = min(width, height)
    side = shorter / zoom
    # One resize with a box does both: the crop in source pixels, scaled to size.
    left, top = (width - side) / 2, (height - side) / 2
    if side == size and left.is_integer() and top.is_integer():
        return image.crop((int(left), int(top), int(left) + size, int(top) + size))
    box = (left, top, left + side, top + side)
    return image.resize((size, size), _filter(resample), box=box)


def resize_and_crop(
    image: Image.Image, size: int, *, to: int, stretch: bool, resample: Filter
) -> Image.Image:
    """Resize an image, and crop its middle size x size in whole pixels, as transformers does.

    Args:
      image: of any size.
      size: of both sides of what is returned.
      to: size after resizing, at least `size`.
      stretch: resize both sides to it, whatever the shape; else the shorter one.
      resample: Pillow's filter.
    """
    width, height = image.size
    short = min(width, height)
    wide, high = (to, to) if stretch else (to * width // short, to * height // short)
    left, top = (wide - size) // 2, (high - size) // 2
    resized = image.resize((wide, high), _filter(resample))
    return resized.crop((left, top, left + size, top + size))


def _filter(name: Filter) -> Image.Resampling:
    return Image.Resampling[name.upper()]


def crop_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw a box (left, top, right, bottom) of 8-100% of the area and aspect ratio 3:4 to 4:3.

    After ten that do not fit: the middle of the image, its aspect ratio clipped to that range.
    """
    for _ in range(CROP_ATTEMPTS):
        area = width * height * rng.uniform(*CROP_AREA)
        aspect = math.exp(rng.uniform(math.log(CROP_ASPECT[0]), math.log(CROP_ASPECT[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left = int(rng.integers(width - wide + 1))
            top = int(rng.integers(height - high + 1))
            return left, top, left + wide, top + high
    wide = min(width, max(1, round(height * CROP_ASPECT[1])))
    high = min(height, max(1, round(width / CROP_ASPECT[0])))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def random_resized_crop(
    image: Image.Image, size: int, rng: np.random.Generator, *, resample: Filter = "bilinear"
) -> Image.Image:
    """Crop a random box of the image and resize it to size x size."""
    box = crop_box(*image.size, rng)
    return image.resize((size, size), _filter(resample), box=box)


def pad_and_crop(pixels: np.ndarray, padding: int, rng: np.random.Generator) -> np.ndarray:
    """Shift an image [H, W, C] by up to `padding` pixels each way, filled with black (He et al.
    2015).
    """
    height, width, _ = pixels.shape
    padded = np.pad(pixels, ((padding, padding), (padding, padding), (0, 0)))
    top, left = rng.integers(2 * padding + 1, size=2)
    return padded[top : top + height, left : left + width]


def flip(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mirror an image [H, W, C] left to right with probability 1/2."""
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def normalize(
    pixels: np.ndarray,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    *,
    factor: float = 1 / 255,
) -> np.ndarray:
    """Return float32 (factor pixels - mean) / std of uint8 [H, W, C]; mean and std of 1 or C
    values.
    """
    scale = 1.0 / (1.0 / factor * np.asarray(std))
    shift = np.asarray(mean) / np.asarray(std)
    return pixels * scale.astype(np.float32) - shift.astype(np.float32)
