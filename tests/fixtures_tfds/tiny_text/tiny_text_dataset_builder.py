"""Texts whose content says where they belong; written without TensorFlow."""

import tensorflow_datasets as tfds


def texts(split: str, count: int) -> list[str]:
    """The records of a split."""
    return [f"{split} record {number}: grün und schön\n" * (number + 1) for number in range(count)]


SPLITS = {"train": 12, "validation": 3}


class Builder(tfds.core.GeneratorBasedBuilder):
    """`tfds:tiny_text`."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"text": tfds.features.Text(), "title": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split):
        for number, text in enumerate(texts(split, SPLITS[split])):
            yield number, {"text": text, "title": f"{split} title {number}"}
