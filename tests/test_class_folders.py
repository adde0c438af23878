"""Image folders: classes and channels come from the folder; what is not read is reported."""

import numpy as np
import pytest
from PIL import Image

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.images.source import ImageData
from jaxtrain.training.settings import load_config

BIRDS = ("cardinal", "finch", "jay")


def draw(folder, *, count=5, colors=True, names=BIRDS):
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            if not colors:  # grey, in a file of three channels
                pixels[...] = pixels[..., :1]
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def config_of(folder, *bindings, model="LeNet"):
    return load_config(
        f"Train.model = @{model}()\nTrain.data = @ImageData()\nTrain.steps = 1\n"
        f"Train.global_batch_size = 8\nImageData.source = {str(folder)!r}\n"
        "ImageData.image_size = 28\n",
        bindings,
    )


def sizes(config):
    data, model = config.train.data, config.train.model
    return (data.num_classes, data.channels), (model.num_classes, model.channels)


@pytest.mark.parametrize("model", ["LeNet", "ResNet", "ViT"])
@pytest.mark.parametrize("colors", [True, False])
def test_classes_and_channels_are_those_of_the_folder(model, colors, tmp_path):
    draw(tmp_path, colors=colors)
    more = ["ViT.image_size = 28", "ViT.patch_size = 14"] if model == "ViT" else []
    config = config_of(tmp_path, *more, model=model)
    channels = 3 if colors else 1
    assert sizes(config) == ((3, channels), (3, channels))
    note = f"{model}.num_classes = 3: taken from the data, because not set"
    assert any(one.endswith(note) for one in config.notes)
    facts = config.train.data.open(seed=0).facts
    assert (facts["classes"], facts["class_names"]) == (3, "cardinal, finch, jay")
    # What was taken is saved: the run's own file reads no folder.
    again = load_config(config.operative().replace(str(tmp_path), "/nowhere"))
    assert sizes(again) == sizes(config)
    assert again.notes == ()


def test_what_is_set_stays(tmp_path):
    draw(tmp_path)
    assert sizes(config_of(tmp_path, "ImageData.channels = 1")) == ((3, 1), (3, 1))
    assert sizes(config_of(tmp_path, "LeNet.num_classes = 10")) == ((3, 3), (10, 3))
    config = config_of(tmp_path, "ImageData.num_classes = 10")
    with pytest.raises(UserError, match=r"has 3 classes; set ImageData.num_classes = 3"):
        config.train.data.open(seed=0)
    absent = config_of("nowhere")  # a plan for a machine that has the images
    assert sizes(absent)[0] == (10, 1)


@pytest.mark.parametrize("splits", [("train", "val"), ("images",), ("north", "south")])
def test_a_folder_one_level_too_high_is_recognized(splits, tmp_path):
    for split in splits:
        draw(tmp_path / split)
    said = f"is one level too high.*use ImageData.source = '{tmp_path / splits[0]}'"
    with pytest.raises(UserError, match=said):
        config_of(tmp_path)
    with pytest.raises(UserError, match=said):
        ImageData(source=str(tmp_path), num_classes=2).open(seed=0)


def test_classes_may_have_folders_within(tmp_path):
    for name in BIRDS:  # Tiny ImageNet's layout
        draw(tmp_path / name, names=["images"])
    found = ImageData(source=str(tmp_path), num_classes=3).open(seed=0)
    assert found.facts["class_names"] == "cardinal, finch, jay"


def test_files_that_are_not_read_and_colors_are_reported(tmp_path, capsys):
    draw(tmp_path)
    (tmp_path / "labels.csv").write_text("x")
    (tmp_path / "jay" / "6.webp").write_bytes(b"x")
    config = tmp_path / "birds.gin"
    config.write_text(
        "Train.model = @LeNet()\nTrain.data = @ImageData()\nTrain.steps = 1\n"
        f"Train.global_batch_size = 8\nImageData.source = {str(tmp_path)!r}\n"
        "ImageData.image_size = 28\n"
    )
    words = ["data", str(config), "--examples", "0"]
    assert main([*words, "-b", "ImageData.channels=1"]) == 0
    said = capsys.readouterr().out
    assert "Left out 3 files next to the 15 that are read (.csv 1, .gin 1, .webp 1)" in said
    assert "Images in color are converted to grey, because ImageData.channels = 1" in said
    assert main(words) == 0
    assert "converted" not in capsys.readouterr().out


def test_of_a_few_images_a_class_one_is_held_out(tmp_path):
    draw(tmp_path, count=4)
    facts = config_of(tmp_path).train.data.open(seed=0).facts
    assert (facts["train_images"], facts["heldout_images"]) == (9, 3)
    assert facts["heldout_rule"] == (
        "Held out the last of at most 4 images a class, because ImageData.heldout_fraction = 0.2 "
        "of them is less than one"
    )
    draw(tmp_path, count=5)
    facts = config_of(tmp_path).train.data.open(seed=0).facts
    assert facts["heldout_images"] == 3
    assert "heldout_rule" not in facts
