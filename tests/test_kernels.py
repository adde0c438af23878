"""What kernels reject, what 'auto' means on a platform, and that steps are made of that."""

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import pytest
from conftest import needs_libtpu, text_batch

from jaxtrain.analysis.planning.compiled.compiled import lower, target_layout
from jaxtrain.analysis.planning.machines.targets import compiler_options, parse_target
from jaxtrain.nn.attention.kernel_registry import Request, choose, validate
from jaxtrain.parallel.devices import OLD_GPU, platform_of, platform_of_device
from jaxtrain.training.compose import compose
from jaxtrain.training.layouts import layout as layout_of
from jaxtrain.training.layouts import resolve_config, resolve_kernel
from jaxtrain.training.settings import load_config

GOOD = Request(
    platform="gpu", dtype="bfloat16", causal=True, window=None, segment_ids=False, cached=False,
    head_dim=64, T=1024, S=1024,
)  # fmt: skip
REFUSALS = {
    "xla-float16-on-cpu": (
        "xla", {"platform": "cpu", "dtype": "float16"},
        ["cannot multiply float16 on the CPU; the nearest kernel that can is 'blocked'"],
    ),
    "cudnn-without-gpu": (
        "cudnn", {"platform": "tpu"},
        ["runs on NVIDIA GPUs, not on 'tpu'; the nearest kernel that can is 'tpu'"],
    ),
    "cudnn-float32": (
        "cudnn", {"dtype": "float32"},
        ["computes in bfloat16 or float16, not in float32; the nearest kernel that can is 'xla'"],
    ),
    "cudnn-segment-ids": (
        "cudnn", {"segment_ids": True},
        ["has no segment ids, so it cannot mask across packed documents; the nearest kernel that "
         "can is 'triton'"],
    ),
    "cudnn-window": (
        "cudnn", {"causal": False, "window": 9},
        ["has a window (here 9) for causal attention only; the nearest kernel that can is 'xla'"],
    ),
    "cudnn-cache": (
        "cudnn", {"cached": True},
        ["does not support queries that start in the middle of a key-value cache; the nearest "
         "kernel that can is 'xla'"],
    ),
    "cudnn-head-dim": (
        "cudnn", {"head_dim": 132},
        ["takes a head_dim that is a multiple of 8 up to 128, not 132; the nearest kernel that can "
         "is 'xla'"],
    ),
    "cudnn-old-gpu": (
        "cudnn", {"platform": OLD_GPU},
        ["runs on NVIDIA GPUs from Ampere on (compute capability 8.0); the nearest kernel that can "
         "is 'xla'"],
    ),
    "triton-window": (
        "triton", {"window": 9}, ["has no window (here 9); the nearest kernel that can is 'cudnn'"],
    ),
    "triton-shapes": (
        "triton", {"head_dim": 48, "T": 1000, "S": 1000},
        ["takes a head_dim of 16, 32, 64 or 128, not 48; the nearest kernel that can is 'cudnn'",
         "takes a multiple of 128 queries, not 1000; the nearest kernel that can is 'cudnn'",
         "takes a multiple of 128 keys, not 1000; the nearest kernel that can is 'cudnn'"],
    ),
    "tpu-without-tpu": (
        "tpu", {}, ["runs on TPUs, not on 'gpu'; the nearest kernel that can is 'cudnn'"],
    ),
    "tpu-float16": (
        "tpu", {"platform": "tpu", "dtype": "float16"},
        ["computes in bfloat16 or float32, not in float16; the nearest kernel that can is 'xla'"],
    ),
    "tpu-lengths": (
        "tpu", {"platform": "tpu", "T": 1000, "S": 1001},
        ["takes a multiple of 128 queries, not 1000; the nearest kernel that can is 'xla'",
         "takes a multiple of 128 keys, not 1001; the nearest kernel that can is 'xla'"],
    ),
    "tpu-cache": (
        "tpu", {"platform": "tpu", "cached": True},
        ["does not support queries that start in the middle of a key-value cache; the nearest "
         "kernel that can is 'xla'"],
    ),
    "cudnn-capped": (
        "cudnn", {"capped": True},
        ["does not support a soft cap on the scores; the nearest kernel that can is 'xla'"],
    ),
    "triton-sinks": (
        "triton", {"sinks": True}, ["has no attention sinks; the nearest kernel that can is 'xla'"],
    ),
    "all-of-them": (
        "cudnn", {"platform": "cpu", "dtype": "float16", "segment_ids": True, "head_dim": 12},
        ["runs on NVIDIA GPUs, not on 'cpu'; the nearest kernel that can is 'blocked'",
         "has no segment ids, so it cannot mask across packed documents; the nearest kernel that "
         "can is 'blocked'",
         "takes a head_dim that is a multiple of 8 up to 128, not 12; the nearest kernel that can "
         "is 'blocked'"],
    ),
}  # fmt: skip


def asked(**changes: Any) -> Request:
    return dataclasses.replace(GOOD, **changes)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    kernel, changes, sentences = REFUSALS[name]
    expected = [f"Attention.kernel={kernel!r} {sentence}" for sentence in sentences]
    assert list(validate(kernel, asked(**changes))) == expected


def test_what_kernels_can_do_is_not_refused() -> None:
    everything = {"window": 9, "segment_ids": True, "cached": True, "head_dim": 20, "T": 7}
    assert list(validate("reference", asked(**everything, dtype="float16"))) == []
    assert list(validate("xla", asked(**everything))) == []
    assert list(validate("cudnn", asked(window=9, T=1000, S=1000))) == []
    assert list(validate("triton", asked(segment_ids=True))) == []
    assert list(validate("tpu", asked(platform="tpu", window=9, segment_ids=True))) == []
    assert list(validate("tpu", asked(platform="tpu", capped=True, sinks=True))) == []
    assert list(validate("blocked", asked(platform="cpu", capped=True))) == []


# -- what 'auto' means ----------------------------------------------------------------------------

CHOICES = {
    "cpu": ({"platform": "cpu", "dtype": "float32"}, "blocked", "the first choice on a cpu"),
    "cpu-float16-packed": (
        {"platform": "cpu", "dtype": "float16", "segment_ids": True, "head_dim": 12, "T": 7},
        "blocked", "the first choice",
    ),
    "cpu-ring": (
        {"platform": "cpu", "in_ring": True}, "xla",
        "'blocked' returns no log-sum-exp, which a ring over Mesh.context needs to merge its "
        "blocks",
    ),
    "cpu-ring-float16": (
        {"platform": "cpu", "in_ring": True, "dtype": "float16"}, "reference",
        "'xla' cannot multiply float16 on the CPU",
    ),
    "gpu": ({}, "cudnn", "the first choice on a gpu"),
    "gpu-packed": (
        {"segment_ids": True}, "triton",
        "'cudnn' has no segment ids, so it cannot mask across packed documents",
    ),
    "gpu-packed-window": (
        {"segment_ids": True, "window": 9}, "xla", "'triton' has no window (here 9)",
    ),
    "gpu-float32": (
        {"dtype": "float32"}, "xla", "'cudnn' computes in bfloat16 or float16, not in float32",
    ),
    "gpu-capped": ({"capped": True}, "xla", "'triton' does not support a soft cap on the scores"),
    "cpu-sinks": ({"platform": "cpu", "sinks": True}, "blocked", "the first choice on a cpu"),
    "gpu-sinks": ({"sinks": True}, "xla", "'triton' has no attention sinks"),
    "gpu-long-sinks": (
        {"sinks": True, "T": 2048, "S": 2048}, "blocked", "'cudnn' has no attention sinks",
    ),
    "gpu-wide-heads": ({"head_dim": 256}, "xla", "multiple of 8 up to 128, not 256"),
    "gpu-ring": ({"in_ring": True}, "xla", "'cudnn' returns no log-sum-exp"),
    "old-gpu": (
        {"platform": OLD_GPU}, "xla",
        "'cudnn' runs on NVIDIA GPUs from Ampere on (compute capability 8.0); 'triton' runs on",
    ),
    "tpu": (
        {"platform": "tpu", "segment_ids": True, "window": 9}, "tpu", "the first choice on a tpu",
    ),
    "tpu-length": (
        {"platform": "tpu", "T": 1000, "S": 1000}, "xla",
        "'tpu' takes a multiple of 128 queries, not 1000",
    ),
    "another-platform": ({"platform": "metal"}, "xla", "the first choice"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_auto_takes_the_fastest_that_can_and_says_why(name: str) -> None:
    changes, kernel, why = CHOICES[name]
    found = choose(asked(**changes))
    assert found.kernel == kernel
    assert why in found.why
    # What it takes is not rejected; what stands before it in the table is, or merges no blocks.
    assert list(validate(kernel, asked(**changes))) == []


@pytest.mark.parametrize(
    ("config", "bindings", "platform", "kernel"),
    [
        ("gpt2_124m", [], "cpu", "blocked"),
        ("gpt2_124m", [], "tpu", "tpu"),
        ("gpt2_124m", [], "gpu", "cudnn"),
        ("gpt2_124m", ["TextData.separate_documents = True"], "gpu", "triton"),
        ("gpt2_124m", ["Precision.compute = 'float32'"], "gpu", "xla"),
        ("llama_8b", ["TextData.separate_documents = False"], "gpu", "cudnn"),
        ("llama_8b", ["Mesh.context = 2"], "tpu", "xla"),
        ("llama_8b", ["Mesh.context = 2", "Attention.context_parallel = 'ulysses'"], "tpu", "tpu"),
        ("llama_8b", ["Attention.kernel = 'reference'"], "tpu", "reference"),
        ("resnet_digits", [], "gpu", None),
        ("lstm_quickstart", [], "tpu", None),
    ],
)
def test_a_configuration_is_resolved_for_the_platform_that_it_is_for(
    config: str, bindings: list[str], platform: str, kernel: str | None
) -> None:
    own = load_config(config, bindings)
    found = resolve_kernel(own, platform)
    assert (None if found is None else found.kernel) == kernel
    assert resolve_config(own, platform).attention.kernel == (kernel or "reference")


def test_a_platform_is_that_of_the_devices() -> None:
    assert platform_of_device(jax.devices()[0]) == "cpu"
    for capability, expected in {
        "7.5": OLD_GPU,
        "8.0": "gpu",
        "9.0": "gpu",
        "10.0": "gpu",
        "gfx90a": OLD_GPU,
    }.items():
        gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        assert platform_of_device(gpu) == expected
    # A process on a CPU plans for TPUs: the mesh says what its code is for.
    device = jax.sharding.AbstractDevice("TPU v5", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=device)
    assert platform_of(mesh) == "tpu"


def test_on_a_cpu_auto_gives_the_loss_and_gradients_of_the_reference(tiny_config) -> None:
    batch = text_batch(rows=8, length=32, vocab_size=256)

    def run(kernel: str) -> tuple[str, Any]:
        config = load_config(tiny_config, [f"Attention.kernel = '{kernel}'"])
        program: Any = compose(config, layout_of(config))
        placed = jax.device_put(batch, program.setup.batch_shardings(batch))
        with program.setup.layout.active():
            state = program.create(0)
            return program.setup.execution.kernel, jax.jit(program.setup.gradients)(state, placed)

    chosen, found = run("auto")
    assert chosen == "blocked"
    _, expected = run("reference")
    leaves, others = (jax.tree.leaves(jax.device_get(tree)) for tree in (found, expected))
    assert len(leaves) == len(others) > 10
    for own, other in zip(leaves, others, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


# -- what is compiled ----------------------------------------------------------------------------

SMALL = [
    "SOURCE = 'synthetic'", "TextData.synthetic_vocab_size = 256",
    "Llama.vocab_size = 256", "Llama.num_layers = 2", "Llama.embed_dim = 256",
    "Llama.num_heads = 4",
    "Llama.num_kv_heads = 2", "Llama.mlp_dim = 256", "TextData.sequence_length = 256",
    "Train.global_batch_size = 8", "Train.accumulation = 1", "Loss.chunk_size = None",
]  # fmt: skip


@pytest.mark.slow
@needs_libtpu
def test_on_tpus_auto_is_a_pallas_kernel_in_the_compiled_step() -> None:
    target = parse_target("v5e:2x2")
    config = load_config("llama_1b", SMALL)
    quick: Any = {"exec_time_optimization_effort": -1.0}
    text = lower(config, target_layout(config, target)).compile(quick).as_text()
    # Forward, again where the layer is recomputed, backward for queries and for keys and values.
    assert text.count('custom_call_target="tpu_custom_call"') == 4
    # Whole tiles are not to be had: XLA's attention, and the run says so.
    config = load_config("llama_1b", [*SMALL, "TextData.sequence_length = 192"])
    assert "tpu_custom_call" not in lower(config, target_layout(config, target)).as_text()


@pytest.mark.cuda_compile
@pytest.mark.parametrize("config", ["gpt2_124m", "llama_1b"])
@pytest.mark.parametrize("packed", [True, False])
def test_on_gpus_auto_is_cudnn_or_with_documents_triton_in_the_compiled_step(
    config: str, packed: bool
) -> None:
    target = parse_target("h200:1x8")
    bindings = [
        "SOURCE = 'synthetic'", "TextData.synthetic_vocab_size = 256",
        f"TextData.separate_documents = {packed}",
    ]  # fmt: skip
    own = load_config(config, bindings)
    lowered = lower(own, target_layout(own, target))
    text = lowered.compile(compiler_options(target)).as_text()
    cudnn = {name: text.count(f'custom_call_target="{name}"') for name in (
        "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")}  # fmt: skip
    if packed:
        assert cudnn == dict.fromkeys(cudnn, 0)
        assert "mha_forward" in text
        assert "mha_backward" in text
    else:
        assert min(cudnn.values()) >= 1
        assert "mha_forward" not in text
    # No scores of every pair of tokens.
    length = own.train.data.sequence_length
    assert f"{length},{length}]" not in text
