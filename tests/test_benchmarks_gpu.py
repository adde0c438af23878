"""The GPU benchmark in tiny sizes: equal mathematics, what fails is said, the best are compared."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("torch", reason="PyTorch is the peer of these rows")
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_torch, gpu_vs_torch  # noqa: E402 - after the path
from benchmarks.gpu_bytes import bytes_moved  # noqa: E402
from benchmarks.gpu_rows import CELLS, ROWS, TRAIN, Task  # noqa: E402
from benchmarks.side_by_side import assert_equal_mathematics  # noqa: E402

STEPPED = ("gpt2_124m", "llama_8b", "mixtral")
# One process of ours for all rows: it has one device, where the tests have eight.
CHILD = """
import json, sys
from benchmarks import gpu_ours
from benchmarks.gpu_rows import Task
for task in json.loads(sys.argv[1]):
    *_, found = gpu_ours.run(Task(**task))
    print("RESULT", json.dumps(found))
"""


def step_task(row: str, folder: Path, side: str, setting: str = "") -> Task:
    """A train step in float32."""
    return Task(row, side, setting, True, "float32", 0.05, str(folder / f"{row}.npz"))


def operations(row: str, side: str) -> Task:
    """A row of single operations."""
    return Task(row, side, None, True, "bfloat16", 0.05, "")


def whole(found: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """A whole result."""
    *_, one = found
    return one


def run_ours(asked: dict[str, Task]) -> dict[str, Any]:
    """Our results by row."""
    own = json.dumps([dataclasses.asdict(task) for task in asked.values()])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, own], capture_output=True, text=True, cwd=ROOT,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(zip(asked, (json.loads(line[7:]) for line in lines), strict=True))


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The folder with the weights, and our results by row."""
    folder = tmp_path_factory.mktemp("weights")
    steps = {row: step_task(row, folder, "jaxtrain") for row in STEPPED}
    return folder, run_ours(steps | {row: operations(row, "jaxtrain") for row in CELLS})


def assert_steps_are_equal(own: dict[str, Any], task: Task) -> None:
    losses = {"jaxtrain": own["losses"], "torch": whole(gpu_torch.run(task))["losses"]}
    tolerance = gpu_vs_torch.TOLERANCE["float32"]
    assert_equal_mathematics(losses, tolerance)
    # Ten losses that differ by far more than the two sides may.
    first, *_, last = losses["torch"]
    assert len(losses["torch"]) == 10
    assert abs(last - first) > 10 * tolerance * first
    assert own["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("row", STEPPED)
def test_train_steps_are_those_of_pytorch(row: str, ours) -> None:
    folder, found = ours
    assert_steps_are_equal(found[row], step_task(row, folder, "torch", "eager, cuDNN"))


@pytest.mark.slow  # 50 layers are compiled one by one
def test_resnet_50_is_that_of_pytorch(tmp_path) -> None:
    found = run_ours({"resnet50": step_task("resnet50", tmp_path, "jaxtrain")})["resnet50"]
    assert_steps_are_equal(found, step_task("resnet50", tmp_path, "torch", "eager, cuDNN"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", gpu_torch.SETTINGS)
@pytest.mark.rotated("peers")
def test_every_setting_of_pytorch_is_the_same_mathematics(setting: str, ours) -> None:
    folder, found = ours
    task = step_task("gpt2_124m", folder, "torch", setting)
    rounded = dataclasses.replace(task, compute="bfloat16")
    losses = {
        "jaxtrain": found["gpt2_124m"]["losses"],
        "torch": whole(gpu_torch.run(rounded))["losses"],
    }
    apart = assert_equal_mathematics(losses, gpu_vs_torch.TOLERANCE["bfloat16"])
    assert apart > 1e-6  # it did compute in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("row", CELLS)
def test_operations_give_the_same_numbers(row: str, ours) -> None:
    sides = {"jaxtrain": ours[1][row]}
    if row not in gpu_vs_torch.ALONE:
        sides["torch"] = whole(gpu_torch.run(operations(row, "torch")))
    done = [c for side in sides.values() for c in side["cells"] if c["seconds"]]
    assert len(done) >= 2
    assert gpu_vs_torch.disagreeing(sides) == []
    if row in ("ceilings", "attention", "loss_head", "remat"):
        checked = next(c for c in done if c["check"])
        checked["check"][0] += 0.5 + abs(checked["check"][0])
        assert len(gpu_vs_torch.disagreeing(sides)) >= 1
    out = gpu_vs_torch.cells_table([{"row": row, "says": row, "sides": sides}])
    assert out.row_count >= len(done)


@pytest.mark.slow
def test_a_kernel_that_cannot_is_said_and_not_fatal(ours) -> None:
    cells = ours[1]["attention"]["cells"]
    refused = [c for c in cells if c["error"]]
    assert {c["setting"] for c in refused} == {"cudnn", "triton"}
    assert "runs on NVIDIA GPUs, not on 'cpu'" in refused[0]["error"]


@pytest.mark.slow
def test_the_command_runs_sides_in_fresh_processes_and_goes_on_after_a_failure(tmp_path) -> None:
    file = tmp_path / "found.jsonl"
    words = ["--tiny", "--rows", "gpt2_124m", "ceilings", "--seconds", "0.1", "--json", str(file)]
    # Too little time for the first row: it is reported, and the file has both rows.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_vs_torch", "--minutes", "0.02", *words],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    first, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert first["versions"]["torch"]
    assert [row["row"] for row in rows] == ["gpt2_124m", "ceilings"]
    assert {side["error"] for row in rows for side in row["sides"].values()} == {"out of time"}
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tiny sizes: these figures say nothing about speed." in done.stdout


def test_the_words_of_a_failure() -> None:
    xla = "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 GiB"
    cuda = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    for said in (xla, cuda):
        assert gpu_vs_torch.why_it_failed(f"Traceback\n{said}\n", 1) == "out of memory"
    assert gpu_vs_torch.why_it_failed("a\nKeyError: 'x'\n", 1) == (
        "ended with status 1: KeyError: 'x'"
    )
    ok = {"says": "a", "sides": {"torch x": {"error": "out of memory"}, "jaxtrain": {}}}
    assert gpu_vs_torch.failures([ok]) == []
    crashed = {"says": "b", "sides": {"torch x": {"error": "ended with status 1: no words"}}}
    unequal = {"says": "c", "error": "the losses are 1 apart", "sides": {}}
    assert gpu_vs_torch.failures([ok, crashed, unequal]) == [
        "c: the losses are 1 apart", "b, torch x: ended with status 1: no words",
    ]  # fmt: skip


def test_the_best_of_each_side_are_compared() -> None:
    sides = {
        "jaxtrain": {"seconds": [2.0, 2.0, 3.0]},
        "jaxtrain unrolled": {"seconds": [1.0, 1.0, 9.0]},
        "torch compile, flash": {"seconds": [4.0, 3.0, 3.0]},
        "torch eager": {"error": "out of memory"},
    }
    assert gpu_vs_torch.ratio({"sides": sides}) == 3.0
    # Unequal mathematics has no ratio, nor has a row without a peer.
    assert gpu_vs_torch.ratio({"sides": sides, "error": "the losses are apart"}) is None
    assert gpu_vs_torch.ratio({"sides": {"jaxtrain": sides["jaxtrain"]}}) is None


def test_rows_have_the_published_sizes() -> None:
    assert {*TRAIN, *CELLS} == set(ROWS)
    parameters = {
        "gpt2_124m": 124e6, "gpt2_1558m": 1558e6, "llama_1b": 1236e6, "llama_3b": 3213e6,
        "llama_8b": 8030e6,
    }  # fmt: skip
    for name, expected in parameters.items():
        s = TRAIN[name].sizes
        V, L, D = s["vocab_size"], s["num_layers"], s["embed_dim"]
        if TRAIN[name].family == "GPT":
            count = V * D + TRAIN[name].length * D + L * 12 * D * D
        else:
            kv = D // s["num_heads"] * s["num_kv_heads"]
            tables = 1 if s["tie_embeddings"] else 2
            count = tables * V * D + L * (2 * D * D + 2 * D * kv + 3 * D * s["mlp_dim"])
        assert count == pytest.approx(expected, rel=0.01)


def test_bytes_of_a_loop_count_as_often_as_it_turns() -> None:
    def loop(x: jax.Array, turns: int) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=turns)[0]

    def products(turns: int) -> int:
        lowered = jax.jit(loop, static_argnums=1).lower(jnp.ones((256, 256)), turns)
        # Eigen's products keep the name `dot`; the loop is not unrolled.
        options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
        return bytes_moved(lowered.compile(compiler_options=options).as_text())["products"]

    # Each reads an array twice and writes one.
    assert products(7) == 7 * 3 * 256 * 256 * 4
