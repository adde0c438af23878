"""MLP and autoencoder equal PyTorch's layers, on every mesh one device, with dropout too."""

import functools

import jax
import numpy as np
import pytest
from against_torch import Twin, assert_same_step, step_on

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.models.feed_forward.autoencoder import Autoencoder
from jaxtrain.models.feed_forward.mlp import MLP
from jaxtrain.training.objectives.objective import objective_named

ROWS = 16


def vectors(features: int, outputs: int, *, labels: bool) -> Batch:
    """Vectors of which every fifth does not count, whose targets are no numbers."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, outputs, ROWS).astype(np.int32)
    if not labels:
        targets = rng.normal(size=(ROWS, outputs)).astype(np.float32)
    mask = (np.arange(ROWS) % 5 > 0).astype(np.float32)
    inputs = rng.random((ROWS, features)).astype(np.float32)
    if not labels:
        targets[mask == 0] = np.nan
    return Batch(inputs, targets, mask)


def torch_chain(torch, widths, activation, *, names):
    """Linear layers with an activation between them, under these names."""
    torch.manual_seed(0)
    functions = {
        "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu,
        "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
        "none": lambda x: x,
    }  # fmt: skip

    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            pairs = zip(widths, widths[1:], strict=False)
            self.all = torch.nn.ModuleList(torch.nn.Linear(i, o) for i, o in pairs)

        def forward(self, x):
            *hidden, last = self.all
            for layer, name in zip(hidden, activation, strict=True):
                x = functions[name](layer(x))
            return functions[activation.last](last(x))

    def ours(name: str) -> str:
        _, place, kind = name.split(".")
        return f"{names[int(place)]}/{kind}"

    return Chain(), ours


class Functions(list):
    """Of the hidden layers, and that of the last one."""

    last = "none"


@pytest.mark.parametrize(
    ("widths", "activation", "objective"),
    [
        ((16, 10), "relu", "classification"),  # logistic regression
        ((13, 1), "relu", "regression"),  # linear regression
        ((7, 24, 5, 3), "tanh", "classification"),
        ((8, 16, 3), "sigmoid", "regression"),
        ((8, 16, 16, 4), "gelu", "classification"),
        ((9, 11, 2), "silu", "regression"),
    ],
)
def test_an_mlp_equals_torch(widths, activation, objective):
    torch = pytest.importorskip("torch")
    pair, batch, loss = mlp_pair(torch, widths, activation, objective)
    pair.compare(batch, torch.tensor(batch.inputs), loss)


def mlp_pair(torch, widths, activation, objective):
    """An MLP beside PyTorch's, a batch for it, and the mean loss of PyTorch's answers."""
    names = [f"layers/{i}" for i in range(len(widths) - 2)] + ["head"]
    network, ours = torch_chain(
        torch, widths, Functions([activation] * (len(widths) - 2)), names=names
    )
    labels = objective == "classification"
    batch = vectors(widths[0], widths[-1], labels=labels)
    counted = np.flatnonzero(batch.loss_mask)

    def loss(answers):
        told = torch.tensor(batch.targets[counted])
        if labels:
            return torch.nn.functional.cross_entropy(answers[counted], told.long())
        return torch.nn.functional.mse_loss(answers[counted], told)

    sizes = MLP(widths=widths, activation=activation, objective=objective)
    return Twin(sizes, network, ours), batch, loss


@pytest.mark.parametrize(
    ("widths", "activation", "objective", "falls"),
    [
        ((11, 24, 9, 5), "silu", "classification", 0.02),
        ((6, 17, 2), "tanh", "regression", 0.1),
        ((5, 3), "relu", "classification", 0.02),  # logistic regression
    ],
)
def test_thirty_steps_have_the_losses_of_torch(widths, activation, objective, falls):
    torch = pytest.importorskip("torch")
    pair, batch, loss = mlp_pair(torch, widths, activation, objective)
    pair.train(batch, torch.tensor(batch.inputs), loss, rate=0.1, falls=falls)


@pytest.mark.parametrize(
    ("widths", "reaches"),
    [((32, 8, 3), "sigmoid"), ((13, 5), "linear"), ((16, 24, 8, 2), "linear")],
)
def test_an_autoencoder_equals_torch(widths, reaches):
    torch = pytest.importorskip("torch")
    pair, batch, loss = autoencoder_pair(torch, widths, reaches)
    pair.compare(batch, torch.tensor(batch.inputs), loss)


def test_thirty_steps_of_an_autoencoder_have_the_losses_of_torch():
    torch = pytest.importorskip("torch")
    pair, batch, loss = autoencoder_pair(torch, (10, 24, 3), "linear")
    pair.train(batch, torch.tensor(batch.inputs), loss, rate=0.1, falls=0.1)


def autoencoder_pair(torch, widths, reaches):
    """As `mlp_pair`."""
    there = len(widths) - 1
    names = [f"encoder/{i}" for i in range(there)]
    names += [f"decoder/{i}" for i in range(there - 1)] + ["head"]
    functions = Functions(["relu"] * (there - 1) + ["none"] + ["relu"] * (there - 1))
    functions.last = "sigmoid" if reaches == "sigmoid" else "none"
    network, ours = torch_chain(torch, (*widths, *widths[-2::-1]), functions, names=names)
    batch = vectors(widths[0], 10, labels=True)
    counted, inputs = np.flatnonzero(batch.loss_mask), torch.tensor(batch.inputs)
    sizes = Autoencoder(widths=widths, reaches=reaches)

    def loss(answers):
        return torch.nn.functional.mse_loss(answers[counted], inputs[counted])

    return Twin(sizes, network, ours), batch, loss


# -- meshes ---------------------------------------------------------------------------------------

DROPPING = MLP(widths=(16, 32, 24, 10), dropout=0.5)
NARROW = Autoencoder(widths=(16, 8, 3))
BATCH = vectors(16, 10, labels=True)


@pytest.fixture(scope="module", params=[DROPPING, NARROW], ids=["mlp", "autoencoder"])
def alone(request):
    return request.param, step_on(request.param, BATCH)


# The cases that are left run the same code.
@pytest.mark.slow_cases("autoencoder-{'fsdp': 2, 'tensor': 4, 'zero': 1}")
@pytest.mark.slow_cases(
    "mlp-{'data': 8}",
    "autoencoder-{'fsdp': 4, 'tensor': 2, 'zero': 3}",
    "mlp-{'fsdp': 4, 'tensor': 2, 'zero': 3}",
    "mlp-{'fsdp': 2, 'tensor': 4, 'zero': 1}",
    "autoencoder-{'data': 8}",
    "autoencoder-{'data': 2, 'fsdp': 2, 'tensor': 2, 'zero': 2, 'accumulation': 2}",
)
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 8},
        {"fsdp": 4, "tensor": 2, "zero": 3},
        {"data": 2, "fsdp": 2, "tensor": 2, "zero": 2, "accumulation": 2},
        {"fsdp": 2, "tensor": 4, "zero": 1},
    ],
    ids=str,
)
def test_every_mesh_computes_and_drops_the_same(alone, layout):
    sizes, expected = alone
    assert_same_step(step_on(sizes, BATCH, **layout), expected)


def test_every_step_drops_others_and_evaluation_none():
    step = functools.partial(step_on, DROPPING, BATCH)
    first, again, second = step(step=0), step(step=0), step(step=1)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first[1]["loss"] != second[1]["loss"]


def test_dropout_leaves_the_mean_and_drops_the_rate():
    from jaxtrain.nn.dropout import Draws, dropout  # noqa: PLC0415

    draws = Draws.of_step(3, 5, np.arange(64))
    x = np.ones((64, 4000), np.float32)
    dropped = np.asarray(dropout(x, 0.3, draws, 0))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.7)}
    # 256,000 draws: five standard deviations of their share.
    assert abs((dropped == 0).mean() - 0.3) < 5 * np.sqrt(0.21 / dropped.size)
    # Neither rows nor places are alike.
    assert len(np.unique(dropped, axis=0)) == 64
    assert (dropped != np.asarray(dropout(x, 0.3, draws, 1))).mean() > 0.3
    np.testing.assert_array_equal(dropout(x, 0.3, None, 0), x)
    rows = Draws.of_step(3, 5, np.arange(64)[5:9])
    np.testing.assert_array_equal(dropout(x[5:9], 0.3, rows, 0), dropped[5:9])


# -- rejections


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"widths": (4,)}, "MLP.widths=(4,); use at least two: (inputs, outputs)"),
        ({"widths": (4, 0, 2)}, "MLP.widths=(4, 0, 2); use widths of at least 1"),
        ({"dropout": 1.0}, "MLP.dropout=1.0; use 0 to below 1, such as 0.5"),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(UserError) as refusal:
        MLP(**changes)
    assert str(refusal.value) == sentence


def test_the_objectives_mean_and_what_they_say_of_targets():
    told = objective_named("regression")
    sums = {"loss": 6.0, "absolute_error": 3.0, "weight": 12.0}
    assert told.evaluation(sums) == {"eval_loss": 0.5, "eval_absolute_error": 0.25}
    labels, numbers = BATCH.targets, np.zeros((4, 3), np.float32)
    model = MLP(widths=(16, 10), objective="regression")
    assert "the data's targets are labels" in next(told.validate_targets(labels, model))
    assert "set the last of MLP.widths to 3" in next(told.validate_targets(numbers, model))
    of_labels = objective_named("classification")
    assert "targets are real values" in next(of_labels.validate_targets(numbers, MLP()))
    assert not list(of_labels.validate_targets(labels, MLP()))
