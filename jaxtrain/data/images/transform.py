"""Image transforms: decode, resize, crop, flip, augment, normalize to float32 pixels."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable

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


# -- augmentation of training images besides cropping and flipping ---------------------------------
# Color jitter, RandAugment, mixup and CutMix are as torchvision defines them: of the former by
# Pillow's own operations, of mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et al., arXiv
# 1905.04899) by their formulas.

BINS = 31  # strengths of an operation, from 0 to 30
_AFFINE, _NEAREST = Image.Transform.AFFINE, Image.Resampling.NEAREST

Operation = Callable[[Image.Image, float], Image.Image]


def brightness(image: Image.Image, factor: float) -> Image.Image:
    """Scale the brightness: from black (0) to twice as bright (2)."""
    return ImageEnhance.Brightness(image).enhance(factor)


def contrast(image: Image.Image, factor: float) -> Image.Image:
    """Scale the contrast: from the mean gray (0) to twice as far from it (2)."""
    return ImageEnhance.Contrast(image).enhance(factor)


def saturation(image: Image.Image, factor: float) -> Image.Image:
    """Scale the saturation: from gray (0) to twice as colorful (2)."""
    return ImageEnhance.Color(image).enhance(factor)


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    """Scale the sharpness: from smoothed (0) to twice as sharp (2)."""
    return ImageEnhance.Sharpness(image).enhance(factor)


def hue(image: Image.Image, turn: float) -> Image.Image:
    """Rotate the hues by -0.5 to 0.5 of the color circle; grayscale images stay unchanged."""
    if image.mode == "L":
        return image
    hues, saturations, values = image.convert("HSV").split()
    turned = (np.asarray(hues).astype(np.int16) + int(turn * 255)).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), saturations, values)).convert("RGB")


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, _AFFINE, matrix, _NEAREST)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Operation of RandAugment.

    Attributes:
      run: the operation.
      strengths: its first and its last strength; fractions of the image's size where it depends on
        that.
      signed: whether the strength may be negative.
    """

    run: Operation
    strengths: tuple[float, float] = (0.0, 0.0)
    signed: bool = False


def _shift(image: Image.Image, across: float, down: float) -> Image.Image:
    wide, high = image.size
    return _affine(image, 1, 0, -int(across * wide), 0, 1, -int(down * high))


# Cubuk et al. 2019 (arXiv 1909.13719), in torchvision's order and ranges.
RAND_AUGMENT: dict[str, _Row] = {
    "identity": _Row(lambda image, _: image),
    "shear_x": _Row(lambda image, v: _affine(image, 1, v, 0, 0, 1, 0), (0, 0.3), True),
    "shear_y": _Row(lambda image, v: _affine(image, 1, 0, 0, v, 1, 0), (0, 0.3), True),
    "translate_x": _Row(lambda image, v: _shift(image, v, 0), (0, 150 / 331), True),
    "translate_y": _Row(lambda image, v: _shift(image, 0, v), (0, 150 / 331), True),
    "rotate": _Row(lambda image, v: image.rotate(v, _NEAREST), (0, 30), True),
    "brightness": _Row(lambda image, v: brightness(image, 1 + v), (0, 0.9), True),
    "color": _Row(lambda image, v: saturation(image, 1 + v), (0, 0.9), True),
    "contrast": _Row(lambda image, v: contrast(image, 1 + v), (0, 0.9), True),
    "sharpness": _Row(lambda image, v: sharpness(image, 1 + v), (0, 0.9), True),
    "posterize": _Row(lambda image, v: ImageOps.posterize(image, round(v)), (8, 4)),
    "solarize": _Row(lambda image, v: ImageOps.solarize(image, math.ceil(v)), (255, 0)),
    "auto_contrast": _Row(lambda image, _: ImageOps.autocontrast(image)),
    "equalize": _Row(lambda image, _: ImageOps.equalize(image)),
}


def rand_augment(
    image: Image.Image, count: int, magnitude: int, rng: np.random.Generator
) -> Image.Image:
    """Apply `count` operations of RandAugment, drawn from the table, at one strength."""
    rows = list(RAND_AUGMENT.values())
    for number in rng.integers(len(rows), size=count).tolist():
        row = rows[number]
        least, most = row.strengths
        strength = least + (most - least) * magnitude / (BINS - 1)
        back = row.signed and rng.random() < 0.5
        image = row.run(image, -strength if back else strength)
    return image


def mixup(
    own: np.ndarray, other: np.ndarray, alpha: float, rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Return share * own + (1 - share) * other, with the share from Beta(alpha, alpha), and the
    share.
    """
    share = float(rng.beta(alpha, alpha))
    return (own * np.float32(share) + other * np.float32(1 - share)), share


def cut_box(height: int, width: int, share: float, rng: np.random.Generator) -> tuple[slice, slice]:
    """Draw the rows and columns of a box with 1 - share of the image's area, clipped to
    the image.
    """
    middle_x, middle_y = int(rng.integers(width)), int(rng.integers(height))
    half = 0.5 * math.sqrt(1 - share)
    wide, high = int(half * width), int(half * height)
    rows = slice(max(0, middle_y - high), min(height, middle_y + high))
    return rows, slice(max(0, middle_x - wide), min(width, middle_x + wide))


def cutmix(
    own: np.ndarray, other: np.ndarray, alpha: float, rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Paste a box of the other image into its own [H, W, C]; also return the share that
    is its own.
    """
    height, width, _ = own.shape
    rows, columns = cut_box(height, width, float(rng.beta(alpha, alpha)), rng)
    mixed = own.copy()
    mixed[rows, columns] = other[rows, columns]
    cut = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, 1 - cut / (height * width)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of training images, drawn from the run's seed and the position in the stream.

    Each is as torchvision's of that name. Colors and RandAugment come after cropping and flipping;
    mixup and cutmix then mix each row of a batch with its neighbor.

    Attributes:
      flip_vertical: whether to flip half of the images upside down.
      brightness: largest change of the brightness: a factor from 1 - brightness to 1 + brightness.
      contrast: largest change of the distance to the mean gray, as a factor likewise.
      saturation: largest change of the distance to gray, as a factor likewise.
      hue: largest rotation of hues in either direction, as a fraction of the color circle, at most
        0.5.
      rand_augment: how many operations of RandAugment (arXiv 1909.13719); 0: none.
      magnitude: strength of RandAugment's operations, 0 to 30.
      mixup: alpha of the Beta distribution of the shares in which two images are blended (arXiv
        1710.09412); 0: none.
      cutmix: alpha of the Beta distribution of the area of a box that is pasted from the other
        image (arXiv 1905.04899); 0: none. With mixup each row has the one or the other.
    """

    flip_vertical: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    rand_augment: int = 0
    magnitude: int = 9
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        at_least_0 = "brightness", "contrast", "saturation", "rand_augment", "mixup", "cutmix"
        require_at_least(0, self, *at_least_0)
        if not 0 <= self.hue <= 0.5:
            raise UserError(
                f"Augment.hue = {self.hue}: use 0 to 0.5, a fraction of the color circle"
            )
        if not 0 <= self.magnitude < BINS:
            raise UserError(f"Augment.magnitude = {self.magnitude}: use 0 to {BINS - 1}")

    @property
    def mixes(self) -> bool:
        """Whether rows are mixed with their neighbors."""
        return self.mixup > 0 or self.cutmix > 0

    def pixels(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Apply color operations and RandAugment to an image, uint8 [H, W, C]."""
        if self.flip_vertical and rng.random() < 0.5:
            pixels = pixels[::-1]
        changes = self._colors(rng)
        if not (changes or self.rand_augment):
            return pixels
        image = from_array(np.ascontiguousarray(pixels))
        for change, strength in changes:
            image = change(image, strength)
        if self.rand_augment:
            image = rand_augment(image, self.rand_augment, self.magnitude, rng)
        return to_array(image)

    def _colors(self, rng: np.random.Generator) -> list[tuple[Operation, float]]:
        """Draw the color operations and their strengths, in random order."""
        found: list[tuple[Operation, float]] = []
        factors = (
            (brightness, self.brightness),
            (contrast, self.contrast),
            (saturation, self.saturation),
        )
        for change, most in factors:
            if most:
                found.append((change, float(rng.uniform(max(0.0, 1 - most), 1 + most))))
        if self.hue:
            found.append((hue, float(rng.uniform(-self.hue, self.hue))))
        return [found[index] for index in rng.permutation(len(found))]

    def mix(
        self, own: np.ndarray, other: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, float]:
        """Mix two images, float32 [H, W, C]; also return the share of the first."""
        ways: list[tuple[Callable[..., tuple[np.ndarray, float]], float]] = [
            (way, alpha) for way, alpha in ((mixup, self.mixup), (cutmix, self.cutmix)) if alpha
        ]
        way, alpha = ways[int(rng.integers(len(ways)))]
        return way(own, other, alpha, rng)
