"""Augment: torchvision's operations, mixed rows and their loss, all drawn from seed and place."""

import dataclasses
import importlib
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.images import transform
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.images.transform import Augment
from jaxtrain.data.loader import batches, heldout_batches
from jaxtrain.run.show.examples import data_picture, show_examples
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.objectives.classification import Classification
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.settings import load_config

EVERYTHING = Augment(
    flip_vertical=True, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, rand_augment=2,
    mixup=0.2, cutmix=1.0,
)  # fmt: skip


def picture(seed=0, height=23, width=31):
    """uint8 [H, W, 3], smooth with some noise, of all values."""
    rows, columns = np.mgrid[:height, :width]
    noise = np.random.default_rng(seed).integers(0, 60, (height, width, 3))
    smooth = np.stack([8 * rows, 6 * columns, 4 * (rows + columns)], -1)
    return ((smooth + noise) % 256).astype(np.uint8)


# -- operations -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchvision():
    """The installed torchvision, for its image transforms (pure Python and PIL).

    It is installed in a folder of its own (Makefile, `peers`) and imported for this file alone:
    its compiled operators want the very PyTorch build that its wheel was compiled for, and
    transformers imports any torchvision that it finds. `nms` and `qnms`, which torchvision looks
    up as it is imported, are declared without a kernel where this build lacks them.
    """
    sys.path.append(str(Path(sys.prefix) / "peers"))
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            operators.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    try:
        pytest.importorskip("torchvision.transforms.v2")
        yield importlib.import_module("torchvision")
    finally:
        sys.path.pop()
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


@pytest.mark.parametrize("name", transform.RAND_AUGMENT)
def test_rand_augment_has_torchvisions_operations_and_strengths(torchvision, name):
    auto = torchvision.transforms.autoaugment
    peer = "".join(part.capitalize() for part in name.split("_"))
    image = Image.fromarray(picture())
    magnitudes, signed = auto.RandAugment()._augmentation_space(31, (23, 31))[peer]
    row = transform.RAND_AUGMENT[name]
    assert row.signed == signed
    scale = {"translate_x": 31, "translate_y": 23}.get(name, 1)  # ours are shares of the image
    for magnitude in range(transform.BINS):
        theirs = float(magnitudes[magnitude]) if magnitudes.ndim else 0.0
        least, most = row.strengths
        ours = (least + (most - least) * magnitude / 30) * scale
        assert (round(ours) if name == "posterize" else ours) == pytest.approx(theirs, abs=1e-4)
        for sign in (1, -1) if signed else (1,):
            expected = auto._apply_op(
                image, peer, sign * theirs, auto.InterpolationMode.NEAREST, None
            )
            np.testing.assert_array_equal(row.run(image, sign * theirs / scale), expected)


def test_colors_are_torchvisions(torchvision):
    functional = torchvision.transforms.functional
    image = Image.fromarray(picture())
    for strength in (0.0, 0.35, 1.0, 1.8):
        for ours, theirs in (
            (transform.brightness, functional.adjust_brightness),
            (transform.contrast, functional.adjust_contrast),
            (transform.saturation, functional.adjust_saturation),
        ):
            np.testing.assert_array_equal(ours(image, strength), theirs(image, strength))
    for turn in (-0.5, -0.13, 0.0, 0.2, 0.5):
        expected = functional.adjust_hue(image, turn)
        np.testing.assert_array_equal(transform.hue(image, turn), expected)


def test_mixed_images_are_torchvisions(torchvision):
    v2 = torchvision.transforms.v2
    images = np.random.default_rng(0).random((2, 8, 6, 3), np.float32)
    tensor = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    labels = torch.tensor([1, 0])

    own, share = transform.mixup(images[0], images[1], 0.4, np.random.default_rng(1))
    params = {"lam": share, "labels": labels, "batch_size": 2}
    expected = v2.MixUp(num_classes=2).transform(tensor.clone(), params)[0].permute(1, 2, 0)
    np.testing.assert_allclose(own, expected, rtol=1e-6)

    seed = np.random.default_rng(1)
    rows, columns = transform.cut_box(8, 6, float(seed.beta(0.4, 0.4)), seed)
    own, share = transform.cutmix(images[0], images[1], 0.4, np.random.default_rng(1))
    params = {
        "box": (columns.start, rows.start, columns.stop, rows.stop),
        "lam_adjusted": share, "labels": labels, "batch_size": 2,
    }  # fmt: skip
    expected = v2.CutMix(num_classes=2).transform(tensor.clone(), params)[0].permute(1, 2, 0)
    np.testing.assert_array_equal(own, expected)


def near(found, expected):
    """Within one level of 255: Pillow cuts where it rounds."""
    np.testing.assert_allclose(np.asarray(found, float), np.clip(expected, 0, 255), atol=1.01)


def test_operations_are_their_formulas():
    pixels = picture()
    image, x = Image.fromarray(pixels), pixels.astype(float)
    grey = x @ (0.299, 0.587, 0.114)  # ITU-R 601
    near(transform.brightness(image, 1.4), 1.4 * x)
    near(transform.contrast(image, 0.6), 0.6 * x + 0.4 * round(grey.mean()))
    near(transform.saturation(image, 1.5), 1.5 * x - 0.5 * np.floor(grey)[..., None])
    run = {name: row.run for name, row in transform.RAND_AUGMENT.items()}
    assert np.array_equal(run["identity"](image, 0), pixels)
    assert np.array_equal(run["posterize"](image, 5), pixels & 0b11111000)
    solarized = np.where(pixels < 200, pixels, 255 - pixels)
    assert np.array_equal(run["solarize"](image, 200.0), solarized)
    low, high = x.min((0, 1)), x.max((0, 1))
    near(run["auto_contrast"](image, 0), (x - low) * 255 / (high - low))
    shifted = np.asarray(run["translate_x"](image, 4.5 / 31))
    assert np.array_equal(shifted[:, 4:], pixels[:, :-4])
    assert not shifted[:, :4].any()
    sheared = np.asarray(run["shear_x"](image, 0.25))  # what stands at column c of row r was at
    for row in (2, 10, 20):  # c + 0.25 (r + 0.5), the middles of pixels taken
        whole = math.floor(0.5 + 0.25 * (row + 0.5))
        assert np.array_equal(sheared[row, : 31 - whole], pixels[row, whole:])


def test_a_third_of_a_turn_makes_red_green():
    red = Image.new("RGB", (2, 2), (255, 0, 0))
    assert np.abs(np.asarray(transform.hue(red, 1 / 3))[0, 0] - (0, 255, 0.0)).max() < 6
    grey = Image.new("L", (2, 2), 77)
    assert transform.hue(grey, 0.3) is grey


def test_strengths_are_drawn_evenly_within_their_bounds():
    grey = np.full((1, 1, 1), 100, np.uint8)
    augment = Augment(brightness=0.5)
    drawn = [augment.pixels(grey, np.random.default_rng(seed)).item() for seed in range(400)]
    assert min(drawn) in (50, 51)
    assert max(drawn) in (148, 149)
    # Of a uniform distribution over 1 wide: mean and deviation, to 4 standard errors.
    assert np.mean(drawn) == pytest.approx(99.5, abs=4 * 100 / math.sqrt(12 * 400))
    assert np.std(drawn) == pytest.approx(100 / math.sqrt(12), rel=0.15)


# -- batches --------------------------------------------------------------------------------------


def data(crop="pad", **settings):
    return ImageData(
        source="synthetic", image_size=12, channels=3, crop=crop, flip=True,
        mean=(0.0,), std=(1.0,), **settings,
    )  # fmt: skip


def rows_of(opened, rows, start=3):
    stream = batches(
        opened.train, global_batch_size=7, seed=5, start=start, rows=np.array(rows), threads=0
    )
    return next(stream)


def test_a_row_is_the_same_whatever_rows_are_made_beside_it():
    opened = data(augment=EVERYTHING).open(seed=1)
    whole = rows_of(opened, range(7))
    for rows in ([0, 1, 2, 3], [5], [2, 5, 6], [6]):
        part = rows_of(opened, rows)
        jax.tree.map(lambda a, b, rows=rows: np.testing.assert_array_equal(a[rows], b), whole, part)
    other = rows_of(opened, range(7), start=4)
    assert not np.array_equal(whole.inputs, other.inputs)


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_neighbours_are_mixed_by_the_shares_of_their_labels(way):
    plain = rows_of(data("none").open(seed=1), range(7))
    mixed = rows_of(data("none", augment=Augment(**{way: 1.0})).open(seed=1), range(7))
    others = [1, 0, 3, 2, 5, 4, 6]
    np.testing.assert_array_equal(
        mixed.targets, np.stack([plain.targets, plain.targets[others]], 1)
    )
    np.testing.assert_allclose(mixed.loss_mask.sum(1), 1, rtol=1e-6)
    own, other = plain.inputs, plain.inputs[others]
    shares = mixed.loss_mask[:, :1, None, None].astype(float)
    if way == "mixup":
        np.testing.assert_allclose(mixed.inputs, shares * own + (1 - shares) * other, atol=1e-5)
    else:
        of_own = (mixed.inputs == own).all(-1)
        assert ((mixed.inputs == other).all(-1) | of_own).all()
        np.testing.assert_allclose(of_own[:6].mean((1, 2)), mixed.loss_mask[:6, 0], atol=1e-6)
    assert len(np.unique(mixed.loss_mask[:6, 0])) == 6  # each row draws its own


def test_held_out_images_are_not_augmented_and_count_once():
    found = next(
        heldout_batches(data(augment=EVERYTHING).open(seed=1).heldout, global_batch_size=4)
    )
    plain = next(heldout_batches(data().open(seed=1).heldout, global_batch_size=4))
    np.testing.assert_array_equal(found.inputs, plain.inputs)
    np.testing.assert_array_equal(found.targets[:, 0], plain.targets)
    assert found.loss_mask.tolist() == [[1, 0]] * 4


def test_abstract_batch_is_what_mixed_examples_stack_to():
    settings = data(augment=EVERYTHING)
    found = rows_of(settings.open(seed=0), range(7))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), settings.abstract_batch(7)
    )


def test_the_digest_is_another_with_augmentation():
    plain, augmented = (data(augment=one).open(seed=0).digest for one in (None, Augment(hue=0.1)))
    assert plain != augmented


def test_a_mixed_image_is_shown_by_both_labels_and_their_shares():
    opened = data(augment=Augment(mixup=1.0)).open(seed=1)
    batch, said = rows_of(opened, range(4)), []
    show_examples(batch, opened, 1, said.append)
    first, second = batch.targets[0].tolist()
    assert f"label {first} ({first}) and label {second} ({second})" in said[0]
    titles = [axes.get_title() for axes in data_picture(batch, opened).axes]
    share = batch.loss_mask[0, 0]
    assert titles[0] == f"{first} {share:.0%}, {second} {1 - share:.0%}"


# -- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_labels_is_torchs_of_their_probabilities(smoothing):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 4)).astype(np.float32)
    labels = rng.integers(0, 4, (5, 2)).astype(np.int32)
    shares = rng.random(5).astype(np.float32)
    mask = np.stack([shares, 1 - shares], 1)
    mask[3] = 0  # an image that could not be read
    logits[0, labels[0, 0]] = logits[1, labels[1, 1]] = 9.0  # told right, by a share
    batch = Batch(np.zeros((5, 1), np.float32), labels, mask)
    sums = Classification().of_answers(
        jnp.asarray(logits),
        jax.tree.map(jnp.asarray, batch),
        Loss(label_smoothing=smoothing),
        train=True,
    )
    probabilities = sum(np.eye(4)[labels[:, i]] * mask[:, i : i + 1] for i in (0, 1))
    keep = [0, 1, 2, 4]
    loss = torch.nn.CrossEntropyLoss(reduction="sum", label_smoothing=smoothing)
    expected = loss(torch.from_numpy(logits[keep]), torch.from_numpy(probabilities[keep]).float())
    np.testing.assert_allclose(sums["loss"], expected, rtol=1e-5)
    right = probabilities[np.arange(5), logits.argmax(-1)].sum()
    np.testing.assert_allclose(sums["accuracy"], right, rtol=1e-5)


# A run; mixed images are in the fast part.
@pytest.mark.slow
def test_a_run_trains_and_is_evaluated_on_mixed_images():
    config = load_config(
        "vit_digits",
        bindings=[
            "Train.steps = 2", "Train.global_batch_size = 16", "Train.eval_batches = 2",
            "ViT.num_layers = 1", "ViT.embed_dim = 16", "ViT.mlp_dim = 16", "Mesh.fsdp = 4",
            "Mesh.data = 2", "ImageData.source = 'synthetic'", "ImageData.augment = @Augment()",
            "Augment.mixup = 0.2", "Augment.rand_augment = 1",
        ],
    )  # fmt: skip
    assert config.train.data.augment == Augment(mixup=0.2, rand_augment=1)
    trainer = Trainer(config, workdir=None)
    trainer.train()
    found = trainer.evaluate()
    assert math.log(10) - 1 < found["eval_loss"] < math.log(10) + 1
    assert 0 <= found["eval_accuracy"] <= 1


# -- what is rejected ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hue": 0.6}, "Augment.hue = 0.6: use 0 to 0.5"),
        ({"magnitude": 31}, "Augment.magnitude = 31: use 0 to 30"),
        ({"mixup": -0.1}, "Augment.mixup=-0.1; use 0 or more"),
        ({"contrast": -1.0}, "Augment.contrast=-1.0; use 0 or more"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Augment(**settings)


def test_a_batch_of_ones_own_has_a_share_for_each_label():
    batch = Batch(
        np.zeros((4, 8, 8, 1), np.float32),
        np.zeros((4, 2), np.int32),
        np.ones((4, 2), np.float32),
    )
    objective, model = Classification(), load_config("vit_digits", bindings=[]).train.model
    assert not list(objective.validate(batch, model, Loss(), None))
    wrong = dataclasses.replace(batch, loss_mask=np.ones(4, np.float32))
    assert "Batch.loss_mask has the shape [4]; use float32 [4, 2]" in next(
        objective.validate(wrong, model, Loss(), None)
    )
