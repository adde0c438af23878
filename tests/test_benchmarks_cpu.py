"""The CPU benchmark in tiny sizes: both sides' losses agree, and a difference is noticed."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
torch = pytest.importorskip("torch", reason="PyTorch is the peer of these rows")
pytest.importorskip("transformers", reason="transformers has some of the peers")
sys.path.insert(0, str(ROOT))

from benchmarks import cpu_rows, cpu_vs_torch, side_by_side  # noqa: E402 - after the path
from benchmarks.cpu_rows import ROWS, Row  # noqa: E402
from benchmarks.cpu_vs_torch import ours, theirs  # noqa: E402
from benchmarks.side_by_side import Runner, assert_equal_mathematics  # noqa: E402

STEPS = 10
TINY = {
    "gpt": cpu_rows.gpt("GPT", 2, 32, 4, 16, 4),
    "lora": cpu_rows.lora(2, 32, 4, 16, 4, 3),
    "mixtral": cpu_rows.mixtral(2, 32, 4, 2, 16, 4),
    "t5": cpu_rows.t5(167, 2, 32, 4, 16, 8, 4),
    "mamba": cpu_rows.mamba(2, 32, 16, 4, state=4),
    "bert": cpu_rows.bert(67, 2, 32, 4, 16, 8),
    "rnn": cpu_rows.recurrent("RNN", 2, 24, 12, 4),
    "gru": cpu_rows.recurrent("GRU", 2, 24, 12, 4),
    "lstm": cpu_rows.recurrent("LSTM", 2, 24, 12, 4),
    "mlp": cpu_rows.mlp((784, 24, 16, 10), 8),
    "autoencoder": cpu_rows.autoencoder((784, 24, 9), 8),
    "lenet": cpu_rows.lenet(32, 8),
    "alexnet": cpu_rows.alexnet(64, 4, width=8, head_width=16),
    "vgg11": cpu_rows.vgg11(32, 4, width=8),
    "vgg11_norm": cpu_rows.vgg11(32, 8, width=8, norm="batch"),
    "resnet20": cpu_rows.resnet20(16, 8, width=8),
    "resnet18": cpu_rows.resnet18(32, 8, width=8),
    "googlenet": cpu_rows.googlenet(32, 16, width=8),
    "vit": cpu_rows.vit(16, 4, 2, 32, 4, 8),
}
# Strong enough that ten steps show which parameters do not decay.
DECAY = {"adamw": 3.0, "sgd": 0.5}
RATE = {"adamw": 3e-3, "sgd": 1e-3}
# Behind 59 batch norms and ReLUs larger steps drift apart by rounding alone.
OWN_RATE = {"googlenet": 3e-4}
TINY = {
    name: dataclasses.replace(
        row,
        weight_decay=DECAY[row.optimizer],
        learning_rate=OWN_RATE.get(name, RATE[row.optimizer]),
    )
    for name, row in TINY.items()
}
GENERATION = cpu_rows.generation(2, 32, 4, 5, 9, 3)


def losses(runner: Runner) -> list[float]:
    return [runner.loss(runner.step(i)) for i in range(STEPS)]


@functools.cache
def own_losses(name: str, folder: Path) -> list[float]:
    """Ours, with the weights in the folder."""
    runner = ours(TINY[name])
    assert runner.save is not None
    runner.save(str(folder))
    return losses(runner)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch) -> None:
    """In small sizes more threads only wait for each other."""
    monkeypatch.setattr(side_by_side, "THREADS", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for the weights of each row."""
    return functools.cache(lambda name: tmp_path_factory.mktemp(name))


def assert_equal(row: Row, folder: Path, own: list[float], other: list[float]) -> None:
    assert_equal_mathematics({"jaxtrain": own, "torch": other}, row.tolerance)
    # Where training hardly changes the losses, they show no error of a gradient or the optimizer.
    frozen = losses(theirs(dataclasses.replace(row, learning_rate=0.0), str(folder)))
    changed = max(abs(a - b) / b for a, b in zip(other, frozen, strict=True))
    assert changed > 10 * row.tolerance, (other, frozen)


# They compile for long, and the other rows run the same code.
_SLOW = (
    "alexnet", "vgg11", "vgg11_norm", "googlenet", "resnet18", "resnet20", "vit", "lora", "mixtral",
    "t5", "mamba", "bert", "rnn", "gru", "autoencoder",
)  # fmt: skip


@pytest.mark.slow_cases("gpt", "lstm", *_SLOW, "lenet")
@pytest.mark.parametrize("name", TINY)
def test_ten_losses_are_those_of_pytorch(name: str, folders) -> None:
    row, folder = TINY[name], folders(name)
    assert_equal(row, folder, own_losses(name, folder), losses(theirs(row, str(folder))))


# One of each kind of peer: what others compute is compared above. No training depends on it.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt", "lora", "mixtral", "t5", "mamba", "lstm", "mlp", "lenet", "resnet20"]
)
def test_torch_compile_traces_the_peer(name: str, folders) -> None:
    row, folder = TINY[name], folders(name)
    own = own_losses(name, folder)
    torch.compiler.reset()
    assert_equal(row, folder, own, losses(theirs(row, str(folder), backend="eager")))


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 2e-2}, {"weight_decay": 1.0}, {"clip_norm": 0.01}], ids=str
)
def test_another_optimizer_is_noticed(changes: dict[str, float], folders) -> None:
    folder = folders("mlp")
    own = own_losses("mlp", folder)
    other = losses(theirs(dataclasses.replace(TINY["mlp"], **changes), str(folder)))
    with pytest.raises(SystemExit, match="apart"):
        assert_equal_mathematics({"jaxtrain": own, "torch": other}, TINY["mlp"].tolerance)


def test_a_row_whose_losses_differ_leaves_the_others(tmp_path, monkeypatch, capsys) -> None:
    side = {"step_ms": {"median": 2.5, "p10": 2.0, "p90": 3.0}, "images_per_second": 1.0,
            "cpu_ms": 4.0, "peak_mib": 5.0, "first_step_seconds": 6.0}  # fmt: skip

    def compare(name: str, **how: object) -> dict:
        if name == "mlp":
            assert_equal_mathematics({"jaxtrain": [1.0], "torch eager": [2.0]}, 1e-4)
        return {"row": ROWS[name].title, "sides": {"jaxtrain": side}}

    monkeypatch.setattr(cpu_vs_torch, "compare", compare)
    file, rows = tmp_path / "found.json", ["rnn", "mlp", "lenet"]
    monkeypatch.setattr(sys, "argv", ["cpu_vs_torch", "--json", str(file), "--rows", *rows])
    with pytest.raises(SystemExit, match="^mlp: the losses are 1.0e[+]00 apart"):
        cpu_vs_torch.main()
    titles = [ROWS[name].title for name in ("rnn", "lenet")]
    assert [one["row"] for one in json.loads(file.read_text())["results"]] == titles
    printed = capsys.readouterr().out
    assert [printed.count(ROWS[name].title) for name in rows] == [1, 0, 1]


def test_every_peer_is_compared_here() -> None:
    assert {row.peer for row in ROWS.values()} == {row.peer for row in (*TINY.values(), GENERATION)}


# Eager mode computes what the other case computes.
@pytest.mark.slow_cases("eager")
@pytest.mark.parametrize("backend", [None, "eager"])
def test_generated_tokens_are_those_of_pytorch(backend: str | None, tmp_path) -> None:
    runner = ours(GENERATION)
    assert runner.save is not None
    runner.save(str(tmp_path))
    own, other = losses(runner), losses(theirs(GENERATION, str(tmp_path), backend=backend))
    assert_equal_mathematics({"jaxtrain": own, "torch": other}, GENERATION.tolerance)
    assert np.array(own).shape == (STEPS, 3, 9)
    assert len(np.unique(own)) > 5
    own[-1][-1][-1] += 1
    with pytest.raises(SystemExit, match="apart"):
        assert_equal_mathematics({"jaxtrain": own, "torch": other}, GENERATION.tolerance)
