"""Pixels by a preprocessor_config.json are those of transformers' image processors."""

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxtrain.config.errors import UserError
from jaxtrain.data.images.source import ImageData
from jaxtrain.models.convolutional.resnet import ResNet
from jaxtrain.models.transformers.vit import ViT
from jaxtrain.models.weights.preprocessor import KEYS, image_settings

transformers = pytest.importorskip("transformers", reason="transformers is the peer")
processing = pytest.importorskip("transformers.processing_utils")

VIT = ViT(image_size=24, patch_size=8, channels=3, num_classes=5)
RESNET = ResNet(depth=18, num_classes=5, channels=3)
SQUARE = {"height": 24, "width": 24}
# A case -> the class, our sizes, and the file.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "vit": ("ViT", VIT, {"size": SQUARE}),
    "older-size": ("ViT", VIT, {"size": 24, "feature_extractor_type": "ViTFeatureExtractor"}),
    "not-normalized": ("ViT", VIT, {"size": SQUARE, "do_normalize": False}),
    "not-rescaled": ("ViT", VIT, {"size": SQUARE, "do_rescale": False}),
    "as-it-is": ("ViT", VIT, {"size": SQUARE, "do_rescale": False, "do_normalize": False}),
    "other-factor": ("ViT", VIT, {"size": SQUARE, "rescale_factor": 1 / 127.5}),
    "mean-and-std": ("ViT", VIT, {"size": SQUARE, "image_mean": [0.4, 0.5, 0.6],
                                  "image_std": [0.1, 0.2, 0.3]}),
    "one-mean": ("ViT", VIT, {"size": SQUARE, "image_mean": 0.25, "image_std": 0.5}),
    **{f"filter-{number}": ("ViT", VIT, {"size": SQUARE, "resample": number})
       for number in range(6)},
    "center-crop": ("ViT", VIT, {"size": {"height": 31, "width": 31}, "do_center_crop": True,
                                 "crop_size": SQUARE}),
    "edge-and-crop": ("ViT", VIT, {"size": {"shortest_edge": 30}, "do_center_crop": True,
                                   "crop_size": SQUARE}),
    "deit": ("DeiT", VIT, {"size": {"height": 28, "width": 28}, "crop_size": SQUARE}),
    "convnext": ("ConvNext", RESNET, {"size": {"shortest_edge": 64}}),
    "convnext-older": ("ConvNext", RESNET, {"size": 56, "crop_pct": 0.875, "resample": 2}),
    "convnext-pct": ("ConvNext", RESNET, {"size": {"shortest_edge": 48}, "crop_pct": 0.95}),
    "convnext-large": ("ConvNext", RESNET, {"size": {"shortest_edge": 384}}),
}  # fmt: skip


def processor_of(kind: str) -> Any:
    name = {"ViT": "vit", "DeiT": "deit", "ConvNext": "convnext"}[kind]
    module = pytest.importorskip(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(module, f"{kind}ImageProcessorPil")


def ours(content: dict[str, Any], model: Any) -> ImageData:
    found = image_settings(content, model, where="preprocessor_config.json")
    return ImageData(source="synthetic", num_classes=5, channels=3, **found)


@pytest.mark.parametrize("size", [(57, 40), (33, 71), (500, 431), (24, 24)])
@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_transformers(case, size):
    kind, model, said = CASES[case]
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    image = Image.fromarray(pixels)
    theirs = processor_of(kind)(**said)(image, return_tensors="np")["pixel_values"][0]
    content = json.loads(json.dumps({"image_processor_type": f"{kind}ImageProcessor", **said}))
    found = ours(content, model).prepare(image, None)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.transpose(2, 0, 1), theirs, rtol=2e-6, atol=2e-6)


def test_what_transformers_writes_is_read():
    for kind, model in (("ViT", ViT()), ("DeiT", ViT()), ("ConvNext", ResNet())):
        written = json.loads(processor_of(kind)().to_json_string())
        found = image_settings(written, model, where="it")
        assert found["mean"] == tuple(written["image_mean"])
        assert found["std"] == tuple(written["image_std"])


def test_every_key_that_transformers_knows_is_in_the_table():
    known = {*processing.ImagesKwargs.__annotations__}
    for kind in ("ViT", "DeiT", "ConvNext"):
        known |= {*processor_of(kind)().to_dict(), *processor_of(kind).valid_kwargs.__annotations__}
    assert not known - KEYS.keys()


@pytest.mark.parametrize(
    ("model", "content", "said"),
    [
        (VIT, {"size": 224}, "size = 224; it must be 24, as the image_size of config.json"),
        (VIT, {"size": {"height": 24, "width": 32}}, "size = {'height': 24, 'width': 32}; it must"),
        (VIT, {"size": {"shortest_edge": 24}}, "size = {'shortest_edge': 24}; it must be one num"),
        (VIT, {"size": SQUARE, "do_resize": False}, "do_resize = False; it must be True"),
        (VIT, {"size": SQUARE, "do_pad": True}, "do_pad = True; it must be False"),
        (VIT, {"size": SQUARE, "resample": 7}, "resample = 7; it must be a number of Pillow's"),
        (VIT, {"size": SQUARE, "image_mean": [1.0, 2.0]}, "image_mean = [1.0, 2.0]; it must be 1"),
        (VIT, {"size": SQUARE, "image_std": [0.0]}, "image_std = [0.0]; it must be over 0"),
        (VIT, {"size": SQUARE, "rescale_factor": 0}, "rescale_factor = 0; it must be a number abo"),
        (VIT, {"size": SQUARE, "do_flip": True}, "do_flip = True is an unknown key"),
        (VIT, {"size": SQUARE, "do_center_crop": True, "crop_size": 30}, "crop_size = 30; it must"),
        (
            VIT,
            {"size": 20, "do_center_crop": True, "crop_size": 24},
            "size = 20; it must be the 24",
        ),
        (RESNET, {"size": 64, "crop_pct": 1e-300}, "crop_pct = 1e-300; it must be at most 1, and"),
        (RESNET, {"size": 64, "crop_pct": 1.5}, "crop_pct = 1.5; it must be at most 1, and its"),
        (VIT, {"image_processor_type": "CLIPImageProcessor"}, "= 'CLIPImageProcessor'; it must be"),
        (VIT, {"image_processor_type": ["ViT"]}, "image_processor_type = ['ViT']; it must be"),
        (VIT, {"size": {"height": [24], "width": [24]}}, "size = {'height': [24], 'width': [24]}"),
        (VIT, {"size": SQUARE, "rescale_factor": 10**400}, "rescale_factor = 1000"),
        (VIT, {"size": SQUARE, "image_mean": [{}]}, "image_mean = [{}]; it must be 1 number"),
        (RESNET, {"size": 10**12}, "size = 1000000000000; it must be 32 to 8192"),
        (RESNET, {"size": SQUARE}, "size = {'height': 24, 'width': 24}; it must be a number abov"),
        (RESNET, {"size": 64, "do_center_crop": True}, "do_center_crop = True; it must be false"),
        (RESNET, {"size": 64, "crop_pct": "all"}, "crop_pct = 'all'; it must be a number above 0"),
    ],
)
def test_what_is_not_done_here_is_rejected_by_name(model, content, said):
    with pytest.raises(UserError) as error:
        image_settings(content, model, where="preprocessor_config.json")
    assert said in str(error.value)


def test_pixels_in_training_have_the_same_filter_and_scale():
    data = ImageData(source="synthetic", image_size=24, channels=3, resize="stretch",
                     resample="bicubic", rescale_factor=1.0, mean=(0.0,), std=(1.0,))  # fmt: skip
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 57, 3), np.uint8))
    expected = np.asarray(image.resize((24, 24), Image.Resampling.BICUBIC), np.float32)
    assert np.array_equal(data.prepare(image, np.random.default_rng(1)), expected)
