"""Products of 8 bits in a model: a pipeline's loss, learning alike, and where they are rejected."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_layout, make_step, text_batch
from test_float8 import lower_for, operands_of_products

from jaxtrain.analysis.planning.machines.targets import compiler_options, parse_target
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.matmul.contract import einsum_of
from jaxtrain.nn.matmul.eight_bit import validate
from jaxtrain.nn.precision import Precision
from jaxtrain.training.compiled_step import CompiledStep
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config

MODEL = GPT(vocab_size=32, num_layers=2, embed_dim=32, num_heads=4, context_length=16)
BATCH = text_batch(rows=8, length=16, vocab_size=32)
PLAIN = Execution(kernel="reference")
FORMATS = ["float8", "int8"]
OF_A_GPT = {"model": "GPT", "experts": False, "recurrent": False}


@functools.cache
def first_loss_alone(matmul):
    return first_loss(matmul, make_layout(fsdp=1))


def first_loss(matmul, layout, **changes):
    execution = dataclasses.replace(PLAIN, einsum=einsum_of(matmul))
    program = make_step(MODEL, layout, execution=execution, **changes)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    with layout.active():
        grads, metrics, _ = jax.jit(program.setup.gradients)(program.create(0), batch)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))
    return float(metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("matmul", FORMATS)
def test_a_pipeline_with_every_axis_gives_the_loss_of_one_device(matmul):
    """To less than what the format itself does to the loss: a sum in another order may turn the
    rounding of few elements, all others are the same."""
    exact, one = (first_loss_alone(kind) for kind in ("compute", matmul))
    layout = make_layout(pipe=2, fsdp=2, tensor=2, sequence_parallel=True)
    pipeline = dataclasses.replace(make_step(MODEL, layout).setup.pipeline, microbatches=1)
    found = first_loss(matmul, layout, pipeline=pipeline)
    assert one != exact
    assert abs(found - one) < abs(one - exact)


@functools.cache
def losses(matmul) -> np.ndarray:
    """Of the same batch 40 times, from three seeds."""
    layout = make_layout(fsdp=1)
    settings = Precision(compute="bfloat16", matmul=matmul)
    execution = dataclasses.replace(PLAIN, einsum=einsum_of(matmul))
    program = make_step(MODEL, layout, precision=settings, execution=execution)
    step = CompiledStep(program)
    batch = jax.device_put(BATCH, program.setup.batch_shardings(BATCH))
    found = []
    with layout.active():
        for seed in range(3):
            state, curve = program.create(seed), []
            for _ in range(40):
                state, metrics = step(state, batch)
                curve.append(metrics["loss"])
            found.append(curve)
    return np.array(jax.device_get(found))


@pytest.mark.slow
@pytest.mark.parametrize("matmul", FORMATS)
def test_a_model_learns_as_in_bfloat16(matmul):
    """What three seeds differ by is what a run's noise makes of the loss, and rounding to 8 bits
    may make no more of it."""
    plain, narrow = losses("compute"), losses(matmul)
    assert (plain[:, -1] < plain[:, 0] / 2).all()  # there was something to learn
    spread = np.ptp(plain, axis=0).max()
    assert (narrow != plain).any()
    assert np.abs(narrow - plain).max() < spread, (narrow[:, -1], plain[:, -1])


# -- what is rejected ------------------------------------------------------------------------------

FLOAT8 = (
    "which is not known to multiply float8 faster than bfloat16 (H100, H200, B200, L40 and TPU7x "
    "are); use Precision.matmul='compute'"
)
INT8 = (
    "which is not known to multiply int8 faster than bfloat16 (TPU v5e, v5p and v6e, A100, H100, "
    "H200, B200 and L40 are); use Precision.matmul='compute'"
)


@pytest.mark.parametrize(
    ("matmul", "config", "target", "sentence"),
    [
        ("float8", "llama_8b", "a100:8x8", f"on 'NVIDIA A100-SXM4-80GB', {FLOAT8}"),
        ("float8", "llama_8b", "v5p:4x4x4", f"on 'TPU v5', {FLOAT8}"),
        ("float8", "llama_8b", "h100:8x8", None),
        ("float8", "llama_8b", "b200:8x8", None),
        ("int8", "llama_8b", "v4:4x4x4", f"on 'TPU v4', {INT8}"),
        ("int8", "llama_8b", "7x:2x4x4", f"on 'TPU7x', {INT8}"),
        ("int8", "llama_8b", "a100:8x8", None),
        ("int8", "llama_8b", "v5p:4x4x4", None),
        (
            "int8",
            "mixtral_8x7b",
            "h200:8x8",
            "for Mixtral: experts' grouped matmuls have no int8 form; use "
            "Precision.matmul='compute'",
        ),
        ("float8", "mixtral_8x7b", "h200:8x8", None),
        *(
            (
                matmul,
                "resnet50_imagenet",
                "h200:1x8",
                "has no effect for ResNet; leave it at 'compute'",
            )
            for matmul in FORMATS
        ),
    ],
)
def test_where_8_bits_are_not_to_be_had_they_are_refused(matmul, config, target, sentence):
    machine = parse_target(target)
    config = load_config(config, [f"Precision.matmul = {matmul!r}"])

    def check(kind):
        preflight.check(
            config,
            device_count=machine.devices,
            platform=machine.chip.kind,
            kind=kind,
            reads_data=False,
        )

    if sentence is None:
        for kind in machine.chip.device_kinds:
            check(kind)
        return
    with pytest.raises(UserError) as refusal:
        check(machine.chip.device_kinds[0])
    assert str(refusal.value) == f"Precision.matmul={matmul!r} {sentence}"


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        ("NVIDIA H100 PCIe", {"float8", "int8"}),  # no plan's chip, but of the same units
        ("NVIDIA L4", {"float8", "int8"}),
        ("NVIDIA A10", {"int8"}),
        ("NVIDIA B300 SXM6 AC", {"float8"}),
        ("Tesla V100-SXM2-16GB", set()),
    ],
)
def test_devices_that_no_plan_is_made_for_have_the_formats_of_their_units(kind, formats):
    asked = {"platform": "gpu", "device_kind": kind, **OF_A_GPT}
    refused = {m for m in FORMATS if list(validate(m, **asked))}
    assert refused == set(FORMATS) - formats


# -- what a GPU's compiler makes of it -------------------------------------------------------------


@pytest.mark.cuda_compile
@pytest.mark.parametrize("target", ["a100:1x8", "h100:1x8"])
def test_the_cuda_compiler_multiplies_int8(target):
    found = parse_target(target)
    lowered = lower_for(found, "int8")
    # Forward, products of one activation become one: of queries, keys and values, and of the mlp's
    # first two; the activations' gradients are of 7 weights. The loop's body stands once.
    products = 4 + 7
    text = lowered.compile(compiler_options(found)).as_text()
    pairs = collections.Counter(operands_of_products(text))
    assert {pair: n for pair, n in pairs.items() if "s8" in pair} == {("s8", "s8"): products}
    assert len(re.findall(r" = s32\[[\d,]+\]\S* dot\(", text)) == products
    # The library's, which a GPU that is there may prefer.
    options = {**compiler_options(found), "xla_gpu_enable_triton_gemm": False}
    text = lowered.compile(options).as_text()
    by_library = r" = \(s32\[.*custom_call_target=\"__cublas\$lt\$matmul\""
    assert len(re.findall(by_library, text)) == products
