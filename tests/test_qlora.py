"""Quantized weights under adapters: bitsandbytes' codes, and the floats' losses on every mesh."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from conftest import lower_step, make_layout, make_step, text_batch
from parity import TOLERANCE, evaluate

from jaxtrain.analysis.planning.textbook.state_bytes import argument_bytes
from jaxtrain.config.errors import UserError
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.nn.matmul.quantized import NF4, dequantize, quantize
from jaxtrain.parallel.sharding import by_name
from jaxtrain.run.weights import merge_adapters
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose as program_of
from jaxtrain.training.finetune.finetune import Finetune, tuning_of
from jaxtrain.training.finetune.lora import LoRA
from jaxtrain.training.pipeline.schedules import Pipeline
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import load_config
from jaxtrain.training.step import train_all

BATCH = text_batch(rows=8, length=8, vocab_size=48)
MODEL = Llama(
    vocab_size=64, num_layers=2, embed_dim=128, num_heads=2, num_kv_heads=2, head_dim=64,
    mlp_dim=128, context_length=8,
)  # fmt: skip
# Of a weight [L, D, N, H] that reads the stream, of one [L, N, H, D] that writes to it: axes, what
# is summed over, and its order as a matrix [L, out, in].
SIDES = {
    "query": (("layers", "embed", "heads", "head_dim"), (1,), (0, 2, 3, 1)),
    "out": (("layers", "heads", "head_dim", "embed"), (1, 2), (0, 3, 1, 2)),
}


def weight(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def as_matrices(x: Any, order: tuple[int, ...], outs: int) -> np.ndarray:
    return np.asarray(x).transpose(order).reshape(x.shape[0], outs, -1)


@pytest.mark.parametrize("side", SIDES)
def test_nf4_is_the_nearest_of_its_numbers_times_the_blocks_largest(side):
    axes, summed, order = SIDES[side]
    shape = (2, 128, 4, 64) if side == "query" else (2, 4, 64, 128)
    outs = 256 if side == "query" else 128
    value = weight(shape)
    found = quantize(value, axes, summed, "nf4")
    blocks = as_matrices(value, order, outs).reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    np.testing.assert_array_equal(as_matrices(found.scales, order, outs).reshape(-1), largest)
    code = np.abs(blocks[..., None] / largest[:, None, None] - NF4).argmin(-1)
    packed = as_matrices(found.codes, order, outs).reshape(-1, 32)
    np.testing.assert_array_equal(packed, code[:, ::2] << 4 | code[:, 1::2])
    floats = as_matrices(dequantize(found), order, outs).reshape(-1, 64)
    np.testing.assert_array_equal(floats, NF4[code] * largest[:, None])


@pytest.mark.parametrize("side", SIDES)
def test_codes_and_scales_are_those_of_bitsandbytes(side):
    functional = pytest.importorskip("bitsandbytes.functional")
    import torch  # noqa: PLC0415

    axes, summed, order = SIDES[side]
    shape = (1, 128, 4, 64) if side == "query" else (1, 4, 64, 128)
    outs = 256 if side == "query" else 128
    value = weight(shape)
    theirs = torch.tensor(as_matrices(value, order, outs)[0].copy())
    codes, state = functional.quantize_4bit(theirs, quant_type="nf4", blocksize=64)
    found = quantize(value, axes, summed, "nf4")
    np.testing.assert_array_equal(as_matrices(found.codes, order, outs).reshape(-1, 1), codes)
    np.testing.assert_array_equal(as_matrices(found.scales, order, outs).ravel(), state.absmax)
    codes, scales, _ = functional.int8_vectorwise_quant(theirs)
    found = quantize(value, axes, summed, "int8")
    np.testing.assert_array_equal(as_matrices(found.codes, order, outs)[0], codes)
    np.testing.assert_array_equal(np.asarray(found.scales).reshape(-1), scales)


@pytest.mark.parametrize("side", SIDES)
def test_int8_rounds_to_a_127th_of_the_largest_of_each_result(side):
    axes, summed, order = SIDES[side]
    shape = (2, 128, 4, 64) if side == "query" else (2, 4, 64, 128)
    outs = 256 if side == "query" else 128
    value = weight(shape)
    found = quantize(value, axes, summed, "int8")
    rows = as_matrices(value, order, outs)
    step = np.abs(rows).max(-1, keepdims=True) / 127
    error = as_matrices(dequantize(found), order, outs) - rows
    assert (np.abs(error) <= step * 0.5001).all()
    assert np.abs(found.codes).max() == 127


def tuning(kind: str) -> LoRA:
    made = tuning_of(Finetune(lora_rank=4, quantize_bits=kind, quantize_group=32), MODEL.build)
    assert isinstance(made, LoRA)
    return made


@functools.cache
def of_the_floats(kind: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of adapters beside the floats that the codes stand for."""
    layout = make_layout()
    program = make_step(MODEL, layout, tuning=tuning(kind))
    state = program.create(seed=0)
    floats = program.rebuild(
        tuning=dataclasses.replace(program.setup.tuning, quantized=frozenset())
    )
    beside = floats.create(0, merge_adapters(program.setup, state))
    with layout.active():
        gradients, metrics, _ = jax.jit(floats.setup.gradients)(beside, BATCH)
    return float(metrics["loss"]), {
        n: np.asarray(v.get_value()) for n, v in by_name(gradients).items()
    }


MESHES = {
    "zero 3": ("nf4", {"fsdp": 2, "tensor": 2}, {}),
    "zero 2, int8": ("int8", {"fsdp": 4, "tensor": 2, "zero": 2}, {"accumulation": 2}),
    "zero bubble, int4": (
        "int4", {"pipe": 2, "fsdp": 2, "tensor": 2},
        {"pipeline": Pipeline(schedule="zero_bubble", microbatches=2, backward="residuals")},
    ),
}  # fmt: skip


# Each mesh compiles twice; the state's bytes on a mesh are in the fast part.
@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_losses_and_gradients_are_those_of_the_floats_on_every_mesh(name):
    kind, sizes, changes = MESHES[name]
    loss, expected = of_the_floats(kind)
    found = evaluate(make_step(MODEL, make_layout(**sizes), tuning=tuning(kind), **changes), BATCH)
    assert found["loss"] == pytest.approx(loss, abs=TOLERANCE)
    gradients = by_name(found["gradients"])
    assert set(gradients) == set(expected)
    for parameter, gradient in gradients.items():
        np.testing.assert_allclose(
            gradient.get_value(), expected[parameter], rtol=0, atol=TOLERANCE, err_msg=parameter
        )


def test_the_backward_pass_makes_the_floats_again_instead_of_keeping_them():
    program = make_step(MODEL, make_layout(), tuning=tuning("nf4"))
    state = program.abstract_state()

    def kept(params, frozen, batch):  # noqa: ANN001, ANN202
        def loss(params):  # noqa: ANN001, ANN202
            whole = program.setup.tuning.join((params, frozen))
            return program.setup.sums(whole, state.statistics, batch, train=True)[0]["loss"]

        return jax.tree.leaves(jax.vjp(loss, params)[1])

    with program.setup.layout.active():
        found = jax.eval_shape(kept, state.params, state.frozen, BATCH)
    weights = {
        v.get_value().shape
        for v in by_name(train_all(program.setup).abstract_state().params).values()
    }
    stacked = {shape for shape in weights if len(shape) > 2}
    assert len(stacked) == 3
    assert not [x for x in found if x.shape in stacked]
    assert [x for x in found if x.dtype == np.uint8]


WIDE = ["GPT.embed_dim=128", "GPT.num_heads=2", "Mesh.fsdp=2", "Mesh.tensor=2", "Mesh.data=2"]


def test_bytes_of_the_state_are_the_compiled_steps_arguments(tiny_config):
    adapters = ["Finetune.lora_rank=4", "Finetune.quantize_bits='nf4'"]
    config = load_config(tiny_config, [*WIDE, *adapters])
    program = program_of(config, layouts.layout(config))
    batch = config.train.data.abstract_batch(config.train.global_batch_size)
    stats: Any = lower_step(program, batch).compile().memory_analysis()
    planned = argument_bytes(config, program.setup.layout)
    assert planned.total == stats.argument_size_in_bytes
    # Half a byte a number and 4 bytes for 64 of them, over 4 devices, in 2 layers of 12 x 128^2.
    held = {n: v.get_value() for n, v in by_name(program.abstract_state().frozen).items()}
    few = sum(v.size * v.dtype.itemsize for n, v in held.items() if n.endswith(("codes", "scales")))
    assert few == 2 * 12 * 128**2 * (0.5 + 4 / 64)
    in_float = argument_bytes(load_config(tiny_config, [*WIDE, adapters[0]]), program.setup.layout)
    assert in_float.params - planned.params == 2 * 12 * 128**2 * 4 // 4 - few // 4


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["Finetune.quantize_bits='nf4'"], r"set Finetune\.lora_rank"),
        (["Finetune.quantize_bits='int8'", "Finetune.freeze=('layers/*',)"], "only adapters"),
        (["Finetune.lora_rank=4", "Finetune.quantize_bits='nf4'"],
         r"blocks of 64.*quantize_bits='int8'"),
        ([*WIDE, "Mesh.fsdp=4", "Mesh.data=1", "Finetune.lora_rank=4",
          "Finetune.quantize_bits='nf4'"],
         "over 4 devices"),
        # One sentence of all weights, with a group that fits them all.
        (["Finetune.lora_rank=4", "Finetune.quantize_bits='int4'", "Mesh.fsdp=1", "Mesh.data=4"],
         "^Finetune.quantize_bits='int4': [^;]* layers/out has 8 along head_dim, and layers/qkv, "
         "layers/up have 32 along embed, which does not divide into blocks of 128; use Finetune."
         "quantize_group=8, or Finetune.quantize_bits='int8', or fewer devices along that axis$"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_so_is_refused(bindings, said, tiny_config):
    with pytest.raises(UserError, match=said):
        preflight.check(load_config(tiny_config, bindings), device_count=8, platform="cpu")
