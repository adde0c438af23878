"""What a trained classifier says of images: the likeliest classes, by name."""

import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from jaxtrain.config.buckets import BucketPath, Place
from jaxtrain.config.errors import UserError
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.images.stores import IMAGE_SUFFIXES, decode
from jaxtrain.data.source import existing_path, walk_files
from jaxtrain.models.model import Model, reads_images

AT_ONCE = 64  # images that go through the model together

Given = str | Path | Image.Image


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is said of one image.

    Attributes:
      name: the file, or "image 1" of one in memory.
      classes: the likeliest classes and their probabilities, likeliest first.
    """

    name: str
    classes: tuple[tuple[str, float], ...]

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.classes[0][0]

    def __str__(self) -> str:
        told = ", ".join(f"{name} ({probability:.1%})" for name, probability in self.classes)
        return f"{self.name}: {told}"


def predict(
    inputs: Sequence[Given] | Given,
    model: Model,
    data: object,
    logits: Callable[[np.ndarray], np.ndarray],
    *,
    top: int,
    say: Callable[[str], object],
) -> Iterator[Prediction]:
    """A prediction for each image, prepared as in evaluation.

    Args:
      inputs: PNG or JPEG files, folders of them at any depth, or images of Pillow's.
      model: the model's settings.
      data: what the model was trained on: the preparation, and the names of the classes.
      logits: of float32 images [B, H, W, C].
      top: classes that are named, or all where there are fewer.
      say: is told where the names of the classes are not known.

    Raises:
      UserError: the model does not tell classes of images; a file is missing or no image.
    """
    if not reads_images(model) or not isinstance(data, ImageData):
        name = type(model).__name__
        raise UserError(
            f"predict names classes of images, and {name} reads {model.inputs}; of text 'jaxtrain "
            "generate' writes the continuation, and Trainer.logits takes tokens and vectors"
        )
    if top < 1:
        raise UserError(f"--top {top}: name at least 1 class")
    given = [inputs] if isinstance(inputs, Given) else inputs
    # All are looked for before the first goes through the model.
    images = [one for source in given for one in _images(source)]
    if not images:
        raise UserError("predict: there is no image; name PNG or JPEG files, or folders of them")
    try:
        names = data.class_names()
    except UserError as error:
        names = [str(number) for number in range(model.num_classes)]
        say(f"Classes are told by number, since the data cannot be opened: {error}")
    for begin in range(0, len(images), AT_ONCE):
        part = images[begin : begin + AT_ONCE]
        prepared = [data.prepared(_read(image), None) for image in part]
        # The last ones are filled up: one program serves all.
        missing = 0 if begin == 0 else AT_ONCE - len(part)
        found = logits(np.stack(prepared + prepared[-1:] * missing))
        for number, (image, row) in enumerate(zip(part, found, strict=False), start=begin + 1):
            likely = np.exp(row - row.max())
            likely /= likely.sum()
            order = np.argsort(-likely, kind="stable")[:top]
            name = f"image {number}" if isinstance(image, Image.Image) else str(image)
            yield Prediction(name, tuple((names[label], float(likely[label])) for label in order))


def _images(source: Given) -> Iterator[Place | Image.Image]:
    """The images of an input, none of them read yet."""
    if isinstance(source, Image.Image):
        yield source
        return
    path = existing_path("predict INPUT", str(source))
    if not path.is_dir():
        yield path
        return
    files = [file for file, *_ in walk_files(path, "predict INPUT")]
    found = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise UserError(f"predict INPUT = {str(path)!r}: there is no PNG or JPEG file in it")
    yield from found


def _read(image: Place | Image.Image) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    file = io.BytesIO(image.read_bytes()) if isinstance(image, BucketPath) else image
    return decode(file, "predict INPUT", str(image))
