"""The step on every mesh equals the step on one device, keeps its layout, and compiles once."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from conftest import lower_step, make_layout, make_step, text_batch
from parity import TOLERANCE, assert_equal, evaluate

from jaxtrain.data.batch import Batch
from jaxtrain.models.convolutional.lenet import LeNet
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.remat import POLICIES
from jaxtrain.parallel import gathering
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.optimizers.optimizer import Optimizer, make_optimizer
from jaxtrain.training.optimizers.schedule import Schedule, make_schedule
from jaxtrain.training.setup import split_microbatches

MODELS = {
    "gpt": GPT(vocab_size=64, num_layers=2, embed_dim=32, num_heads=8, context_length=16),
    "llama": Llama(
        vocab_size=64,
        num_layers=2,
        embed_dim=32,
        num_heads=8,
        num_kv_heads=2,
        mlp_dim=48,
        context_length=16,
    ),
}
BATCH = text_batch(rows=16, length=16, vocab_size=48)  # rows 48..63 of the vocabulary are unseen

# Half as many heads, of 8: parts of a head on each of 8 devices.
MODELS |= {
    "gpt_heads": dataclasses.replace(MODELS["gpt"], num_heads=4),
    "llama_heads": dataclasses.replace(MODELS["llama"], num_heads=4),
}
# Every table and every matrix of an mlp, as a TPU may have them: see `dividing.in_tiles`.
BY_ROWS = frozenset({("vocab", "vocab_embed"), ("embed", "mlp"), ("mlp", "embed")})
# And attention's.
BY_HEADS = BY_ROWS | {
    ("qkv", "embed", "heads", "head_dim"),
    ("embed", "heads", "head_dim"),
    ("embed", "kv_heads", "head_dim"),
    ("heads", "head_dim", "embed"),
}
LAYOUTS = {
    "data8": {"data": 8},
    "zero0": {"fsdp": 8, "zero": 0},
    "zero1": {"fsdp": 8, "zero": 1},
    "zero2": {"fsdp": 8, "zero": 2},
    "zero3": {"fsdp": 8, "zero": 3},
    "tensor8": {"tensor": 8},
    "hsdp": {"data": 2, "fsdp": 4},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
    "all_sequence": {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True},
    "all_zero2_sequence": {"zero": 2, "fsdp": 4, "tensor": 2, "sequence_parallel": True},
    "rows_zero1": {"zero": 1, "fsdp": 8, "by_rows": BY_ROWS},
    "rows_zero2": {"zero": 2, "data": 2, "fsdp": 4, "by_rows": BY_ROWS},
    "rows_hsdp": {"data": 2, "fsdp": 4, "by_rows": BY_ROWS},
    "heads_zero1": {"zero": 1, "fsdp": 8, "by_rows": BY_HEADS},
    "heads_zero2": {"zero": 2, "fsdp": 8, "by_rows": BY_HEADS},
    "heads_zero3": {"fsdp": 8, "by_rows": BY_HEADS},
    "heads_hsdp": {"data": 2, "fsdp": 4, "by_rows": BY_HEADS},
}


@functools.cache
def one_device(name):
    """The same model on one device."""
    return evaluate(make_step(MODELS[name], make_layout()), BATCH)


HEADS = [layout for layout in LAYOUTS if layout.startswith("heads")]
# "all" is what tests of single properties use; "all_sequence" has what it has.
CASES = [
    *(("gpt", layout) for layout in LAYOUTS if layout not in (*HEADS, "all", "all_sequence")),
    ("llama", "all_sequence"),
    # q, k and v in one array and in two, each with a stage that keeps and one that gathers weights.
    *(("gpt_heads", layout) for layout in ("heads_zero1", "heads_hsdp")),
    *(("llama_heads", layout) for layout in ("heads_zero2", "heads_zero3")),
]


# GPT's meshes and Llama's in test_parity_matrix.py are left.
@pytest.mark.slow_cases("llama-all_sequence")
@pytest.mark.slow_cases(
    "gpt-hsdp",
    "gpt-rows_zero1",
    "gpt-rows_zero2",
    "gpt-tensor8",
    "gpt-zero0",
    "gpt-zero1",
    "gpt_heads-heads_hsdp",
    "llama_heads-heads_zero2",
    "gpt-data8",
    "gpt-zero2",
    "gpt-all_zero2_sequence",
    "llama_heads-heads_zero3",
)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loss_and_gradients_equal_one_device(name, layout, capfd):
    expected = one_device(name)
    capfd.readouterr()
    found = evaluate(make_step(MODELS[name], make_layout(**LAYOUTS[layout])), BATCH)
    # The compiler says this where it gathers a whole array that nobody asked it to gather.
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err
    assert_equal(found, expected)


def test_gradients_of_a_large_tied_table_equal_one_device(monkeypatch):
    expected = one_device("gpt")

    def barriers():
        program = make_step(MODELS["gpt"], make_layout(**LAYOUTS["all"]))
        return lower_step(program, BATCH).as_text().count("optimization_barrier")

    small = barriers()
    monkeypatch.setattr(gathering, "LARGE_TABLE", 1)
    assert barriers() == small + 1
    found = evaluate(make_step(MODELS["gpt"], make_layout(**LAYOUTS["all"])), BATCH)
    assert_equal(found, expected)


@pytest.mark.slow_cases("all", "tensor8")
@pytest.mark.parametrize("layout", ["tensor8", "all"])
def test_gradients_of_tokens_nobody_saw_are_exactly_zero(layout):
    """A partitioned scatter-add once leaked gradient into rows of other tokens (xla#42481)."""
    untied = dataclasses.replace(MODELS["llama"], num_kv_heads=8, tie_embeddings=False)
    program = make_step(untied, make_layout(**LAYOUTS[layout]))
    state = program.create(seed=0)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with program.setup.layout.active():
        gradients = jax.jit(program.setup.gradients)(state, batch)[0]
    table = np.asarray(gradients["token_embedding"].get_value())
    unseen = np.setdiff1d(np.arange(64), BATCH.inputs)
    assert len(unseen) >= 16
    np.testing.assert_array_equal(table[unseen], 0.0)
    assert np.abs(table[np.unique(BATCH.inputs)]).sum(1).min() > 0


@pytest.mark.slow_cases("{'data': 2, 'fsdp': 2, 'zero': 2}", "{'fsdp': 2, 'tensor': 2}")
@pytest.mark.parametrize(
    "sizes", [{}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "zero": 2}], ids=str
)
def test_accumulation_equals_the_big_batch_although_token_counts_differ(sizes):
    counts = [m.sum() for m in split_microbatches(BATCH, 4).loss_mask]
    assert len(set(map(float, counts))) == 4
    expected = one_device("gpt")
    program = make_step(MODELS["gpt"], make_layout(**sizes), accumulation=4)
    found = evaluate(program, BATCH)
    assert found["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE),
        found["gradients"],
        expected["gradients"],
    )


def test_everything_at_once_equals_one_device():
    expected = one_device("gpt")
    program = make_step(
        MODELS["gpt"],
        make_layout(2, sequence_parallel=True, data=2, fsdp=2, tensor=2),
        accumulation=2,
        loss=Loss(chunk_size=4),
        execution=Execution(kernel="xla", remat=POLICIES["dots"], layers_per_iteration=2),
    )
    found = evaluate(program, BATCH)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE),
        found["gradients"],
        expected["gradients"],
    )


# -- memory and traffic --------------------------------------------------------------------------


def test_zero3_moves_no_activations_between_devices():
    program = make_step(MODELS["gpt"], make_layout(3, fsdp=8))
    text = lower_step(program, BATCH).compile().as_text()
    assert re.search(r"= \S+ all-gather\(", text)
    assert "all-to-all" not in text
    assert "collective-permute" not in text


@pytest.mark.slow_cases("none")
@pytest.mark.parametrize("remat", ["none", "full"])
def test_zero3_holds_one_gathered_layer_at_a_time(remat):
    """Temporaries may grow with the layers' saved activations, not with their whole weights."""

    def temporary(num_layers: int, zero: int) -> int:
        sizes = dataclasses.replace(MODELS["gpt"], num_layers=num_layers, embed_dim=embed_dim)
        execution = Execution(kernel="reference", remat=POLICIES[remat])
        program = make_step(sizes, make_layout(zero, fsdp=8), execution=execution)
        compiled = lower_step(program, BATCH).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    embed_dim = 256
    layer_weights = 12 * embed_dim**2 * 4
    tokens = BATCH.inputs.size // 8
    # Korthikanti et al. (arXiv 2205.05198), float32 and no dropout: far fewer than 34 values a
    # token and dimension, and 5 score matrices of 16 x 16 for 8 heads; or the layer's input alone.
    saved = tokens * 4 * (34 * embed_dim + 5 * 8 * 16 if remat == "none" else embed_dim)
    growth = (temporary(6, 3) - temporary(2, 3)) / 4
    # A layer adds what it saves and its gradient's shard, far from its whole weights.
    assert growth < saved + 2 * layer_weights / 8
    assert saved + 2 * layer_weights / 8 < layer_weights


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_one_cpu_updates_parameters_where_they_are(clip_norm):
    """XLA for CPUs copies a parameter first if another's gradient may read it during its update."""
    schedule = make_schedule(Schedule(name="constant"), 1e-2, 100)
    rule = make_optimizer(Optimizer(learning_rate=1e-2, clip_norm=clip_norm), schedule)
    images = Batch(
        inputs=np.ones((4, 28, 28, 1), np.float32),
        targets=np.zeros(4, np.int32),
        loss_mask=np.ones(4, np.float32),
    )
    program = make_step(LeNet(), make_layout(), optimizer=rule)
    entry = lower_step(program, images).compile().as_text().partition("\nENTRY")[2]
    parameters = dict(re.findall(r"%?(\S+) = (f32\[[\d,]+\])\S* parameter", entry))
    assert "f32[400,120]" in parameters.values()
    copied = set(re.findall(r" copy\(%?([\w.]+)\)", entry)) & parameters.keys()
    large = {parameters[name] for name in copied if "," in parameters[name]}
    assert not large
