"""The pipeline equals one device, keeps few microbatches alive, and pays for its ends once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lower_step, make_layout, make_step, text_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import TOLERANCE, assert_equal, evaluate

from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.remat import Remat
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.generate import generate
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.pipeline.schedules import SCHEDULES, Pipeline

ROWS, LENGTH, VOCABULARY = 16, 16, 64
BATCH = text_batch(rows=ROWS, length=LENGTH, vocab_size=48)


def gpt(num_layers: int) -> GPT:
    return GPT(
        vocab_size=VOCABULARY, num_layers=num_layers, embed_dim=32, num_heads=8,
        context_length=LENGTH,
    )  # fmt: skip


def llama(num_layers: int) -> Llama:
    return Llama(
        vocab_size=VOCABULARY, num_layers=num_layers, embed_dim=32, num_heads=8, num_kv_heads=2,
        mlp_dim=48, context_length=LENGTH,
    )  # fmt: skip


def mixtral(num_layers: int) -> Mixtral:
    """No token is dropped, and nothing is counted of a microbatch alone."""
    return Mixtral(
        vocab_size=VOCABULARY, num_layers=num_layers, embed_dim=32, num_heads=8, num_kv_heads=2,
        mlp_dim=16, num_experts=4, experts_per_token=2, context_length=LENGTH,
        balance_weight=0.0,
    )  # fmt: skip


@functools.cache
def one_device(make, num_layers):
    return evaluate(make_step(make(num_layers), make_layout()), BATCH)


# Schedules whose stages are full are in test_extras_on_meshes.py, each with a model that has more.
CASES = {
    # Six layers on four stages, five on two: padded, masked, and every layer is there.
    "uneven_fewer_microbatches_than_stages": (
        gpt, 6, {"pipe": 4, "data": 2}, {"microbatches": 2},
    ),
    "experts_residuals": (
        mixtral, 4, {"pipe": 2, "expert": 2, "tensor": 2},
        {"microbatches": 2, "backward": "residuals"},
    ),
    "dualpipe_v": (
        gpt, 4, {"pipe": 2},
        {"schedule": "dualpipe_v", "virtual_stages": 2, "microbatches": 4},
    ),
    "uneven_dualpipe_v_residuals": (
        gpt, 6, {"pipe": 2, "fsdp": 2, "tensor": 2},
        {
            "schedule": "dualpipe_v", "virtual_stages": 2, "microbatches": 4,
            "backward": "residuals",
        },
    ),
    "uneven_zero_bubble_residuals": (
        gpt, 5, {"pipe": 2, "fsdp": 2, "tensor": 2, "zero": 1, "sequence_parallel": True},
        {"schedule": "zero_bubble", "microbatches": 4, "backward": "residuals"},
    ),
}  # fmt: skip
FAST = "dualpipe_v"


@pytest.mark.parametrize(
    "case", [one if one == FAST else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_loss_and_gradients_equal_one_device(case, capfd):
    make, num_layers, sizes, pipeline = CASES[case]
    expected = one_device(make, num_layers)
    capfd.readouterr()
    program = make_step(make(num_layers), make_layout(**sizes), pipeline=Pipeline(**pipeline))
    assert_equal(evaluate(program, BATCH), expected)
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


# One in stages of 1f1b is in test_extras_on_meshes.py.
RINGS = {
    "interleaved": (
        llama, 6, {"pipe": 2, "context": 4},
        {
            "schedule": "interleaved", "virtual_stages": 2, "microbatches": 4,
            "backward": "residuals",
        },
    ),
    "gpipe, uneven": (
        gpt, 5, {"pipe": 2, "context": 2, "fsdp": 2}, {"schedule": "gpipe", "microbatches": 2},
    ),
}  # fmt: skip


# Compiles two steps; the stages above and the rings of test_context_step.py are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("case", RINGS)
def test_a_ring_of_attention_inside_stages_equals_one_device(case):
    make, num_layers, sizes, pipeline = RINGS[case]
    execution = Execution(kernel="reference", context_parallel="ring")
    program = make_step(
        make(num_layers), make_layout(**sizes), pipeline=Pipeline(**pipeline), execution=execution
    )
    expected = one_device(make, num_layers)
    assert_equal(evaluate(program, BATCH, expected), expected)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_meshes_and_schedules_equal_one_device(data):
    pipe = data.draw(st.sampled_from([2, 4, 8]), "pipe")
    rest = 8 // pipe
    fsdp = data.draw(st.sampled_from([n for n in (1, 2, 4) if rest % n == 0]), "fsdp")
    tensor = data.draw(st.sampled_from([n for n in (1, 2, 4) if (rest // fsdp) % n == 0]), "tensor")
    schedule = data.draw(st.sampled_from(SCHEDULES))
    virtual = 2 if schedule in ("interleaved", "dualpipe_v") else 1
    counts = [m for m in (1, 2, 4, 8) if m * (8 // pipe // tensor) <= ROWS]
    if schedule == "interleaved":
        counts = [m for m in counts if m % pipe == 0]
    microbatches = data.draw(st.sampled_from(counts), "microbatches")
    # As many as stages or stages that are not full; few numbers, each of which one device compiles.
    least = 16 if pipe * virtual > 8 else 8
    num_layers = data.draw(st.sampled_from([least, least + 3]), "num_layers")
    zero = data.draw(st.sampled_from([0, 1, 2, 3]), "zero")
    backward = data.draw(st.sampled_from(["recompute", "residuals"]))
    layout = make_layout(
        zero, pipe=pipe, data=8 // pipe // fsdp // tensor, fsdp=fsdp, tensor=tensor
    )
    program = make_step(
        gpt(num_layers),
        layout,
        pipeline=Pipeline(
            schedule=schedule,
            microbatches=microbatches,
            virtual_stages=virtual,
            backward=backward,
        ),
    )
    expected = one_device(gpt, num_layers)
    assert_equal(evaluate(program, BATCH, expected), expected)


def test_accumulation_remat_and_a_chunked_loss_work_inside_a_stage():
    expected = one_device(gpt, 4)
    base = make_step(gpt(4), make_layout())
    named = Remat(policy="full", save=("attention",), offload=("mlp_up",))
    program = make_step(
        gpt(4),
        make_layout(pipe=2, fsdp=2),
        pipeline=Pipeline(microbatches=2),
        accumulation=2,
        execution=dataclasses.replace(base.setup.execution, remat=named.kept),
        loss=dataclasses.replace(base.setup.loss, chunk_size=4),
    )
    assert_equal(evaluate(program, BATCH), expected)


# Four programs; gradients of the same stages are in the fast part.
@pytest.mark.slow
def test_evaluation_and_generation_equal_one_device():
    model = gpt(5)
    pipelined = make_step(
        model, make_layout(pipe=2, fsdp=2, tensor=2), pipeline=Pipeline(microbatches=2)
    )
    sums, tokens = [], []
    for program in (make_step(model, make_layout()), pipelined):
        state = program.create(seed=0)
        zeros = program.setup.no_sums(state, BATCH)
        with program.setup.layout.active():
            found = jax.jit(program.setup.eval_step)(state, BATCH, zeros)
        sums.append({name: float(value) for name, value in found.items()})
        greedy = Sampling(temperature=0.0)
        [answer] = generate(
            program.setup, model, state, [[1, 2, 3]], max_new_tokens=6, sampling=greedy, seed=0
        )
        tokens.append(answer.tokens)
    assert sums[1] == pytest.approx(sums[0], rel=1e-5)
    assert tokens[0] == tokens[1]


def temporary_bytes(schedule: str, microbatches: int) -> int:
    """Temporaries of the compiled step; the microbatches stay the same size."""
    model = GPT(
        vocab_size=VOCABULARY, num_layers=4, embed_dim=128, num_heads=4, context_length=LENGTH
    )
    program = make_step(
        model,
        make_layout(0, pipe=4),
        pipeline=Pipeline(schedule=schedule, microbatches=microbatches),
    )
    batch = text_batch(rows=2 * microbatches, length=LENGTH, vocab_size=48)
    return lower_step(program, batch).compile().memory_analysis().temp_size_in_bytes


# Compiles four programs to compare their memory.
@pytest.mark.slow
def test_1f1b_keeps_few_microbatches_alive_and_gpipe_keeps_all():
    # Doubled past the 7 alive on 4 ranks: with 1F1B only the tokens grow, with GPipe every stage
    # keeps the input [2, T, D] of each further microbatch.
    assert temporary_bytes("1f1b", 16) <= 1.05 * temporary_bytes("1f1b", 8)
    more = temporary_bytes("gpipe", 24) - temporary_bytes("gpipe", 8)
    assert more >= 16 * 2 * LENGTH * 128 * 4


def test_only_the_last_stage_computes_logits_and_only_the_first_looks_tokens_up():
    # No other dimension is as large as this vocabulary.
    model = dataclasses.replace(gpt(4), vocab_size=72)
    program = make_step(model, make_layout(pipe=4), pipeline=Pipeline(microbatches=4))
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with program.setup.layout.active():
        jaxpr = jax.make_jaxpr(program.train_step)(program.abstract_state(), batch)
    found = list(_conditions_around(jaxpr.jaxpr, "dot_general", 72, 0))
    # In the tick's switch over actions and in a condition on being the last stage.
    assert len(found) >= 3
    assert min(found) >= 2
    lookups = list(_conditions_around(jaxpr.jaxpr, "gather", 32, 0, operand=(72, 32)))
    assert lookups
    assert min(lookups) >= 2


def _conditions_around(jaxpr, primitive, size, depth, operand=None):
    """For each operation of this kind with a dimension of this size: conditionals around it."""
    for eqn in jaxpr.eqns:
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape")]
        sized = any(size in shape for shape in shapes) and (operand is None or operand in shapes)
        if eqn.primitive.name == primitive and sized:
            yield depth
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    deeper = depth + (eqn.primitive.name == "cond")
                    yield from _conditions_around(inner, primitive, size, deeper, operand)


def test_layers_are_dealt_out_by_cost_and_all_are_there():
    model = GPT(vocab_size=640, num_layers=6, embed_dim=32, num_heads=8, context_length=16)
    program = make_step(model, make_layout(pipe=4))
    # The output matrix (640 x 32) costs 1.6 layers: the last stage gets one layer only.
    assert program.setup.stages.cut[-1] == 1
    assert sum(program.setup.stages.cut) == 6
    assert sorted(n for n in program.setup.layer_order if n >= 0) == list(range(6))
    assert len(program.setup.layer_order) == 8


# Two programs; gradients of other stages are in the fast part.
@pytest.mark.slow
def test_gradients_of_padding_stay_zero():
    program = make_step(gpt(5), make_layout(pipe=2), pipeline=Pipeline(microbatches=2))
    state = program.create(seed=0)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with program.setup.layout.active():
        state, _ = CompiledStep(program)(state, batch)
    padding = np.flatnonzero(~program.setup.stages.valid)
    assert len(padding) == 1
    for value in jax.tree.leaves(state.params["layers"]):
        assert not np.asarray(value)[padding].any()
        assert np.asarray(value)[np.flatnonzero(program.setup.stages.valid)].any()


def test_tolerance_is_small_beside_the_gradients():
    gradients = one_device(gpt, 4)["gradients"]
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients))
    assert largest > 1000 * TOLERANCE
