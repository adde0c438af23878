"""ResNet equals PyTorch modules, in evaluation and in training, and one device on every mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import make_layout, make_step
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.resnet import Convolution, NormedConvolution, ResNet
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.parameters import Statistic

STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 20: (3, 3, 3)}
# Float32 through 20 to 50 convolutions: PyTorch and XLA add in other orders.
TOLERANCE = 1e-4


# -- the same networks from torch.nn ---------------------------------------------------------------


def torch_resnet(depth: int, num_classes: int, channels: int):
    """A ResNet as torchvision writes it, from torch.nn alone."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    def conv(n_in, n_out, size, stride):
        kernel = nn.Conv2d(n_in, n_out, size, stride, padding=size // 2, bias=False)
        return nn.Sequential(kernel, nn.BatchNorm2d(n_out))

    class Block(nn.Module):
        def __init__(self, n_in, width, stride):
            super().__init__()
            if depth == 50:
                n_out = 4 * width
                parts = [conv(n_in, width, 1, 1), conv(width, width, 3, stride)]
                parts.append(conv(width, n_out, 1, 1))
            else:
                n_out = width
                parts = [conv(n_in, width, 3, stride), conv(width, n_out, 3, 1)]
            self.parts = nn.ModuleList(parts)
            same = stride == 1 and n_in == n_out
            self.shortcut = None if same else conv(n_in, n_out, 1, stride)
            self.n_out = n_out

        def forward(self, x):
            h = x
            for i, part in enumerate(self.parts):
                h = part(h if i == 0 else torch.relu(h))
            return torch.relu(h + (x if self.shortcut is None else self.shortcut(x)))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            large = depth in (18, 34, 50)
            n_in = 64 if large else 16
            self.stem = conv(channels, n_in, 7 if large else 3, 2 if large else 1)
            self.pool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
            blocks = []
            for stage, count in enumerate(STAGES[depth]):
                for i in range(count):
                    stride = 2 if stage and i == 0 else 1
                    blocks.append(Block(n_in, (64 if large else 16) * 2**stage, stride))
                    n_in = blocks[-1].n_out
            self.blocks = nn.ModuleList(blocks)
            self.head = nn.Linear(n_in, num_classes)

        def forward(self, x):
            x = self.pool(torch.relu(self.stem(x)))
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    network = Network()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # away from 0 and 1, where errors would not show
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return network


def norms(network):
    """(our path, the torch Conv2d and BatchNorm2d) of every normed convolution."""
    yield ("stem",), network.stem
    for i, block in enumerate(network.blocks):
        for j, part in enumerate(block.parts):
            yield ("blocks", i, "convolutions", j), part
        if block.shortcut is not None:
            yield ("blocks", i, "shortcut"), block.shortcut


def numpy(tensor):
    """A copy: the network goes on changing its own."""
    return np.array(tensor.detach())


def values_from(network):
    """Path -> numpy array, of every parameter and statistic under our names."""
    values = {("head",): numpy(network.head.weight).T, ("head_bias",): numpy(network.head.bias)}
    for path, (conv, norm) in norms(network):
        values[*path, "kernel"] = numpy(conv.weight).transpose(2, 3, 1, 0)
        values[*path, "scale"], values[*path, "bias"] = numpy(norm.weight), numpy(norm.bias)
        values[*path, "mean"] = numpy(norm.running_mean)
        values[*path, "variance"] = numpy(norm.running_var)
    return values


def copied(sizes: ResNet, network):
    """Our graph, parameters and statistics with the torch network's values."""
    shapes = nnx.eval_shape(lambda: sizes.build(jax.random.key(0)))
    graph, params, statistics = nnx.split(shapes, nnx.Param, Statistic)
    values = values_from(network)

    def fill(state):
        flat = nnx.to_flat_state(state)
        filled = []
        for path, variable in flat:
            value = values.pop(path)
            assert value.shape == variable.get_value().shape, path
            filled.append((path, variable.replace(jax.numpy.asarray(value))))
        return nnx.from_flat_state(filled)

    params, statistics = fill(params), fill(statistics)
    assert not values, f"not copied: {list(values)}"
    return graph, params, statistics


# The cases that are left run the same code.
@pytest.mark.slow_cases("50-64", "18-64")
@pytest.mark.parametrize(("depth", "size"), [(20, 28), (18, 64), (50, 64)])
def test_logits_and_running_statistics_equal_torch(depth, size):
    torch = pytest.importorskip("torch")
    channels = 1 if depth == 20 else 3
    network = torch_resnet(depth, 10, channels)
    graph, params, statistics = copied(
        ResNet(depth=depth, num_classes=10, channels=channels), network
    )
    images = np.random.default_rng(0).normal(size=(4, size, size, channels)).astype(np.float32)
    theirs = torch.tensor(images.transpose(0, 3, 1, 2))

    def run(params, statistics, train):
        return nnx.merge(graph, params, statistics)(images, statistics, Execution(), train=train)

    run = jax.jit(run, static_argnums=2)
    network.eval()
    logits, same = run(params, statistics, False)
    with torch.no_grad():
        np.testing.assert_allclose(logits, numpy(network(theirs)), atol=TOLERANCE, rtol=TOLERANCE)
    assert jax.tree.structure(same) == jax.tree.structure(statistics)
    jax.tree.map(np.testing.assert_array_equal, same, statistics)

    network.train()
    for _ in range(2):
        logits, statistics = run(params, statistics, True)
        with torch.no_grad():
            expected = numpy(network(theirs))
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    values = values_from(network)
    for path, variable in nnx.to_flat_state(statistics):
        np.testing.assert_allclose(
            variable.get_value(), values[path], atol=TOLERANCE, rtol=TOLERANCE, err_msg=str(path)
        )


# -- meshes ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shallow(ResNet):
    """Two blocks, one with a strided shortcut: what is proved here has nothing to do with depth."""

    def blocks(self):
        plans = super().blocks()
        return [plans[0], next(plan for plan in plans if plan.shortcut)]


SMALL = Shallow(depth=20, num_classes=10, channels=1, width=8)
POOLED = Shallow(depth=18, num_classes=10, channels=1, width=8)


def image_batch(rows: int) -> Batch:
    """Random images whose brightness grows with the row: a device's mean is not the batch's."""
    rng = np.random.default_rng(1)
    images = rng.normal(size=(rows, 8, 8, 1)) * np.linspace(0.5, 2, rows)[:, None, None, None]
    return Batch(
        inputs=(images + np.linspace(-2, 2, rows)[:, None, None, None]).astype(np.float32),
        targets=rng.integers(0, 10, rows).astype(np.int32),
        loss_mask=(np.arange(rows) % 5 > 0).astype(np.float32),
    )


def step_on(layout, accumulation: int = 1, sizes: ResNet = SMALL):
    """Gradients, metrics and new statistics of a first step."""
    program = make_step(sizes, layout, accumulation=accumulation)
    batch = image_batch(16)
    state = program.create(0)
    placed = jax.device_put(batch, program.setup.batch_shardings(batch))
    with layout.active():
        gradients, metrics, statistics = jax.jit(program.setup.gradients)(state, placed)
    return jax.tree.map(np.asarray, (gradients, metrics, statistics))


@pytest.fixture(scope="module")
def one_device():
    return step_on(make_layout())


@pytest.mark.slow_cases("data8", "data_tensor", "fsdp8", "hsdp_zero2")
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 8},
        {"fsdp": 8, "zero": 3},
        {"data": 2, "fsdp": 4, "zero": 2},
        {"fsdp": 2, "tensor": 4, "zero": 3},
        {"data": 2, "tensor": 4, "zero": 1},
    ],
    ids=["data8", "fsdp8", "hsdp_zero2", "fsdp_tensor", "data_tensor"],
)
def test_losses_gradients_and_statistics_are_of_the_global_batch(one_device, layout):
    assert_same(step_on(make_layout(**layout)), one_device)


# A pooled stem is compared with PyTorch above, in the network of depth 18.
@pytest.mark.slow
def test_so_they_are_with_a_pooled_stem():
    one_device = step_on(make_layout(), sizes=POOLED)
    assert_same(step_on(make_layout(data=2, fsdp=4), sizes=POOLED), one_device)


def assert_same(found, expected):
    gradients, metrics, statistics = found
    expected_gradients, expected_metrics, expected_statistics = expected
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    # The largest gradient is about 1: this is a relative error of the network, not of a leaf.
    for ours, theirs in (
        (gradients, expected_gradients),
        (statistics, expected_statistics),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), ours, theirs
        )


def test_accumulation_carries_the_statistics_through_every_microbatch():
    _, _, statistics = step_on(make_layout(), accumulation=2)
    layout = make_layout()
    program = make_step(SMALL, layout)
    state, batch = program.create(0), image_batch(16)
    with layout.active():
        model, expected = program.setup.model(state), state.statistics
        run = jax.jit(
            lambda model, images, statistics: model(images, statistics, Execution(), train=True)[1]
        )
        for rows in (slice(0, None, 2), slice(1, None, 2)):
            expected = run(model, batch.inputs[rows], expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), statistics, expected)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "image", "giga_multiply_adds", "millions"),
    [
        # Multiply-adds and parameters that torchvision's documentation lists for its models.
        (18, 224, 1.814, 11.690),
        (34, 224, 3.664, 21.798),
        (50, 224, 4.089, 25.557),
        (101, 224, 7.801, 44.549),
        (152, 224, 11.514, 60.193),
    ],
)
def test_flops_and_parameters_are_the_published_ones(depth, image, giga_multiply_adds, millions):
    sizes = ResNet(depth=depth)
    assert sizes.flops((image, image, 3)) / 6e9 == pytest.approx(giga_multiply_adds, abs=1e-3)
    params = nnx.state(nnx.eval_shape(lambda: sizes.build(jax.random.key(0))), nnx.Param)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count / 1e6 == pytest.approx(millions, abs=1e-3)


def test_flops_equal_the_products_of_the_torch_network():
    torch = pytest.importorskip("torch")
    network, counted = torch_resnet(20, 10, 1), []

    def count(module, _inputs, output):
        weights = module.weight[0].numel() if output.ndim == 4 else module.in_features
        counted.append(output[0].numel() * weights)

    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        network(torch.zeros(2, 1, 27, 27))
    sizes = ResNet(depth=20, num_classes=10, channels=1)
    assert sizes.flops((27, 27, 1)) == 6 * sum(counted)


def test_a_batchs_variance_is_taken_about_the_running_mean():
    """About zero, float32 sums would lose the variance of what lies a thousand deviations away."""
    sizes, plan = ResNet(depth=20), Convolution(size=1, stride=1, channels_in=4, channels=4)
    graph, params, statistics = nnx.split(
        NormedConvolution(sizes, plan, jax.random.key(0)), nnx.Param, Statistic
    )
    params["kernel"] = params["kernel"].replace(np.eye(4, dtype=np.float32)[None, None])
    statistics["mean"] = statistics["mean"].replace(np.full(4, 1000, np.float32))
    images = np.random.default_rng(0).normal(size=(8, 6, 6, 4)) + 1001
    _, moved = nnx.merge(graph, params, statistics)(
        images.astype(np.float32), statistics, train=True
    )
    expected = 0.9 + 0.1 * images.reshape(-1, 4).var(0, ddof=1)
    np.testing.assert_allclose(moved["variance"].get_value(), expected, rtol=1e-4)


def test_a_block_with_zero_init_starts_as_its_shortcut():
    sizes = dataclasses.replace(SMALL, zero_init_residual=True)
    params = jax.jit(lambda key: nnx.state(sizes.build(key), nnx.Param))(jax.random.key(0))
    for i in range(2):
        first, last = (params["blocks"][i]["convolutions"][j]["scale"] for j in range(2))
        assert (first.get_value() == 1).all()
        assert (last.get_value() == 0).all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 0}, "ResNet.width=0; use at least 1"),
        ({"num_classes": 0}, "ResNet.num_classes=0; use at least 1"),
        ({"norm_momentum": 0.0}, "ResNet.norm_momentum=0.0; use above 0, at most 1"),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(UserError) as refusal:
        ResNet(**changes)
    assert str(refusal.value) == sentence
