"""Steps with sequences split equal one device; what cannot be split is rejected."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_step
from conftest import lower_step, make_layout, make_step, text_batch
from parity import assert_equal, evaluate
from test_context import B, H, T, abstract, collectives, value_and_grads

from jaxtrain.config.errors import UserError
from jaxtrain.nn.attention.attention import attention
from jaxtrain.nn.attention.context import along_context, validate
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.remat import POLICIES
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.generate import generate
from jaxtrain.training.compose import compose as program_of
from jaxtrain.training.layouts import abstract_layout
from jaxtrain.training.objectives.losses import Loss
from jaxtrain.training.preflight.preflight import check
from jaxtrain.training.settings import load_config

# -- the step equals one device ------------------------------------------------------------------

LENGTH = 32
MODELS = {
    name: dataclasses.replace(model, context_length=LENGTH)
    for name, model in test_step.MODELS.items()
}


def masked_batch():  # noqa: ANN201
    """Documents in every row; nothing that rank 3 of 8 holds in zig-zag order counts."""
    batch = text_batch(rows=4, length=LENGTH, vocab_size=48)
    gone = np.isin(np.arange(LENGTH) // 2, [3, 12])
    return dataclasses.replace(
        batch,
        segment_ids=np.where(gone, 0, batch.segment_ids).astype(np.int32),
        loss_mask=np.where(gone, 0, batch.loss_mask).astype(np.float32),
    )


BATCH = masked_batch()


@functools.cache
def one_device(name: str):  # noqa: ANN201
    return evaluate(make_step(MODELS[name], make_layout()), BATCH)


STEPS = {
    "gpt-ring": ("gpt", {"context": 8}, {}),
    "gpt-sequence": (
        "gpt",
        {"context": 4, "tensor": 2, "sequence_parallel": True},
        {"loss": Loss(chunk_size=8), "execution": Execution(kernel="xla", remat=POLICIES["full"])},
    ),
    "llama-data": ("llama", {"data": 2, "context": 2, "tensor": 2}, {"accumulation": 2}),
    "llama-ulysses": (
        "llama",
        {"context": 2, "tensor": 2, "fsdp": 2},
        {
            "loss": Loss(chunk_size=8),
            "execution": Execution(kernel="xla", context_parallel="ulysses"),
        },
    ),
}


# The ring alone is in the fast part.
@pytest.mark.slow_cases("gpt-sequence", "llama-data", "llama-ulysses")
@pytest.mark.parametrize("case", STEPS)
def test_loss_and_gradients_equal_one_device(case: str, capfd) -> None:  # noqa: ANN001
    name, sizes, changes = STEPS[case]
    expected = one_device(name)
    capfd.readouterr()
    found = evaluate(make_step(MODELS[name], make_layout(**sizes), **changes), BATCH, expected)
    # The compiler says this where it gathers a whole array that nobody asked it to gather.
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err
    assert_equal(found, expected)


@pytest.mark.slow_cases("ulysses")
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_step_gathers_no_activations_over_context(method: str) -> None:
    execution = Execution(kernel="reference", context_parallel=method)
    program = make_step(MODELS["gpt"], make_layout(context=4), execution=execution)
    found = collectives(lower_step(program, BATCH).compile().as_text())
    kinds = {kind for kind, _ in found}
    gathered = [shape for kind, shape in found if kind == "all-gather"]
    # Documents are 4 bytes a token; every gradient is reduced over context.
    assert all(shape.startswith("s32") for shape in gathered)
    moved = {"ring": "collective-permute", "ulysses": "all-to-all"}[method]
    assert kinds - {"all-gather"} == {"all-reduce", moved}


# Two models generate; tests/test_generate.py has a mesh in the fast part.
@pytest.mark.slow
def test_generation_does_not_split_its_tokens() -> None:
    sampling, prompts = Sampling(temperature=0), [[1, 2, 3]]
    drawn = []
    for layout in (make_layout(), make_layout(context=2, tensor=2)):
        program = make_step(MODELS["llama"], layout)
        state = program.create(seed=0)
        sizes = MODELS["llama"]
        drawn.append(
            generate(
                program.setup, sizes, state, prompts, max_new_tokens=5, sampling=sampling, seed=0
            )
        )
    assert drawn[0][0].tokens == drawn[1][0].tokens


# -- settings and rejections -----------------------------------------------------------------------


def test_the_setting_reaches_the_program() -> None:
    for method in ("ring", "ulysses"):
        bindings = ["Mesh.context = 2", f"Attention.context_parallel = {method!r}"]
        config = load_config("gpt_quickstart", [*bindings, "Mesh.fsdp = -1"])
        check(config, device_count=8, platform="cpu")
        program = program_of(config, abstract_layout(config, 8))
        assert program.setup.execution.context_parallel == method


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (
            ["Attention.kernel = 'cudnn'", "Mesh.context = 4"],
            [
                "Attention.kernel='cudnn' gives no log-sum-exp",
                "'ring' (Mesh.context=4)",
                "use Attention.kernel='xla', or Attention.context_parallel='ulysses' with 'cudnn'",
            ],
        ),
        (
            ["TextData.sequence_length = 100", "Mesh.context = 8"],
            ["TextData.sequence_length=100 does not divide into the 16 parts", "nearest is 96"],
        ),
        (
            [
                "TextData.sequence_length = 102",
                "Mesh.context = 4",
                "Attention.context_parallel = 'ulysses'",
            ],
            ["TextData.sequence_length=102 does not divide into the 4 parts", "nearest is 104"],
        ),
        (
            ["GPT.num_heads = 6", "GPT.embed_dim = 96", "Mesh.context = 4"]
            + ["Attention.context_parallel = 'ulysses'"],
            [
                "GPT.num_heads=6 does not divide over Mesh.tensor x Mesh.context=4",
                "the nearest is 8, or set Mesh.context=2 or Attention.context_parallel='ring'",
            ],
        ),
        (
            ["TextData.sequence_length = 100", "Mesh.context = 2", "Mesh.tensor = 4"]
            + ["Sharding.sequence_parallel = True", "GPT.num_heads = 4"],
            ["TextData.sequence_length=100 does not divide over Mesh.context x Mesh.tensor=8"]
            + ["nearest is 96"],
        ),
        (
            ["Loss.chunk_size = 2", "Mesh.context = 4"],
            ["Loss.chunk_size=2 does not divide over Mesh.context=4; the nearest is 4"],
        ),
    ],
)
def test_preflight_refuses_with_the_nearest_choice(bindings, words) -> None:  # noqa: ANN001
    config = load_config("gpt_quickstart", ["Mesh.tensor = 1", "Mesh.fsdp = -1", *bindings])
    with pytest.raises(UserError) as caught:
        check(config, device_count=8, platform="cpu")
    for word in words:
        assert word in str(caught.value)


def test_what_preflight_did_not_see_is_refused_while_tracing() -> None:
    assert list(validate("ring", context=1, length=7, kernel="tpu")) == []
    layout = make_layout(context=4)
    with layout.active():
        shapes = abstract(layout, jnp.float32, 8)
        for options in ({"kernel": "tpu"}, {"kernel": "cudnn"}):
            with pytest.raises(UserError, match=r"gives no log-sum-exp.*or .*'ulysses' with"):
                jax.eval_shape(functools.partial(value_and_grads, **options), *shapes)
        with pytest.raises(UserError, match="does not divide into the 8 parts .* nearest is 16"):
            along_context(jnp.zeros((B, 12), jnp.int32), "ring")
        few = [jax.ShapeDtypeStruct((B, T, 2, H), jnp.float32)] * 3
        with pytest.raises(UserError, match=r"num_heads=2 .* nearest is 4, or set Mesh.context=2"):
            jax.eval_shape(lambda *x: attention(*x, Mask(), context_parallel="ulysses"), *few)
