"""What models have besides plain layers equals one device on meshes that hold every pair of axes.

Multi-token prediction, shared experts, router biases, attention sinks, dropout of two stacks, of
LoRA adapters and auxiliary classifiers: each is a layer, a loss or a random draw outside the loop
over equal layers, where a mesh is easily forgotten.
"""

import functools
import itertools

import pytest
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate
from test_encoder_decoder import pairs
from test_googlenet import images

from jaxtrain.models.convolutional.googlenet import GoogLeNet
from jaxtrain.models.model import bias_speed_of
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.transformers.gpt_oss import GPTOSS
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.transformer import Transformer
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.training.finetune.finetune import Finetune, router_biases, tuning_of
from jaxtrain.training.pipeline.schedules import SCHEDULES, Pipeline

DECODER = {
    "vocab_size": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2,
    "mlp_dim": 16, "context_length": 16,
}  # fmt: skip
MODELS = {
    # With shared experts; test_qwen_moe.py has those with a gate on three meshes.
    "multi_token": DeepSeek(
        vocab_size=64, num_layers=5, dense_layers=1, embed_dim=32, num_heads=4, query_rank=12,
        key_value_rank=16, plain_dim=8, rotary_dim=4, value_dim=6, mlp_dim=24, expert_mlp_dim=16,
        num_experts=4, experts_per_token=2, expert_groups=2, groups_per_token=1,
        context_length=32, balance_weight=0.0, rope_scaling=1.0, predicted_tokens=2,
    ),
    "sinks": GPTOSS(
        **DECODER, head_dim=8, num_experts=4, experts_per_token=2, sliding_window=5
    ),
    "dropout": Transformer(
        vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=32, context_length=16,
        dropout=0.2,
    ),
    "adapter_dropout": Llama(**DECODER),
    "auxiliary_classifiers": GoogLeNet(num_classes=10, width=8, channels=1),
}  # fmt: skip
TEXTS = text_batch(rows=8, length=16, vocab_size=64)
BATCHES = {
    "dropout": pairs(rows=8, source=12, target=8, vocab_size=64),
    "auxiliary_classifiers": images(32, 1, 10),
}
# The axes that can split something of a model; `validate` of mesh and finetune rejects others.
AXES = {
    "dropout": ("pipe", "data", "fsdp", "tensor"),
    "adapter_dropout": ("data", "fsdp", "tensor"),
    "auxiliary_classifiers": ("data", "fsdp", "tensor"),
}
# Meshes of 2 x 2 x 2 devices that hold every pair of them.
ALL_PAIRS = (
    ("pipe", "data", "fsdp"),
    ("pipe", "data", "expert"),
    ("pipe", "context", "tensor"),
    ("data", "context", "tensor"),
    ("fsdp", "expert", "context"),
    ("fsdp", "expert", "tensor"),
)
MESHES = {
    "multi_token": ALL_PAIRS,
    "sinks": ALL_PAIRS,
    "dropout": (("pipe", "data", "fsdp"), ("pipe", "data", "tensor"), ("pipe", "fsdp", "tensor")),
    "adapter_dropout": (("data", "fsdp", "tensor"),),
    "auxiliary_classifiers": (("data", "fsdp", "tensor"),),
}
CASES = [(name, axes) for name, meshes in MESHES.items() for axes in meshes]


def program_of(name, layout, **changes):
    sizes = MODELS[name]
    settings = Finetune(lora_rank=4, lora_dropout=0.3) if name == "adapter_dropout" else Finetune()
    tuning = tuning_of(settings, sizes.build, router_biases(sizes))
    return make_step(sizes, layout, tuning=tuning, bias_speed=bias_speed_of(sizes), **changes)


@functools.cache
def alone(name):
    return evaluate(program_of(name, make_layout()), BATCHES.get(name, TEXTS))


def equals_one_device(name, sizes, **changes):
    program = program_of(name, make_layout(**sizes), **changes)
    assert_equal(evaluate(program, BATCHES.get(name, TEXTS)), alone(name))


def test_meshes_hold_every_pair_of_axes():
    assert MESHES.keys() == MODELS.keys()
    for name, meshes in MESHES.items():
        held = {pair for axes in meshes for pair in itertools.combinations(axes, 2)}
        assert held == set(itertools.combinations(AXES.get(name, MESH_AXES), 2)), name


# Two steps are compiled for each; test_deepseek.py has a mesh with shared experts and modules that
# predict further tokens in the fast part, test_attention.py the kernels with sinks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"), [pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}") for case in CASES]
)
def test_every_pair_of_axes_equals_one_device(name, axes):
    pipeline = Pipeline(microbatches=2) if "pipe" in axes else Pipeline()
    equals_one_device(name, dict.fromkeys(axes, 2), pipeline=pipeline)


# Each backward pass with schedules of one and of two stages a device.
BACKWARDS = {
    "gpipe": "recompute", "1f1b": "residuals", "interleaved": "recompute",
    "zero_bubble": "recompute", "dualpipe_v": "residuals",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_modules_with_experts_equal_one_device_in_every_schedule(schedule):
    """Their experts are split over `expert`, and no layer of a stage is theirs."""
    virtual = 2 if schedule in ("interleaved", "dualpipe_v") else 1
    pipeline = Pipeline(
        schedule=schedule, virtual_stages=virtual, microbatches=4, backward=BACKWARDS[schedule]
    )
    equals_one_device("multi_token", {"pipe": 2, "expert": 2}, pipeline=pipeline)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_modules_in_rings_of_products_equal_one_device(schedule):
    """A module behind the last stage has permutes along `tensor`, as the layers of every stage."""
    layout = make_layout(pipe=2, tensor=2, sequence_parallel=True, collective_matmul=True)
    program = program_of(
        "multi_token", layout, pipeline=Pipeline(schedule=schedule, microbatches=2)
    )
    assert_equal(evaluate(program, TEXTS), alone("multi_token"))
