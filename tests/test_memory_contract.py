"""The state on each device is ZeRO's table to the byte, for every stage and precision.

Read from the compiled step's arguments: what the compiler reserves, not what we meant to give it.
"""

import functools
import math

import jax
import optax
import pytest
from conftest import lower_step, make_layout, make_step, text_batch

from jaxtrain.analysis.planning.textbook.formulas import zero_bytes
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.precision import Precision
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer

MODELS = {
    "gpt": GPT(vocab_size=64, num_layers=1, embed_dim=32, num_heads=4, context_length=16),
    "llama": Llama(
        vocab_size=64, num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48,
        context_length=16,
    ),
}  # fmt: skip
BATCH = text_batch(rows=8, length=16, vocab_size=64)
# Parameters at rest, and moments, and the bytes of each: float32, the usual mixed precision, the
# same with moments in bfloat16, all in bfloat16.
PRECISIONS = {
    "float32": (Precision(params="float32", compute="float32"), "float32", 4, 4),
    "mixed": (Precision(params="float32", compute="bfloat16"), "float32", 4, 4),
    "moments": (Precision(params="float32", compute="bfloat16"), "bfloat16", 4, 2),
    "bfloat16": (Precision(params="bfloat16", compute="bfloat16"), "bfloat16", 2, 2),
}
# step, loss_scale's two numbers, the optimizer's two counts; a third where moments are rounded.
SCALARS = 4 * (1 + 2 + 2)


@functools.cache
def memory_of(model: str, precision: str, zero: int, **sizes: int):
    """The compiler's account of the step."""
    settings, moments, *_ = PRECISIONS[precision]
    program = make_step(
        MODELS[model],
        make_layout(zero, **sizes),
        precision=settings,
        optimizer=make_optimizer(Optimizer(moments=moments), optax.constant_schedule(1e-2)),
    )
    return lower_step(program, BATCH).compile().memory_analysis()


def elements(model: str) -> tuple[int, int]:
    """Elements of parameters that fsdp splits (they have a dimension along embed), and the rest."""
    sharded = whole = 0
    shapes = jax.eval_shape(lambda: MODELS[model].build(jax.random.key(0)))
    for leaf in jax.tree.leaves(shapes, is_leaf=is_variable):
        if not is_variable(leaf):
            continue
        size = math.prod(leaf.get_value().shape)
        if {"embed", "vocab_embed"} & set(leaf.get_metadata()["axes"]):
            sharded += size
        else:
            whole += size
    return sharded, whole


# Each stage with one precision and each precision with few stages: a number's bytes and on how
# many devices it lies are two factors of the table.
CASES = [
    ("gpt", "float32", 0, {"fsdp": 8}),
    ("gpt", "float32", 1, {"fsdp": 8}),
    ("gpt", "float32", 2, {"fsdp": 8}),
    ("gpt", "float32", 3, {"fsdp": 8}),
    ("llama", "moments", 1, {"fsdp": 8}),
    ("llama", "moments", 3, {"data": 2, "fsdp": 4}),
    ("llama", "bfloat16", 3, {"fsdp": 8}),
    # The data axis replicates: the table's divisor is fsdp alone.
    ("llama", "mixed", 3, {"data": 2, "fsdp": 4}),
]


@pytest.mark.slow_cases(
    "gpt-float32-0-{'fsdp': 8}",
    "gpt-float32-1-{'fsdp': 8}",
    "gpt-float32-2-{'fsdp': 8}",
    "llama-bfloat16-3-{'fsdp': 8}",
    "llama-moments-1-{'fsdp': 8}",
    "llama-moments-3-{'data': 2, 'fsdp': 4}",
)
@pytest.mark.parametrize(("model", "precision", "zero", "sizes"), CASES, ids=str)
def test_arguments_equal_the_zero_table(model, precision, zero, sizes):
    sharded, whole = elements(model)
    table = zero_bytes(
        sharded,
        whole,
        stage=zero,
        devices=sizes["fsdp"],
        param_bytes=PRECISIONS[precision][2],
        moment_bytes=PRECISIONS[precision][3],
    )
    state = table.params + table.optimizer + SCALARS
    state += 4 * (PRECISIONS[precision][1] == "bfloat16")
    batch = 5 * 4 * BATCH.inputs.size // 8
    memory = memory_of(model, precision, zero, **sizes)
    assert memory.argument_size_in_bytes == state + batch
    # Donated: the new state lies where the old one was.
    assert memory.alias_size_in_bytes == state
    assert sharded > 10 * whole  # what stays whole does not carry the figure


def test_the_table_for_float32_adam_is_sixteen_bytes_a_parameter():
    """arXiv 1910.02054, figure 1, with 8 bytes of moments: 4 + 4 + 8, divided by stages."""
    table = functools.partial(zero_bytes, 800, 0, devices=8)
    totals = [sum(vars(table(stage=stage)).values()) for stage in range(4)]
    assert totals == [16 * 800, (4 + 4 + 1) * 800, (4 + 0.5 + 1) * 800, 2 * 800]
