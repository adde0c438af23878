"""Images of one color that says their number; written as PNG bytes, without TensorFlow."""

import io

import tensorflow_datasets as tfds
from PIL import Image

CLASSES = ["ant", "bee"]
SPLITS = {"train": 10, "test": 4}


def color(number: int) -> tuple[int, int, int]:
    """The color of image `number`."""
    return (number, 10 * number, 255 - number)


class Builder(tfds.core.GeneratorBasedBuilder):
    """`tfds:tiny_images`."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=CLASSES),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        return {split: self._generate_examples(count) for split, count in SPLITS.items()}

    def _generate_examples(self, count):
        for number in range(count):
            file = io.BytesIO()
            Image.new("RGB", (5, 4), color(number)).save(file, "PNG")
            file.seek(0)
            yield number, {"image": file, "label": number % len(CLASSES)}
