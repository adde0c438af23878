"""Four mesh axes above 1 need sixteen devices: run by test_parity_matrix.py in its own process."""

import pytest
from conftest import make_layout, make_step
from parity import assert_equal, evaluate
from test_parity_matrix import BATCH, MODELS, ULYSSES

from jaxtrain.nn.execution import Execution
from jaxtrain.training.pipeline.schedules import Pipeline


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gpt", {"pipe": 2, "fsdp": 2, "context": 2, "tensor": 2}),
        ("mixtral", {"data": 2, "expert": 2, "context": 2, "tensor": 2}),
    ],
)
def test_four_axes_equal_one_device(model, sizes):
    pipeline = Pipeline(microbatches=2) if "pipe" in sizes else Pipeline()
    execution = ULYSSES if "pipe" in sizes else Execution(kernel="reference")
    program = make_step(MODELS[model], make_layout(**sizes), pipeline=pipeline, execution=execution)
    expected = evaluate(make_step(MODELS[model], make_layout()), BATCH)
    assert_equal(evaluate(program, BATCH, expected), expected)
