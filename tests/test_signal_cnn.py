"""Convolutions along signals equal PyTorch's Conv1d, and one device on every mesh."""

import dataclasses

import numpy as np
import pytest
from against_torch import Twin, assert_same_step, in_our_layout, step_on

from jaxtrain import load_config
from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.signal_cnn import SignalCNN
from jaxtrain.training.preflight.preflight import check

SHAPES = {
    "mnist1d": SignalCNN(),
    "odd": SignalCNN(features=23, outputs=3, filters=(7, 8), sizes=(4, 3), stride=1, padding=0),
    "one": SignalCNN(features=9, outputs=5, filters=(16,), sizes=(3,), stride=3, padding=2),
}


def signals(sizes: SignalCNN, rows: int = 8) -> Batch:
    rng = np.random.default_rng(2)
    return Batch(
        rng.normal(size=(rows, sizes.features)).astype(np.float32),
        rng.integers(0, sizes.outputs, rows).astype(np.int32),
        (np.arange(rows) % 5 > 0).astype(np.float32),
    )


def twin(torch, sizes):
    """The authors' network, of any sizes."""
    nn = torch.nn

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            channels, self.convolutions = 1, nn.ModuleList()
            for filters, size in zip(sizes.filters, sizes.sizes, strict=True):
                layer = nn.Conv1d(channels, filters, size, sizes.stride, sizes.padding)
                self.convolutions.append(layer)
                channels = filters
            self.head = nn.LazyLinear(sizes.outputs)

        def forward(self, x):
            x = x[:, None]
            for layer in self.convolutions:
                x = layer(x).relu()
            return self.head(x.flatten(1))

    torch.manual_seed(0)
    network, channels = Network(), sizes.filters[-1]
    network(torch.zeros(1, sizes.features))

    def layout(path, value):
        if value.ndim == 3:
            return value.transpose(2, 1, 0)
        value = in_our_layout(value)
        if path == "head/weight":  # what is flattened is [C, W] there and [W, C] here
            value = value.reshape(channels, -1, sizes.outputs).swapaxes(0, 1)
            value = value.reshape(-1, sizes.outputs)
        return value

    return Twin(sizes, network, lambda name: name.replace(".", "/"), layout)


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_every_gradient_equal_torch(name):
    torch = pytest.importorskip("torch")
    sizes = SHAPES[name]
    batch, pair = signals(sizes), twin(torch, sizes)
    counted = np.flatnonzero(batch.loss_mask)
    told = torch.tensor(batch.targets[counted]).long()
    pair.compare(
        batch, torch.tensor(batch.inputs),
        lambda x: torch.nn.functional.cross_entropy(x[counted], told),
    )  # fmt: skip


def test_thirty_steps_have_the_losses_of_torch():
    torch = pytest.importorskip("torch")
    sizes = SignalCNN(features=17, outputs=4, filters=(6, 9), sizes=(2, 5), stride=1, padding=2)
    batch = signals(sizes)
    counted = np.flatnonzero(batch.loss_mask)
    told = torch.tensor(batch.targets[counted]).long()
    twin(torch, sizes).train(
        batch, torch.tensor(batch.inputs),
        lambda x: torch.nn.functional.cross_entropy(x[counted], told), rate=0.05, falls=0.3,
    )  # fmt: skip


def test_flops_are_those_of_the_products():
    """By hand: 40 places become 19, 10 and 5."""
    products = 19 * 5 * 25 + 10 * 3 * 25 * 25 + 5 * 3 * 25 * 25 + 5 * 25 * 10
    assert SignalCNN().flops((40,)) == 6 * products


WIDE = SignalCNN(features=24, filters=(16, 24), sizes=(3, 3))


@pytest.fixture(scope="module")
def alone():
    return step_on(WIDE, signals(WIDE))


@pytest.mark.parametrize(
    "layout", [{"fsdp": 4, "tensor": 2, "zero": 3}, {"data": 2, "tensor": 4, "zero": 1}], ids=str
)
def test_every_mesh_computes_the_same(layout, alone):
    assert_same_step(step_on(WIDE, signals(WIDE), **layout), alone)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"features": 2}, "SignalCNN.features=2: the signal is too short .* at least 3"),
        ({"sizes": (3,)}, r"SignalCNN.filters=\(25, 25, 25\) with SignalCNN.sizes=\(3,\)"),
        ({"filters": (0,), "sizes": (3,)}, "use numbers of at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        SignalCNN(**changes)


def test_signals_of_another_length_are_refused():
    config = load_config("mlp_digits")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, model=SignalCNN()))
    with pytest.raises(
        UserError, match=r"values, but those .* have 64; set SignalCNN.features to 64"
    ):
        check(config, device_count=1, platform="cpu")
