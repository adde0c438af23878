"""A few images in the form of TFDS's `cifar10`, each of its class's color with noise on it."""

import colorsys
import io

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SPLITS = {"train": 320, "test": 80}


class Builder(tfds.core.GeneratorBasedBuilder):
    """`tfds:cifar10`, of the version that TFDS has."""

    VERSION = tfds.core.Version("3.0.2")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=CLASSES),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        del dl_manager
        return {split: self._generate_examples(split, count) for split, count in SPLITS.items()}

    def _generate_examples(self, split, count):
        rng = np.random.default_rng(len(split))
        for number in range(count):
            label = number % len(CLASSES)
            color = 255 * np.array(colorsys.hsv_to_rgb(label / len(CLASSES), 0.7, 0.7))
            pixels = np.clip(rng.normal(color, 60, (32, 32, 3)), 0, 255).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            file.seek(0)
            name = f"{split}_{number:05d}"
            yield name, {"id": name, "image": file, "label": label}
