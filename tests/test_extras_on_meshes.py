"""What models have besides plain layers equals one device on meshes that hold every pair of axes.

Multi-token prediction, shared experts, router biases and attention sinks: each is a layer, a loss
or an array outside the loop over equal layers, where a mesh is easily forgotten. Sinks are an array
of one layer, split as its heads: for them every axis is enough. The dropout of two
stacks is on every pair of axes in test_encoder_decoder.py, of LoRA adapters in
test_lora_dropout.py, and auxiliary classifiers are in test_googlenet.py.
"""

import functools
import itertools

import pytest
from conftest import make_layout, make_step, text_batch
from parity import assert_equal, evaluate

from jaxtrain.models.model import bias_speed_of
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.transformers.gpt_oss import GPTOSS
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.training.finetune.finetune import Finetune, router_biases, tuning_of
from jaxtrain.training.pipeline.schedules import SCHEDULES, Pipeline

MODELS = {
    # With shared experts; test_qwen_moe.py has those with a gate on two meshes.
    "multi_token": DeepSeek(
        vocab_size=64, num_layers=5, dense_layers=1, embed_dim=32, num_heads=4, query_rank=12,
        key_value_rank=16, plain_dim=8, rotary_dim=4, value_dim=6, mlp_dim=24, expert_mlp_dim=16,
        num_experts=4, experts_per_token=2, expert_groups=2, groups_per_token=1,
        context_length=32, balance_weight=0.01, rope_scaling=1.0, predicted_tokens=2,
    ),
    # Two layers on one rank of a pipeline, and a place without any on the other.
    "sinks": GPTOSS(
        vocab_size=64, num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16,
        mlp_dim=16, num_experts=4, experts_per_token=2, context_length=16, sliding_window=5,
        swiglu_limit=1.0, balance_weight=0.02, rope_theta=100.0, rope_scaling=4.0,
        rope_original_context_length=40,
    ),
}  # fmt: skip
TEXTS = text_batch(rows=16, length=16, vocab_size=64)
RINGS = {"sequence_parallel": True, "collective_matmul": True}
# Model, axes of two devices each, other settings of the layout, other fields of Setup. Every
# schedule has modules and experts behind it once, and each backward pass a schedule of one and of
# two stages a device; a module behind the last stage has rings of permutes along `tensor`, as the
# layers of every stage.
CASES = [
    ("multi_token", ("pipe", "expert", "tensor"), RINGS,
     {"pipeline": Pipeline(schedule="1f1b", microbatches=4, backward="residuals")}),
    ("multi_token", ("pipe", "context", "tensor"), RINGS,
     {"pipeline": Pipeline(schedule="gpipe", microbatches=2)}),
    ("multi_token", ("pipe", "fsdp", "expert"), {},
     {"pipeline": Pipeline(schedule="zero_bubble", microbatches=4)}),
    ("multi_token", ("pipe", "fsdp", "context"), {},
     {"pipeline": Pipeline(schedule="interleaved", virtual_stages=2, microbatches=4)}),
    ("multi_token", ("pipe", "data", "expert"), {},
     {"pipeline": Pipeline(schedule="dualpipe_v", virtual_stages=2, microbatches=4,
                           backward="residuals")}),
    ("multi_token", ("data", "fsdp", "tensor"), {}, {}),
    ("multi_token", ("data", "expert", "context"), {}, {"accumulation": 2}),
    ("sinks", ("pipe", "data", "tensor"), {"sequence_parallel": True},
     {"pipeline": Pipeline(microbatches=2)}),
    ("sinks", ("fsdp", "expert", "context"), {}, {}),
]  # fmt: skip


def program_of(name, layout, **changes):
    sizes = MODELS[name]
    tuning = tuning_of(Finetune(), sizes.build, router_biases(sizes))
    return make_step(sizes, layout, tuning=tuning, bias_speed=bias_speed_of(sizes), **changes)


@functools.cache
def alone(name):
    return evaluate(program_of(name, make_layout()), TEXTS)


def test_meshes_hold_every_pair_of_axes():
    meshes = {name: [axes for model, axes, _, _ in CASES if model == name] for name in MODELS}
    held = {
        frozenset(pair)
        for axes in meshes["multi_token"]
        for pair in itertools.combinations(axes, 2)
    }
    assert held == {frozenset(pair) for pair in itertools.combinations(MESH_AXES, 2)}
    assert set().union(*meshes["sinks"]) == set(MESH_AXES)
    of_modules = [changes for model, _, _, changes in CASES if model == "multi_token"]
    pipelines = [changes["pipeline"] for changes in of_modules if "pipeline" in changes]
    assert {one.schedule for one in pipelines} == set(SCHEDULES)
    assert len({(one.backward, one.virtual_stages) for one in pipelines}) == 4


# Two steps are compiled for each; test_deepseek.py has a mesh with shared experts in the fast part,
# test_attention.py the kernels with sinks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "of_layout", "changes"),
    [pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}") for case in CASES],
)
def test_every_pair_of_axes_equals_one_device(name, axes, of_layout, changes):
    program = program_of(name, make_layout(**dict.fromkeys(axes, 2), **of_layout), **changes)
    assert_equal(evaluate(program, TEXTS, alone(name)), alone(name))
