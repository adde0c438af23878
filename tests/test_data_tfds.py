"""TFDS sources: written as array_record by builders of our own, read back without TensorFlow."""

import io
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxtrain.__main__ import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.bad_records import BadRecordError, BadRecords
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.loader import batches
from jaxtrain.data.text.source import TextData
from jaxtrain.run.metrics.files import lines_of

FIXTURES = Path(__file__).parent / "fixtures_tfds"

# In a process of its own, so that this one knows the data sets by their files alone, as users do.
PREPARE = """
import importlib, sys
fixtures, data_dir, *names = sys.argv[1:]
sys.path.insert(0, fixtures)
for name in names:
    builder = importlib.import_module(f"{name}.{name}_dataset_builder").Builder
    builder(data_dir=data_dir, file_format="array_record").download_and_prepare()
"""

NAMES = ("tiny_text", "tiny_images", "cifar10")

TEXTS = {
    split: [f"{split} record {n}: grün und schön\n" * (n + 1) for n in range(count)]
    for split, count in (("train", 12), ("validation", 3))
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("tfds"))
    subprocess.run(
        [sys.executable, "-c", PREPARE, str(FIXTURES), folder, *NAMES],
        check=True,
        capture_output=True,
    )
    return folder


def documents(packed):
    return bytes(packed.tokens).decode("utf-8").split("\0")[:-1]


def text(data_dir, **settings):
    settings = {"source": "tfds:tiny_text", "sequence_length": 16} | settings
    return TextData(data_dir=data_dir, **settings)


def images(data_dir, **settings):
    settings = {"image_size": 4, "channels": 3, "num_classes": 2} | settings
    return ImageData(source="tfds:tiny_images", data_dir=data_dir, **settings)


def test_each_text_record_is_a_document(data_dir):
    opened = text(data_dir, heldout_split="validation").open(seed=0)
    assert documents(opened.train) == TEXTS["train"]
    assert documents(opened.heldout) == TEXTS["validation"]
    assert opened.facts["documents"] == 15


def test_without_a_held_out_split_some_records_are_held_out(data_dir):
    opened = text(data_dir, heldout_fraction=0.25).open(seed=0)
    assert documents(opened.heldout) == TEXTS["train"][3::4]
    assert documents(opened.train) + documents(opened.heldout) != TEXTS["train"]
    assert sorted(documents(opened.train) + documents(opened.heldout)) == sorted(TEXTS["train"])


def test_another_text_feature_and_version(data_dir):
    data = text(
        data_dir, source="tfds:tiny_text:1.0.0", text_feature="title", heldout_split="validation"
    )
    assert documents(data.open(seed=0).heldout) == [f"validation title {n}" for n in range(3)]


def test_images_are_decoded_without_tensorflow(data_dir):
    plain = {"mean": (0.0,), "std": (1.0,)}
    opened = images(data_dir, heldout_split="test", **plain).open(seed=0)
    assert (len(opened.train), len(opened.heldout)) == (10, 4)
    assert opened.facts["class_names"] == "ant, bee"
    for number in range(10):
        example = opened.train.example(number, None)
        color = example.inputs * 255
        expected = np.broadcast_to([number, 10 * number, 255 - number], (4, 4, 3))
        np.testing.assert_allclose(color, expected, atol=1e-4)
        assert example.targets == number % 2
    assert "tensorflow" not in sys.modules


def test_images_without_a_held_out_split_are_split_by_class(data_dir):
    opened = images(data_dir, heldout_fraction=0.2).open(seed=0)
    assert opened.heldout.images.labels().tolist() == [0, 1]
    assert len(opened.train) == 8
    assert opened.digest != images(data_dir, heldout_fraction=0.4).open(seed=0).digest
    assert opened.digest == images(data_dir, heldout_fraction=0.2).open(seed=1).digest


# Trains and starts again; the files are read by the tests above.
@pytest.mark.slow
def test_cifar10_goes_from_its_files_to_a_confusion_matrix(data_dir, tmp_path, capsys):
    """The shipped config, on images of the form of CIFAR-10's; a second start trains nothing."""
    command = ["train", "lenet_cifar10", "--workdir", str(tmp_path)]
    for binding in (
        f"ImageData.data_dir = '{data_dir}'", "Train.steps = 20", "Train.eval_every = 0",
        "Train.global_batch_size = 64", "Schedule.warmup_steps = 5",
    ):  # fmt: skip
        command += ["-b", binding]
    assert main(command) == 0
    assert "train_images 320, heldout_images 80" in capsys.readouterr().out
    trained = lines_of(tmp_path)[-1]
    assert trained["eval_accuracy"] > 0.9  # of ten colors
    truth = np.sum(trained["eval_confusion"], axis=1)
    assert truth.tolist() == [8] * 10
    assert np.trace(trained["eval_confusion"]) == 80 * trained["eval_accuracy"]
    with Image.open(tmp_path / "confusion.png") as picture:
        assert min(picture.size) > 300
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"Loaded model parameters from disk: {tmp_path} is trained to step 20 already" in out
    assert "step 1/20" not in out
    assert lines_of(tmp_path)[-1]["eval_confusion"] == trained["eval_confusion"]


# -- damage ---------------------------------------------------------------------------------------


def flipped(data_dir, folder, name, content):
    """A copy of a data set's training records with one bit changed inside `content`."""
    shutil.copytree(Path(data_dir) / name, folder / name)
    (file,) = (folder / name).glob("*/*-train.array_record*")
    stored = bytearray(file.read_bytes())
    assert stored.count(content) == 1
    stored[stored.index(content) + len(content) // 2] ^= 1
    file.write_bytes(stored)
    return str(folder)


@pytest.fixture(scope="module")
def damaged_images(data_dir, tmp_path_factory):
    """The images with a bit of number 3 changed."""
    png = io.BytesIO()
    Image.new("RGB", (5, 4), (3, 30, 252)).save(png, "PNG")
    return flipped(data_dir, tmp_path_factory.mktemp("damaged"), "tiny_images", png.getvalue())


def test_a_record_with_a_changed_bit_is_left_out(damaged_images):
    opened = images(damaged_images, heldout_split="test").open(seed=0)
    bad = BadRecords(1)
    stream = batches(opened.train, global_batch_size=10, seed=0, bad_records=bad)
    for batch in itertools.islice(stream, 3):
        assert batch.loss_mask.sum() == 9
        (row,) = np.flatnonzero(batch.loss_mask == 0)
        np.testing.assert_array_equal(batch.inputs[row], opened.train.example(4, None).inputs)
    stream.close()
    (record,) = bad.found
    assert (record.split, record.index) == ("training", 3)
    assert "hash mismatch" in record.cause
    stream = batches(opened.train, global_batch_size=10, seed=0)
    with pytest.raises(BadRecordError, match="training example 3 cannot be read .*hash mismatch"):
        next(stream)


def test_what_is_read_before_training_names_the_damaged_record(data_dir, damaged_images, tmp_path):
    message = refusal(images(damaged_images, heldout_fraction=0.2))
    assert "tiny_images/1.0.0 train 10 records" in message
    assert "record 3 cannot be read" in message
    folder = flipped(data_dir, tmp_path, "tiny_text", b"train record 0")
    message = refusal(text(folder, heldout_split="validation"))
    assert message.startswith(
        "TextData.train_split = 'train' of tiny_text/1.0.0: record 0 cannot be read (Corrupted"
    )
    assert message.endswith("prepare the data set again")


# -- rejections


def refusal(data):
    with pytest.raises(UserError) as caught:
        data.open(seed=0)
    return str(caught.value)


def test_a_data_set_that_is_not_prepared_is_refused_with_the_command(data_dir):
    message = refusal(text(data_dir, source="tfds:lm1b"))
    assert f"TextData.source = 'tfds:lm1b' is not prepared in data_dir ({data_dir!r})" in message
    command = f"tfds.builder('lm1b', data_dir={data_dir!r}, file_format='array_record')"
    assert command + ".download_and_prepare()" in message
    message = refusal(ImageData(source="tfds:mnist", data_dir=data_dir))
    assert "ImageData.source = 'tfds:mnist' is not prepared" in message


def test_an_unknown_data_set_is_refused_with_the_nearest(data_dir):
    message = refusal(text(data_dir, source="tfds:tiny_txt"))
    assert "neither tensorflow-datasets nor data_dir" in message
    assert message.endswith("did you mean 'tfds:tiny_text'?")
    assert refusal(text(None, source="tfds:imagnet2012")).endswith("'tfds:imagenet2012'?")
    assert "cannot be loaded at version 9.9.9" in refusal(text(data_dir, source="tfds:mnist:9.9.9"))


def test_another_format_is_refused(data_dir, tmp_path):
    copy = tmp_path / "tiny_text"
    source = Path(data_dir) / "tiny_text" / "1.0.0"
    (copy / "1.0.0").mkdir(parents=True)
    for file in source.iterdir():
        (copy / "1.0.0" / file.name).write_bytes(file.read_bytes())
    info = copy / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    message = refusal(text(str(tmp_path)))
    assert "is prepared as tfrecord, which random access without TensorFlow cannot read" in message


def test_unknown_splits_and_features_are_refused(data_dir):
    message = refusal(text(data_dir, heldout_split="valid"))
    assert "TextData.heldout_split = 'valid': tiny_text/1.0.0 has no such split" in message
    assert message.endswith("did you mean 'validation'?")
    assert "TextData.train_split = 'trian'" in refusal(text(data_dir, train_split="trian"))
    message = refusal(text(data_dir, text_feature="txt"))
    assert "TextData.text_feature = 'txt': tiny_text/1.0.0 has no Text feature" in message
    assert "did you mean 'text'?" in message
    message = refusal(images(data_dir, image_feature="label"))
    assert "ImageData.image_feature = 'label': tiny_images/1.0.0 has no Image feature" in message
    assert "ImageData.label_feature = 'lable'" in refusal(images(data_dir, label_feature="lable"))
    assert "has 2 classes; set ImageData.num_classes = 2" in refusal(
        images(data_dir, num_classes=5)
    )
