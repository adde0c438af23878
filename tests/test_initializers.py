"""Initializers have the variance that their papers say and PyTorch draws, in every model."""

import dataclasses
import math
from typing import get_args

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtrain.models.convolutional.alexnet import AlexNet
from jaxtrain.models.convolutional.googlenet import GoogLeNet
from jaxtrain.models.convolutional.lenet import LeNet
from jaxtrain.models.convolutional.vgg import VGG
from jaxtrain.models.feed_forward.autoencoder import Autoencoder
from jaxtrain.models.feed_forward.mlp import MLP
from jaxtrain.nn.parameters import InitializerName, initializer_of

NAMES = get_args(InitializerName)
# [I, O] and [H, W, I, O] of ours.
SHAPES = [(192, 320), (3, 3, 24, 40)]


def of_torch(torch, name, shape):
    """As many numbers, drawn by PyTorch."""
    tensor = torch.empty(*((shape[-1], shape[-2], *shape[:-2])))
    rule, how = name.split("_")
    generator = torch.Generator().manual_seed(0)
    draw = {
        "he": getattr(torch.nn.init, f"kaiming_{how}_"),
        "glorot": getattr(torch.nn.init, f"xavier_{how}_"),
        # Named for its gain: LeCun's variance is Kaiming's of a layer without activation.
        "lecun": getattr(torch.nn.init, f"kaiming_{how}_"),
    }[rule]
    more = {"nonlinearity": {"he": "relu", "lecun": "linear"}[rule]} if rule != "glorot" else {}
    return draw(tensor, generator=generator, **more).numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_variances_are_pytorchs_and_the_papers(name, shape):
    torch = pytest.importorskip("torch")
    ours = np.asarray(initializer_of(name, "relu")(jax.random.key(0), shape))
    theirs = of_torch(torch, name, shape)
    pixels = math.prod(shape[:-2])
    fan_in, fan_out = pixels * shape[-2], pixels * shape[-1]
    variance = {"he": 2 / fan_in, "glorot": 2 / (fan_in + fan_out), "lecun": 1 / fan_in}[
        name.split("_")[0]
    ]
    # Of n numbers the variance is known to sqrt(2 / n) where they are normal, else better.
    error = 5 * math.sqrt(2 / ours.size)
    for values in (ours, theirs):
        np.testing.assert_allclose(values.var(), variance, rtol=error)
        assert abs(values.mean()) < 5 * math.sqrt(variance / ours.size)
    if name.endswith("uniform"):
        edge = math.sqrt(3 * variance)
        assert 0.99 * edge < np.abs(ours).max() <= edge
    else:
        assert np.abs(ours).max() > 3 * math.sqrt(variance)


def test_what_he_draws_keeps_the_variance_through_relus_and_lecun_does_not():
    """Ten layers: the mean square stays, and halves in each (arXiv 1502.01852, section 2.2)."""
    x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    for name, factor in (("he_normal", 1.0), ("lecun_normal", 0.5)):
        y = x
        for key in jax.random.split(jax.random.key(1), 10):
            y = np.maximum(y @ np.asarray(initializer_of(name, "relu")(key, (512, 512))), 0)
        # What a ReLU leaves has half the mean square of what it was given.
        np.testing.assert_allclose(np.square(y).mean(), factor**10, rtol=0.4)


# The cases that are left run the same code.
@pytest.mark.slow_cases("AlexNet", "VGG")
@pytest.mark.parametrize(
    "model",
    [
        MLP(widths=(256, 256, 10)), Autoencoder(widths=(256, 256)), LeNet(hidden=(256, 256)),
        AlexNet(num_classes=10, width=8, head_width=256),
        VGG(depth=11, num_classes=10, width=8, head_width=256),
        pytest.param(GoogLeNet(num_classes=10, width=16), marks=pytest.mark.slow),
    ],
    ids=lambda model: type(model).__name__,
)  # fmt: skip
def test_every_weight_but_the_last_is_drawn_as_the_settings_say(model):
    def weights(name):
        module = dataclasses.replace(model, initializer=name).build(jax.random.key(0))
        flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
        return {path: np.asarray(one.get_value()) for path, one in flat if path[-1] == "weight"}

    plain, said = weights(None), weights("lecun_uniform")
    hidden = {
        path: value for path, value in said.items()
        if "head" not in path and path[-2:] != ("out", "weight")
    }  # fmt: skip
    assert len(hidden) >= 1
    for path, value in said.items():
        if path not in hidden:
            np.testing.assert_array_equal(value, plain[path])
            continue
        edge = math.sqrt(3 / math.prod(value.shape[:-1]))
        assert np.abs(value).max() <= edge
        assert np.abs(value).max() > 0.8 * edge or value.size < 100
        assert not np.array_equal(value, plain[path])
