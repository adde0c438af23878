"""Convolutions equal JAX's own, pooling PyTorch's, and so do their gradients."""

import re

import jax
import numpy as np
import pytest
from jax import lax

from jaxtrain.analysis.planning.machines.targets import parse_target, target_devices
from jaxtrain.nn import convolution as module
from jaxtrain.nn.convolution import convolution, max_pool

FAR = 5 * 2**20


def inputs(images: int, size: int = 3, channels: int = 8, dtype=np.float32, out: int = 6):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(images, 10, 9, channels)).astype(dtype)
    kernel = rng.normal(size=(size, size, channels, out)).astype(dtype)
    return x, kernel


def expected(x, kernel, stride):
    padding = [(kernel.shape[0] // 2,) * 2] * 2
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize(
    ("images", "size", "stride", "tile_bytes", "in_tile"),
    [
        (8, 3, 1, module._TILE_BYTES, 8),
        (8, 3, 1, 4 * 9 * 90 * 32 * 4, 4),
        (6, 5, 1, 4 * 25 * 90 * 32 * 5, 3),  # of 6 images tiles of 3, not 5
        (7, 3, 1, 4 * 9 * 90 * 32 * 6, 1),
        (8, 3, 1, 4 * 9 * 90 * 32 - 1, 0),  # not one image fits
        (8, 1, 1, FAR, 0),  # a matmul already
        (8, 1, 2, 4 * 25 * 32 * 4, 4),
        (8, 3, 2, 4 * 9 * 25 * 32 * 8, 8),
        (8, 3, 2, 4 * 9 * 25 * 32 * 8 - 1, 4),
        (8, 5, 3, FAR, 8),
    ],
)
def test_values_and_gradients_equal_jax(monkeypatch, images, size, stride, tile_bytes, in_tile):
    monkeypatch.setattr(module, "_TILE_BYTES", tile_bytes)
    x, kernel = inputs(images, size, channels=32, out=8)
    assert module._images_of_a_tile(x, kernel, stride, size // 2) == in_tile
    run = jax.vjp(lambda x, kernel: convolution(x, kernel, stride), x, kernel)
    plain = jax.vjp(lambda x, kernel: expected(x, kernel, stride), x, kernel)
    np.testing.assert_array_equal(run[0], plain[0])
    gradient = np.random.default_rng(1).normal(size=run[0].shape).astype(np.float32)
    assert ("scan" in str(jax.make_jaxpr(run[1])(gradient))) == (in_tile > 0)
    for ours, theirs in zip(run[1](gradient), plain[1](gradient), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs)


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_no_activation_is_turned_for_the_kernel_s_gradient(size, stride):
    x, kernel = inputs(16, size, channels=32, out=8)

    def turned(convolve):
        step = jax.jit(jax.grad(lambda *a: (convolve(*a, stride) ** 2).sum(), (0, 1)))
        text = step.lower(x, kernel).compile().as_text()
        copies = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
        return [shape for shape in copies if np.prod([int(n) for n in shape.split(",")]) >= x.size]

    assert turned(expected)
    assert not turned(convolution)


@pytest.mark.parametrize(
    ("size", "stride", "channels", "has_tiles"),
    [(3, 1, 32, True), (3, 1, 33, False), (3, 2, 64, False), (1, 2, 64, True)],
)
def test_patches_of_many_channels_are_jax_s_own(size, stride, channels, has_tiles):
    x, kernel = inputs(8, size, channels=channels)
    assert (module._images_of_a_tile(x, kernel, stride, size // 2) > 0) == has_tiles


@pytest.mark.parametrize(("side", "stride"), [(6, 1), (7, 2)])
def test_a_large_kernel_is_not_transposed_for_the_gradient_of_x(side, stride):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, side, side, 48)).astype(np.float32)
    kernel = rng.normal(size=(3, 3, 48, 64)).astype(np.float32)
    run, plain = (
        jax.vjp(lambda *a, form=form: form(*a, stride), x, kernel)
        for form in (convolution, expected)
    )
    np.testing.assert_array_equal(run[0], plain[0])
    gradient = rng.normal(size=run[0].shape).astype(np.float32)
    for ours, theirs in zip(run[1](gradient), plain[1](gradient), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs)

    def transposed(form):
        of_x = jax.jit(jax.grad(lambda x: (form(x, kernel, stride) ** 2).sum()))
        return "f32[3,3,64,48]" in of_x.lower(x).compile().as_text()

    assert transposed(expected)
    assert not transposed(convolution)


def test_a_small_kernel_s_gradient_of_x_is_jax_s_own():
    x, kernel = inputs(8, channels=40, out=40)
    assert not module._is_larger_than_images(kernel, x, 1, 1)
    assert module._is_larger_than_images(kernel, x[:1], 1, 1)


def test_other_precisions_are_jax_s_own():
    x, kernel = inputs(8, dtype=jax.numpy.bfloat16)
    assert module._images_of_a_tile(x, kernel, 1, 1) == 0
    assert module._columns_folded(x, kernel, 1) == 1


# -- few channels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "size", "padding", "channels", "out", "columns"),
    [
        (32, 5, 0, 3, 6, 4),  # LeNet's
        (14, 5, 0, 6, 16, 2),
        (28, 5, 2, 1, 6, 4),
        (9, 3, 1, 3, 16, 4),  # columns and channels that are left over
        (11, 4, 3, 2, 5, 4),
        (7, 3, 0, 1, 1, 4),
        (10, 3, 1, 3, 64, 2),
        (10, 3, 1, 16, 16, 1),
    ],
)
def test_columns_are_folded_and_equal_torch(width, size, padding, channels, out, columns):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, width + 1, width, channels)).astype(np.float32)
    kernel = rng.normal(size=(size, size, channels, out)).astype(np.float32)
    images = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    weight = torch.tensor(kernel.transpose(3, 2, 0, 1), requires_grad=True)
    theirs = torch.nn.functional.conv2d(images, weight, padding=padding)
    gradient = rng.normal(size=theirs.shape).astype(np.float32)
    theirs.backward(torch.tensor(gradient))

    def run(x, kernel):
        return convolution(x, kernel, 1, padding)

    groups = -(-theirs.shape[3] // columns)
    folded = f"f32[3,{theirs.shape[2]},{groups},{columns * out}] = conv_general_dilated"
    assert folded in str(jax.make_jaxpr(run)(x, kernel))
    y, pull = jax.vjp(run, x, kernel)
    ours = [y, *pull(gradient.transpose(0, 2, 3, 1))]
    expected = theirs.detach(), images.grad, weight.grad
    for mine, other, axes in zip(ours, expected, [(0, 2, 3, 1)] * 2 + [(2, 3, 1, 0)], strict=True):
        other = other.numpy().transpose(axes)
        assert np.linalg.norm(mine - other) <= 2e-6 * np.linalg.norm(other)


# -- pooling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (1, 2)])
@pytest.mark.parametrize("ties", [False, True])
def test_max_pool_and_its_gradient_equal_torch(size, ties):
    """With ties the gradient goes to the first of the largest pixels."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *size, 3)).astype(np.float32)
    x = np.round(x) if ties else x
    theirs = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    pooled = torch.nn.functional.max_pool2d(theirs, 3, 2, padding=1)
    gradient = rng.normal(size=pooled.shape).astype(np.float32)
    pooled.backward(torch.tensor(gradient))

    y, pull = jax.vjp(max_pool, x)
    np.testing.assert_array_equal(y, pooled.detach().numpy().transpose(0, 2, 3, 1))
    (of_x,) = pull(gradient.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(of_x, theirs.grad.numpy().transpose(0, 2, 3, 1), atol=1e-6)


def test_max_pool_hands_on_what_is_no_number():
    x = np.ones((1, 6, 6, 1), np.float32)
    x[0, 2, 2] = np.nan
    forward = jax.vjp(max_pool, x)[0]
    np.testing.assert_array_equal(np.isnan(forward), np.isnan(max_pool(x)))
    assert np.isnan(forward).sum() == 1


# -- images hardly larger than the kernel ----------------------------------------------------------

# Height, width, side of the kernel, stride, padding.
SMALL = [
    (2, 2, 3, 1, 1), (1, 1, 3, 1, 1), (4, 4, 3, 1, 1), (4, 3, 3, 1, 0), (4, 4, 3, 2, 1),
    (3, 4, 3, 2, 1), (1, 4, 3, 2, 1), (4, 4, 5, 1, 2), (6, 5, 5, 2, 2), (5, 6, 5, 3, 1),
    (3, 3, 2, 1, 0), (3, 2, 2, 2, 1), (8, 7, 7, 2, 3), (4, 4, 3, 1, 2),
]  # fmt: skip


# The cases that are left have an even and an odd kernel, strides 1 to 3 and each padding.
@pytest.mark.slow_cases(
    "1-1-3-1-1",
    "1-4-3-2-1",
    "8-7-7-2-3",
    "4-4-3-1-1",
    "4-4-3-2-1",
    "3-4-3-2-1",
    "4-4-5-1-2",
    "6-5-5-2-2",
    "3-3-2-1-0",
    "4-4-3-1-2",
    "2-2-3-1-1",
)
@pytest.mark.parametrize(("height", "width", "size", "stride", "padding"), SMALL)
def test_small_images_are_patches_and_equal_torch(height, width, size, stride, padding):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, height, width, 5)).astype(np.float32)
    kernel = rng.normal(size=(size, size, 5, 4)).astype(np.float32)
    images = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    weight = torch.tensor(kernel.transpose(3, 2, 0, 1), requires_grad=True)
    theirs = torch.nn.functional.conv2d(images, weight, stride=stride, padding=padding)
    gradient = rng.normal(size=theirs.shape).astype(np.float32)
    theirs.backward(torch.tensor(gradient))

    def run(x, kernel):
        return convolution(x, kernel, stride, padding)

    assert "conv_general_dilated" not in str(jax.make_jaxpr(run)(x, kernel))
    y, pull = jax.vjp(run, x, kernel)
    np.testing.assert_allclose(y, theirs.detach().numpy().transpose(0, 2, 3, 1), atol=2e-5)
    of_x, of_kernel = pull(gradient.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(of_x, images.grad.numpy().transpose(0, 2, 3, 1), atol=2e-5)
    np.testing.assert_allclose(of_kernel, weight.grad.numpy().transpose(2, 3, 1, 0), atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "size", "dtype"),
    [
        ((3, 5, 4, 5), 3, np.float32),  # larger
        ((3, 2, 2, 5), 1, np.float32),  # a matmul already
        ((3, 2, 2, 5), 3, jax.numpy.bfloat16),
    ],
)
def test_all_else_is_xla_s_convolution(shape, size, dtype):
    x, kernel = np.ones(shape, dtype), np.ones((size, size, 5, 4), dtype)
    assert "conv_general_dilated" in str(jax.make_jaxpr(lambda *a: convolution(*a, 1))(x, kernel))


@pytest.mark.parametrize("side", [2, 9])
def test_a_tpu_s_convolutions_are_xla_s(side):
    """The form is chosen by the device that a program is for."""
    devices = target_devices(parse_target("v5e:2x2"))
    mesh = jax.sharding.Mesh(np.array(devices[:1]), "x")
    x, kernel = inputs(2)
    with jax.sharding.set_mesh(mesh):
        traced = jax.jit(lambda *a: convolution(*a, 1)).trace(x[:, :side, :side], kernel)
    assert f"f32[2,{side},{side},6] = conv_general_dilated" in str(traced.jaxpr)
