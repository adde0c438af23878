"""Precision.float32_products reaches every product of a step, of evaluation and of a TPU's."""

import re

import jax
import pytest
from conftest import lower_step, make_layout, make_step, text_batch

from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.nn.precision import Precision
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.rules.muon import Muon

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, context_length=8)
BATCH = text_batch(rows=8, length=8, vocab_size=32)


def precisions(text: str) -> set[str]:
    """Of the float32 products in StableHLO."""
    products = re.findall(r"stablehlo\.dot_general .*", text)
    assert len(products) > 5
    return {
        precision.group(1) if (precision := re.search(r"precision = \[(\w+), \w+\]", line)) else ""
        for line in products
        if "xf32>" in line
    }


def program_of(products, **changes):
    precision = Precision(compute="float32", float32_products=products)
    return make_step(MODEL, make_layout(fsdp=2, tensor=2), precision=precision, **changes)


@pytest.mark.slow_cases("tf32-HIGH")
@pytest.mark.parametrize(
    ("products", "asked"), [("device", "DEFAULT"), ("tf32", "HIGH"), ("float32", "HIGHEST")]
)
def test_every_product_of_a_step_and_of_evaluation(products, asked):
    """Muon's too, in the update."""
    optimizer = make_optimizer(Optimizer(rule=Muon()), lambda count: 1e-3)
    program = program_of(products, optimizer=optimizer)
    assert precisions(lower_step(program, BATCH).as_text()) == {asked}
    state, batch = (
        program.abstract_state(),
        jax.device_put(BATCH, program.setup.batch_shardings(BATCH)),
    )
    with program.setup.layout.active():
        evaluation = jax.jit(program.setup.eval_step).lower(
            state, batch, program.setup.no_sums(state, batch)
        )
    assert precisions(evaluation.as_text()) == {asked}
