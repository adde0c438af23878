"""LeNet, AlexNet, VGG and their poolings equal PyTorch's, and one device on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_torch import NORM, Twin, assert_same_step, draw_norms, in_our_layout, step_on
from conftest import make_layout, make_step
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.alexnet import AlexNet
from jaxtrain.models.convolutional.lenet import LeNet
from jaxtrain.models.convolutional.vgg import VGG
from jaxtrain.nn import convolution
from jaxtrain.nn.convnet import Convolution, Norm
from jaxtrain.nn.convolution import average_pool, max_pool, pool_to
from jaxtrain.parallel.sharding import is_variable, logical_axes, shard


def images(
    side: int, channels: int, classes: int, *, rows: int = 8, wide: int = 0, seed: int = 2
) -> Batch:
    rng = np.random.default_rng(seed)
    shape = (rows, side, side + wide, channels)
    return Batch(
        rng.normal(size=shape).astype(np.float32),
        rng.integers(0, classes, rows).astype(np.int32),
        np.ones(rows, np.float32),
    )


def torch_convnet(torch, sizes, side):
    """The network of a plan, as torchvision writes them, from torch.nn alone."""
    nn = torch.nn
    activation = {"relu": nn.ReLU, "tanh": nn.Tanh}[getattr(sizes, "activation", "relu")]
    norm = torch_norm(torch, getattr(sizes, "norm", None), groups=4)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
            for part in sizes.plan:
                if isinstance(part, Convolution):
                    arguments = (part.channels_in, part.channels, part.size)
                    self.convolutions.append(nn.Conv2d(*arguments, part.stride, part.padding))
                    self.norms.append(norm(part.channels))
                    last = part.channels
            widths = (side * side * last, *sizes.widths)
            self.dense = nn.ModuleList(nn.Linear(*p) for p in zip(widths, widths[1:], strict=False))

        def forward(self, x):
            count = 0
            for part in sizes.plan:
                if isinstance(part, Convolution):
                    x = activation()(self.norms[count](self.convolutions[count](x)))
                    count += 1
                elif part.kind == "average":
                    x = nn.functional.avg_pool2d(x, part.size, part.stride)
                else:
                    x = nn.functional.max_pool2d(x, part.size, part.stride, part.padding)
            x = nn.functional.adaptive_avg_pool2d(x, side).flatten(1)
            for i, layer in enumerate(self.dense):
                x = layer(activation()(x) if i else x)
            return x

    torch.manual_seed(0)
    network = Network()
    draw_norms(network)
    return network


def torch_norm(torch, kind, groups):
    """What makes PyTorch's norm of so many channels."""
    nn = torch.nn
    return {
        None: lambda channels: nn.Identity(),
        "batch": nn.BatchNorm2d,
        "group": lambda channels: nn.GroupNorm(groups, channels),
        "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
        "layer": lambda channels: nn.GroupNorm(1, channels),
    }[kind]


def twin(torch, sizes, side):
    network = torch_convnet(torch, sizes, side)
    last = len(network.dense) - 1

    def ours(name):
        kind, place, rest = name.split(".")
        if kind == "norms":
            return f"convolutions/{place}/norm/{NORM[rest]}" if rest in NORM else None
        if kind == "dense" and int(place) == last:
            return f"head/{rest}"
        return f"{kind}/{place}/{rest}"

    def layout(path, value):
        value = in_our_layout(value)
        if path == "dense/0/weight":  # what is flattened is [C, H, W] there and [H, W, C] here
            value = value.reshape(-1, side, side, value.shape[1]).transpose(1, 2, 0, 3)
            value = value.reshape(-1, value.shape[3])
        return value

    return Twin(sizes, network, ours, layout)


SMALL = {"width": 8, "head_width": 16, "dropout": 0.0}
NETWORKS = {
    "lenet": (LeNet(), 5, (28, 0)),
    "lenet_cifar": (LeNet(channels=3, padding=0, activation="relu", pooling="max"), 5, (32, 0)),
    "lenet_odd": (LeNet(filters=(5, 9), hidden=(11, 16), num_classes=7), 5, (23, 4)),
    "alexnet": (AlexNet(num_classes=10, **SMALL), 6, (63, 0)),
    "alexnet_odd": (AlexNet(num_classes=3, channels=1, **SMALL | {"width": 5}), 6, (71, 8)),
    "vgg11": (VGG(depth=11, num_classes=10, **SMALL), 7, (32, 0)),
    "vgg11_group": (VGG(depth=11, num_classes=3, norm="group", norm_groups=4, **SMALL), 7, (32, 0)),
    "vgg13_bn": (VGG(depth=13, num_classes=5, channels=1, norm="batch", **SMALL), 7, (33, 3)),
}


@pytest.mark.parametrize("kind", ["group", "instance", "layer"])
def test_norms_of_each_image_and_their_gradients_equal_torch(kind):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(20, 3, (4, 5, 7, 24)).astype(np.float32)  # a mean far from 0
    weights = rng.normal(size=x.shape).astype(np.float32)
    scale, bias = rng.normal(1, 0.3, (2, 24)).astype(np.float32)
    theirs = torch_norm(torch, kind, groups=3)(24)
    theirs.load_state_dict({"weight": torch.tensor(scale), "bias": torch.tensor(bias)})
    given = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    expected = theirs(given)
    (expected * torch.tensor(weights.transpose(0, 3, 1, 2))).sum().backward()

    def total(params, x):
        y = nnx.merge(graphdef, params)(shard(x, ("batch", "height", "width", "fan_out")))
        return (y * weights).sum(), y

    for layout in (make_layout(fsdp=1), make_layout(data=2, tensor=4)):  # 6 channels a device
        with layout.active():
            norm = Norm(kind, groups=3).of(jax.random.key(0), 24, "fan_out")
            norm.scale.set_value(jnp.asarray(scale))
            norm.bias.set_value(jnp.asarray(bias))
            graphdef, params = nnx.split(norm, nnx.Param)
            places = [
                layout.sharding_of(layout.parameter(logical_axes(one)))
                for one in jax.tree.leaves(params, is_leaf=is_variable)
            ]
            params = jax.device_put(params, jax.tree.unflatten(jax.tree.structure(params), places))
            run = jax.jit(jax.grad(total, (0, 1), has_aux=True))
            (of_params, of_x), found = run(params, x)
        np.testing.assert_allclose(
            found, expected.detach().numpy().transpose(0, 2, 3, 1), atol=1e-4, rtol=1e-4
        )
        for ours, wanted in (
            (of_params["scale"].get_value(), theirs.weight.grad.numpy()),
            (of_params["bias"].get_value(), theirs.bias.grad.numpy()),
            (of_x, given.grad.numpy().transpose(0, 2, 3, 1)),
        ):
            off = np.linalg.norm(np.asarray(ours) - wanted)
            assert off <= 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"norm": "group"}, "VGG.norm_groups=None (None is 32) does not divide all"),
        ({"norm": "group", "norm_groups": 5}, "channels [12, 24, 48, 96]; use 4"),
        ({"norm": "batch", "norm_groups": 4}, "VGG.norm_groups=4 has no effect with norm='batch'"),
    ],
    ids=str,
)
def test_groups_that_do_not_divide_or_do_nothing_are_refused(wrong, message):
    with pytest.raises(UserError) as refused:
        VGG(width=12, **wrong)
    assert message in str(refused.value)
    assert VGG(norm="group").norm_groups is None  # 32 divide all of the published channels


@pytest.mark.slow_cases("lenet", "alexnet", "alexnet_odd", "lenet_odd", "vgg11")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "vgg11_group" else n for n in NETWORKS],
)
def test_outputs_and_every_gradient_equal_torch(name):
    torch = pytest.importorskip("torch")
    sizes, side, (pixels, wide) = NETWORKS[name]
    batch = images(pixels, sizes.channels, sizes.num_classes, wide=wide)
    pair = twin(torch, sizes, side)
    # A bias before a batch norm moves nothing.
    norms = range(len(pair.network.convolutions)) if name == "vgg13_bn" else ()
    pair.compare(
        batch,
        torch.tensor(batch.inputs.transpose(0, 3, 1, 2)),
        lambda x: torch.nn.functional.cross_entropy(x, torch.tensor(batch.targets).long()),
        same=tuple(f"convolutions/{i}/bias" for i in norms),
    )


TRAINED = {
    "lenet": (LeNet(channels=2, filters=(7, 24), hidden=(19, 40), num_classes=6), 5, (21, 5), 0.02),
    "alexnet": (AlexNet(num_classes=5, channels=2, **SMALL | {"width": 6}), 6, (67, 4), 0.05),
    "vgg11_batch": (VGG(depth=11, num_classes=4, norm="batch", **SMALL), 7, (35, 2), 3e-4),
}


# Trains; outputs and gradients are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_thirty_steps_have_the_losses_and_statistics_of_torch(name):
    torch = pytest.importorskip("torch")
    sizes, side, (pixels, wide), rate = TRAINED[name]
    batch = images(pixels, sizes.channels, sizes.num_classes, wide=wide)
    targets = torch.tensor(batch.targets).long()
    twin(torch, sizes, side).train(
        batch,
        torch.tensor(batch.inputs.transpose(0, 3, 1, 2)),
        lambda x: torch.nn.functional.cross_entropy(x, targets),
        rate=rate,
        falls=0.1,
    )


@pytest.mark.parametrize("one_cpu", [True, False])
@pytest.mark.parametrize(
    ("size", "stride", "padding", "ceil", "side"),
    [(2, 2, 0, False, 9), (3, 2, 0, False, 8), (3, 2, 0, True, 8), (3, 1, 1, False, 7),
     (3, 2, 1, False, 8), (2, 2, 0, True, 5), (3, 2, 1, True, 7), (3, 3, 1, True, 5)],
)  # fmt: skip
def test_max_pooling_and_its_gradient_equal_torch(
    size, stride, padding, ceil, side, one_cpu, monkeypatch
):
    """In the form for one CPU device, and in that for all other devices."""
    monkeypatch.setattr(convolution, "_is_one_cpu", lambda: one_cpu)
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).integers(0, 4, (2, side, side + 3, 3)).astype(np.float32)  # ties
    theirs = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    expected = torch.nn.functional.max_pool2d(theirs, size, stride, padding, ceil_mode=ceil)
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    (expected * torch.tensor(weights)).sum().backward()

    def total(x):
        y = max_pool(x, size, stride, padding, ceil=ceil)
        return (y * weights.transpose(0, 2, 3, 1)).sum(), y

    gradient, found = jax.jit(jax.grad(total, has_aux=True))(x)
    np.testing.assert_array_equal(found, expected.detach().numpy().transpose(0, 2, 3, 1))
    np.testing.assert_allclose(gradient, theirs.grad.numpy().transpose(0, 2, 3, 1), atol=1e-6)


def test_means_of_pixels_equal_torch():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(2, 5, 9, 3)).astype(np.float32)
    theirs = torch.tensor(x.transpose(0, 3, 1, 2))
    functional = torch.nn.functional
    for ours, expected in (
        (average_pool(x, 2, 2), functional.avg_pool2d(theirs, 2, 2)),
        (average_pool(x, 3, 1), functional.avg_pool2d(theirs, 3, 1)),
        (pool_to(x, 3), functional.adaptive_avg_pool2d(theirs, 3)),
        (pool_to(x, 7), functional.adaptive_avg_pool2d(theirs, 7)),
    ):
        np.testing.assert_allclose(ours, expected.numpy().transpose(0, 2, 3, 1), atol=1e-6)


# -- meshes ----------------------------------------------------------------------------------------

ON_MESHES = {
    "alexnet": (AlexNet(num_classes=10, width=8, head_width=16), 63),
    "vgg": (VGG(depth=11, num_classes=10, channels=1, norm="batch", width=8, head_width=16), 32),
}


# tests/test_resnet.py has convolutions on meshes in the fast part, test_vector_models.py dropout.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("alexnet", {"fsdp": 4, "tensor": 2, "zero": 3}),
        ("vgg", {"fsdp": 2, "tensor": 4, "zero": 2}),
    ],
    ids=str,
)
def test_every_mesh_computes_and_drops_the_same(name, layout):
    batch, alone = one_device(name)
    assert_same_step(step_on(ON_MESHES[name][0], batch, **layout), alone)


def nudged(batch, seed):
    noise = 1e-6 * np.random.default_rng(seed).normal(size=batch.inputs.shape)
    return dataclasses.replace(batch, inputs=batch.inputs + noise.astype(np.float32))


def furthest(one, other):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), one, other)))


@functools.cache
def one_device(name):
    """Images and their step on one device, away from the kinks of ReLU and max pooling: another
    order of sums may not take the gradient to their other side."""
    sizes, pixels = ON_MESHES[name]
    program = make_step(sizes, make_layout())
    state, run = program.create(0), jax.jit(program.setup.gradients)

    def step(batch):
        with program.setup.layout.active():
            return jax.tree.map(np.asarray, jax.device_get(run(state, batch)))

    for seed in range(2, 12):
        batch = images(pixels, sizes.channels, 10, seed=seed)
        alone = step(batch)
        # Twice what a nudge changes without a kink, which changes a thousand times as much.
        least = 2e-5 * max(np.abs(g).max() for g in jax.tree.leaves(alone[0]))
        beside = (step(nudged(batch, number))[0] for number in range(6))
        if all(furthest(alone[0], one) <= least for one in beside):
            return batch, alone
    raise AssertionError("every image lies at a kink")


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "pixels", "giga_multiply_adds", "millions"),
    [
        # What torchvision's documentation lists of its models.
        (AlexNet(), 224, 0.714, 61.101),
        (VGG(depth=11), 224, 7.609, 132.863),
        (VGG(depth=13), 224, 11.308, 133.048),
        (VGG(depth=16), 224, 15.470, 138.358),
        (VGG(depth=19), 224, 19.632, 143.667),
        (VGG(depth=16, norm="batch"), 224, 15.470, 138.366),
        # 61,706 parameters, the number of every course's LeNet-5.
        (LeNet(), 28, 0.000416520, 0.061706),
    ],
)
def test_flops_and_parameters_are_the_published_ones(sizes, pixels, giga_multiply_adds, millions):
    from flax import nnx  # noqa: PLC0415

    found = sizes.flops((pixels, pixels, sizes.channels)) / 6e9
    assert found == pytest.approx(giga_multiply_adds, abs=1e-3 if giga_multiply_adds > 0.1 else 0)
    params = nnx.state(nnx.eval_shape(lambda: sizes.build(jax.random.key(0))), nnx.Param)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count / 1e6 == pytest.approx(millions, abs=1e-3 if millions > 1 else 0)


@pytest.mark.parametrize(
    ("sizes", "side", "sentence"),
    [
        (AlexNet(), 32, "AlexNet on images of 32 pixels a side; use at least 63"),
        (VGG(), 28, "VGG on images of 28 pixels a side; use at least 32"),
        (LeNet(padding=0), 9, "LeNet on images of 9 pixels a side; use at least 16"),
    ],
)
def test_images_that_are_too_small_are_refused(sizes, side, sentence):
    with pytest.raises(UserError) as refusal:
        sizes.flops((side, side, 3))
    assert str(refusal.value) == sentence
