"""GoogLeNet equals PyTorch's layers with all three heads, on every mesh one device."""

import jax
import numpy as np
import pytest
from against_torch import NORM, Twin, assert_same_step, draw_norms, in_our_layout, step_on
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.googlenet import HEADS_AFTER, MODULES, GoogLeNet
from jaxtrain.nn.convnet import Convolution


def images(side: int, channels: int, classes: int, *, rows: int = 8, seed: int = 2) -> Batch:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, side, side, channels)).astype(np.float32)
    labels = rng.integers(0, classes, rows).astype(np.int32)
    return Batch(inputs, labels, np.ones(rows, np.float32))


def torch_googlenet(torch, sizes):
    """As torchvision writes it, from torch.nn alone; its 5x5 and its poolings are the paper's."""
    functional, nn = torch.nn.functional, torch.nn
    relu = functional.relu

    class Conv(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.conv = nn.Conv2d(p.channels_in, p.channels, p.size, p.stride, p.padding)
            self.norm = nn.BatchNorm2d(p.channels, eps=1e-3) if sizes.norm else None

        def forward(self, x):
            x = self.conv(x)
            return relu(x if self.norm is None else self.norm(x))

    class Module(nn.Module):
        def __init__(self, plan):
            super().__init__()
            self.all = nn.ModuleList(map(Conv, plan))

        def forward(self, x):
            c = self.all
            pooled = functional.max_pool2d(x, 3, 1, 1)
            return torch.cat([c[0](x), c[2](c[1](x)), c[4](c[3](x)), c[5](pooled)], 1)

    class Head(nn.Module):
        def __init__(self, channels):
            super().__init__()
            hidden = sizes.scale_width(128)
            self.convolution = Conv(Convolution(channels, hidden, 1, padding=0))
            self.dense = nn.Linear(16 * hidden, sizes.scale_width(1024))
            self.out = nn.Linear(sizes.scale_width(1024), sizes.num_classes)

        def forward(self, x):
            x = self.convolution(functional.adaptive_avg_pool2d(x, 4))
            return self.out(relu(self.dense(x.flatten(1))))

    def pool(x):
        return functional.max_pool2d(x, 3, 2, ceil_mode=True)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.ModuleList(Conv(p) for p in sizes.stem if isinstance(p, Convolution))
            self.modules_ = nn.ModuleList(Module(p) for p in sizes.modules if p is not None)

            def width(i):
                return sum(sizes.modules[i][j].channels for j in (0, 2, 4, 5))

            self.heads = nn.ModuleList(Head(width(i)) for i in HEADS_AFTER)
            self.head = nn.Linear(width(-1), sizes.num_classes)

        def forward(self, x):
            x = pool(self.stem[0](x))
            x = pool(self.stem[2](self.stem[1](x)))
            modules, heads, answers = iter(self.modules_), iter(self.heads), []
            for i, counts in enumerate(MODULES):
                x = pool(x) if counts is None else next(modules)(x)
                if self.training and i in HEADS_AFTER:
                    answers.append(next(heads)(x))
            answer = self.head(x.mean((2, 3)))
            return (answer, *answers) if self.training else answer

    torch.manual_seed(0)
    network = Network()
    for module in network.modules():
        if isinstance(module, nn.Conv2d):  # PyTorch's own spread dies out in so many layers
            nn.init.kaiming_normal_(module.weight)
    draw_norms(network)
    return network


def twin(torch, sizes):
    side = 4

    def ours(name):
        name = name.replace("modules_.", "modules.").replace(".conv.", ".")
        *path, last = name.split(".")
        if path[-1] == "norm":
            last = NORM.get(last)
        return None if last is None else "/".join([*path, last])

    def layout(path, value):
        value = in_our_layout(value)
        if path.startswith("heads") and path.endswith("dense/weight"):
            value = value.reshape(-1, side, side, value.shape[1]).transpose(1, 2, 0, 3)
            value = value.reshape(-1, value.shape[3])
        return value

    return Twin(sizes, torch_googlenet(torch, sizes), ours, layout)


OFF = {"dropout": 0.0, "auxiliary_dropout": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "side", "seed"),
    [
        (GoogLeNet(num_classes=3, width=5, channels=1, **OFF), 39, 2),
        # Images of which no number comes within rounding of the edge of a relu or of a maximum,
        # where two gradients are right: of others PyTorch's float32 and float64 differ by 4e-2.
        (GoogLeNet(num_classes=10, width=12, channels=1, norm="batch", **OFF), 48, 1),
    ],
    ids=["odd", "batch_norm"],
)
def test_all_heads_and_every_gradient_equal_torch(sizes, side, seed):
    torch = pytest.importorskip("torch")
    batch = images(side, sizes.channels, sizes.num_classes, seed=seed)
    pair = twin(torch, sizes)
    targets = torch.tensor(batch.targets).long()

    def loss(answers):
        own, first, second = (torch.nn.functional.cross_entropy(a, targets) for a in answers)
        return own + 0.3 * (first + second)

    before_norms = ()
    if sizes.norm:  # a bias before a batch norm moves nothing
        names = [name for name, _ in pair.network.named_parameters() if ".conv." in name]
        before_norms = tuple(pair.ours(name) for name in names if name.endswith("bias"))
    theirs = torch.tensor(batch.inputs.transpose(0, 3, 1, 2))
    pair.compare(batch, theirs, loss, same=before_norms)


def test_flops_are_those_of_the_torch_network_and_parameters_the_published_ones():
    torch = pytest.importorskip("torch")
    sizes = GoogLeNet(num_classes=10, width=8)
    network, counted = torch_googlenet(torch, sizes), []

    def count(module, _inputs, output):
        weights = module.weight[0].numel() if output.ndim == 4 else module.in_features
        counted.append(output[0].numel() * weights)

    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        network(torch.zeros(2, 3, 73, 73))
    assert sizes.flops((73, 73, 3)) == 6 * sum(counted)
    shapes = nnx.state(nnx.eval_shape(lambda: GoogLeNet().build(jax.random.key(0))), nnx.Param)
    count = {
        name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in shapes.items()
    }
    # Of BVLC's model: 13,378,280, and 6,998,552 without the heads on the way.
    assert sum(count.values()) == 13_378_280
    assert sum(count.values()) - count["heads"] == 6_998_552


@pytest.mark.slow
def test_a_mesh_computes_and_drops_the_same():
    """Of all three heads, on a mesh of every pair of the axes that a convolution may have."""
    sizes, batch = GoogLeNet(num_classes=10, width=8, channels=1), images(32, 1, 10)
    found = step_on(sizes, batch, data=2, fsdp=2, tensor=2, zero=3)
    assert_same_step(found, step_on(sizes, batch))


def test_images_that_are_too_small_are_refused():
    with pytest.raises(UserError, match="GoogLeNet on images of 0 pixels a side; use at least"):
        GoogLeNet().flops((0, 4, 3))
