"""`Augment`: augmentation of training images besides cropping and flipping."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxtrain.config.errors import UserError, require_at_least
from jaxtrain.config.reader import configurable
from jaxtrain.data.images import operations
from jaxtrain.data.images.transform import from_array, to_array


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of training images, drawn for each place of the stream from the run's seed.

    Each is as torchvision's of that name. Colors and RandAugment come after cropping and flipping;
    mixup and cutmix then mix each row of a batch with its neighbour.

    Attributes:
      flip_vertical: turn half of them upside down.
      brightness: up to how much brighter or darker, as a factor from 1 - x to 1 + x.
      contrast: the same of the distance to the mean grey.
      saturation: the same of the distance to grey.
      hue: up to which part of the color circle hues are turned either way, at most 0.5.
      rand_augment: how many operations of RandAugment (arXiv 1909.13719); 0: none.
      magnitude: their strength, 0 to 30.
      mixup: alpha of the Beta distribution of the shares in which two images are blended (arXiv
        1710.09412); 0: none.
      cutmix: alpha of that by which a box is cut out of the one and filled by the other (arXiv
        1905.04899); 0: none. Beside mixup each row has the one or the other.
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
                f"Augment.hue = {self.hue}: a turn either way, from 0 to 0.5 of the circle"
            )
        if not 0 <= self.magnitude < operations.BINS:
            raise UserError(
                f"Augment.magnitude = {self.magnitude}: it is 0 to {operations.BINS - 1}"
            )

    @property
    def mixes(self) -> bool:
        """Whether rows are mixed with their neighbours."""
        return self.mixup > 0 or self.cutmix > 0

    def pixels(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An image uint8 [H, W, C], with other colors and operations of RandAugment."""
        if self.flip_vertical and rng.random() < 0.5:
            pixels = pixels[::-1]
        changes = self._colors(rng)
        if not (changes or self.rand_augment):
            return pixels
        image = from_array(np.ascontiguousarray(pixels))
        for change, strength in changes:
            image = change(image, strength)
        if self.rand_augment:
            image = operations.rand_augment(image, self.rand_augment, self.magnitude, rng)
        return to_array(image)

    def _colors(self, rng: np.random.Generator) -> list[tuple[operations.Operation, float]]:
        """What is done to colors and how much of it, in an order that is drawn too."""
        found: list[tuple[operations.Operation, float]] = []
        factors = (
            (operations.brightness, self.brightness),
            (operations.contrast, self.contrast),
            (operations.saturation, self.saturation),
        )
        for change, most in factors:
            if most:
                found.append((change, float(rng.uniform(max(0.0, 1 - most), 1 + most))))
        if self.hue:
            found.append((operations.hue, float(rng.uniform(-self.hue, self.hue))))
        return [found[place] for place in rng.permutation(len(found))]

    def mix(
        self, own: np.ndarray, other: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, float]:
        """Two images float32 [H, W, C] as one, and the share of it that is the first."""
        ways: list[tuple[Callable[..., tuple[np.ndarray, float]], float]] = [
            (way, alpha)
            for way, alpha in ((operations.mixup, self.mixup), (operations.cutmix, self.cutmix))
            if alpha
        ]
        way, alpha = ways[int(rng.integers(len(ways)))]
        return way(own, other, alpha, rng)
