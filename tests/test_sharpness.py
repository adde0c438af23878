"""Sharpness-aware minimization: PyTorch's steps, on every mesh, and what it is rejected with."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import make_layout, make_step, transformed

from jaxtrain.data.batch import Batch
from jaxtrain.models.feed_forward.mlp import MLP
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.offload import Offload
from jaxtrain.training.offload.on_host import offload_to_host
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.elementwise import SGD
from jaxtrain.training.transforms import minimize_sharpness

WIDTHS, RADIUS, RATE, STEPS = (8, 16, 4), 0.2, 0.1, 10
MODEL = MLP(widths=WIDTHS, activation="tanh")


def batches() -> list[Batch]:
    """Vectors of which every fifth does not count."""
    rng, found = np.random.default_rng(0), []
    for _ in range(STEPS):
        inputs = rng.normal(size=(16, WIDTHS[0])).astype(np.float32)
        targets = rng.integers(0, WIDTHS[-1], 16).astype(np.int32)
        found.append(Batch(inputs, targets, (np.arange(16) % 5 > 0).astype(np.float32)))
    return found


def program_on(radius: float, offload: bool = False, **sizes: int) -> Any:
    settings = Optimizer(
        rule=SGD(momentum=0.9), learning_rate=RATE, weight_decay=0.01, clip_norm=None
    )
    optimizer = make_optimizer(settings, optax.constant_schedule(RATE))
    program = make_step(MODEL, make_layout(**sizes), optimizer=optimizer)
    if offload:
        program = transformed(program, offload_to_host(Offload(parameters="host")))
    return transformed(program, minimize_sharpness(radius))


def path(program: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[dict]]:
    """The first parameters, those after all steps, and the metrics of each."""

    def values(state: Any) -> dict[str, np.ndarray]:
        flat = jax.tree_util.tree_leaves_with_path(jax.device_get(state.params))
        return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in flat}

    step, state, metrics = CompiledStep(program), program.create(0), []
    first = values(state)
    with program.setup.layout.active():
        for batch in batches():
            placed = jax.device_put(batch, program.setup.batch_shardings(batch))
            state, found = step(state, placed)
            metrics.append({name: float(x) for name, x in found.items()})
    return first, values(state), metrics


def torchs(first: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[float], list[float]]:
    """The same steps in PyTorch: up along the gradient, the gradient there, back, and its SGD."""
    torch = pytest.importorskip("torch")
    names = {name.removesuffix("/value") for name in first}
    params = {n: torch.nn.Parameter(torch.tensor(first[f"{n}/value"].copy())) for n in names}
    decayed = [p for p in params.values() if p.ndim == 2]
    others = [p for p in params.values() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True)
    losses, rises = [], []
    for batch in batches():
        counted = np.flatnonzero(batch.loss_mask)

        def loss(batch=batch, counted=counted):
            x = torch.tensor(batch.inputs[counted])
            x = torch.tanh(x @ params["layers/0/weight"] + params["layers/0/bias"])
            x = x @ params["head/weight"] + params["head/bias"]
            told = torch.tensor(batch.targets[counted]).long()
            return torch.nn.functional.cross_entropy(x, told)

        optimizer.zero_grad()
        here = loss()
        here.backward()
        with torch.no_grad():
            length = torch.sqrt(sum((p.grad**2).sum() for p in params.values()))
            back = {n: p.clone() for n, p in params.items()}
            for p in params.values():
                p += RADIUS * p.grad / length
        optimizer.zero_grad()
        there = loss()
        there.backward()
        with torch.no_grad():
            for n, p in params.items():
                p.copy_(back[n])
        optimizer.step()
        losses.append(here.item())
        rises.append(there.item() - here.item())
    return {f"{n}/value": p.detach().numpy() for n, p in params.items()}, losses, rises


@pytest.mark.parametrize(
    ("sizes", "offload"),
    [
        pytest.param({"fsdp": 1}, False, marks=pytest.mark.slow),
        ({"data": 2, "fsdp": 2, "tensor": 2}, False),
        ({"fsdp": 2}, True),
    ],
    ids=str,
)
def test_it_is_pytorchs_on_every_mesh(sizes, offload):
    first, found, metrics = path(program_on(RADIUS, offload, **sizes))
    expected, losses, rises = torchs(first)
    assert [one["loss"] for one in metrics] == pytest.approx(losses, rel=1e-5)
    assert [one["sharpness"] for one in metrics] == pytest.approx(rises, abs=1e-6)
    assert min(rises) > 0.01
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
