"""Attention is given the compute dtype wherever a model is traced, as GPU kernels require."""

import dataclasses

import pytest

from jaxtrain import Trainer, load_config
from jaxtrain.nn.attention.kernel_registry import KERNELS, Request

BINDINGS = [
    "Precision.compute = 'bfloat16'", "Attention.kernel = 'xla'", "Train.steps = 2",
    "Train.eval_every = 1", "Train.eval_batches = 1", "Mesh.tensor = 1",
]  # fmt: skip
LAYOUTS = {
    "data": ["Mesh.data = 2", "Mesh.fsdp = 4"],
    "microbatches": ["Mesh.data = 2", "Mesh.fsdp = 4", "Train.accumulation = 2",
                     "Train.global_batch_size = 16"],
    "pipeline": ["Mesh.data = 1", "Mesh.fsdp = 4", "Mesh.pipe = 2"],
    "exchange": ["Mesh.data = 8", "Mesh.fsdp = 1", "Sharding.zero = 0",
                 "Exchange.method = 'local_sgd'", "Exchange.period = 1"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def kernel_of_bfloat16(monkeypatch):
    """A kernel that rejects float32, as cuDNN's does."""

    def cannot(request: Request) -> list[str]:
        return [] if request.dtype == "bfloat16" else [f"does not compute in {request.dtype}"]

    kernel = dataclasses.replace(KERNELS["xla"], cannot=cannot)
    monkeypatch.setitem(KERNELS, "xla", kernel)


# Other callers of the same trace.
@pytest.mark.slow_cases("microbatches", "exchange", "data")
@pytest.mark.parametrize("layout", ["data", "microbatches", "pipeline", "exchange"])
def test_training_and_evaluation(layout, tiny_config, tmp_path) -> None:
    trainer = Trainer(load_config(tiny_config, [*BINDINGS, *LAYOUTS[layout]]), tmp_path)
    trainer.train()
    assert [line["step"] for line in trainer.history if "eval_loss" in line][-1] == 2
    trainer.close()


def test_generation(tiny_config) -> None:
    trainer = Trainer(load_config(tiny_config, [*BINDINGS, *LAYOUTS["data"]]))
    assert trainer.generate("def", max_new_tokens=4)
