"""GGUF metadata: logits are those of the model that was written, and other keys are rejected."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is the peer of this test")
pytest.importorskip("gguf", reason="gguf writes the files")

import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.constants import Keys
from gguf_files import SIZES, llama, metadata, write

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.formats.gguf import GgufFile
from jaxtrain.models.weights.formats.gguf_metadata import TABLE, key_in_table
from jaxtrain.run.trainer import Trainer

TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 64))


def theirs(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def ours(path) -> np.ndarray:
    return Trainer.from_huggingface(path, bindings=["Precision.compute='float32'"]).logits(TOKENS)


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Within float32 rounding in another order of summation."""
    return bool(np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max())


EVERY_HEAD = {"num_key_value_heads": 4}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
YARN = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
}


@pytest.mark.slow_cases(
    "model3-said3",
    "model9-said9",
    "model12-said12",
    "model1-said1",
    "model2-said2",
    "model4-said4",
    "model5-said5",
    "model7-said7",
    "model8-said8",
    "model10-said10",
    "model11-said11",
    "model13-said13",
    "model14-said14",
    "model16-said16",
)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, {}),
        (EVERY_HEAD, {}),
        (EVERY_HEAD, {"llama.attention.head_count_kv": None}),
        ({}, {"llama.attention.head_count_kv": [2, 2], "llama.attention.head_count": [4, 4],
              "llama.feed_forward_length": [48, 48]}),
        ({}, {"llama.rope.dimension_count": None, "llama.rope.freq_base": None}),
        ({"head_dim": 16}, {"llama.attention.key_length": 16, "llama.attention.value_length": 16}),
        ({}, {"llama.vocab_size": None, "tokenizer.ggml.tokens": [str(n) for n in range(61)]}),
        (LINEAR, {"llama.rope.scaling.factor": 4.0}),
        (LINEAR, {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "linear"}),
        (LINEAR, {"llama.rope.scale_linear": 4.0}),
        (LINEAR, {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}),
        ({}, {"llama.rope.scaling.type": "none"}),
        ({}, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
        ({}, {"llama.rope.scaling.type": "linear"}),
        ({}, {"llama.rope.scaling.factor": 0.0}),
        (YARN, {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.original_context_length": 16}),
        ({}, {"general.base_model.0.name": "x", "general.sampling.temp": 0.7,
              "llama.expert_count": 0, "quantize.imatrix.file": "x", "someone.key": 3,
              "llama.rope.scaling.attn_factor": 1.0, "general.tags": ["a"]}),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_model_that_was_written(tmp_path, model, said):
    model = llama(**model)
    path = write(tmp_path / "model.gguf", model, {**metadata(model), **said})
    assert close(ours(path), theirs(model))


def test_transformers_reads_the_same_from_a_quantized_file(tmp_path):
    model = llama()
    kind = GGMLQuantizationType.Q8_0
    path = write(tmp_path / "model.gguf", llama(intermediate_size=64), {
        **metadata(model), "llama.feed_forward_length": 64}, kind=kind)  # fmt: skip
    read = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype="float32"
    )
    assert close(ours(path), theirs(read.eval()))


# The cases that are left run the same code.
@pytest.mark.slow_cases("model1-said1-None", "model4-said4-ignores attention.key_length")
@pytest.mark.parametrize(
    ("model", "said", "words"),
    [
        ({}, {}, None),
        ({}, {"general.name": None, "llama.rope.scaling.type": "none"}, None),
        (EVERY_HEAD, {"llama.attention.head_count_kv": None},
         "leaves rows interleaved where attention.head_count_kv is missing"),
        ({}, {"llama.attention.head_count_kv": [2, 2]},
         "does not read the list attention.head_count_kv"),
        ({"head_dim": 16}, {"llama.attention.key_length": 16, "llama.attention.value_length": 16,
                            "llama.rope.dimension_count": None}, "ignores attention.key_length"),
        (LINEAR, {"llama.rope.scaling.factor": 4.0}, "ignores the scaling of rotary positions"),
    ],
)  # fmt: skip
def test_a_receipt_says_parity_only_of_transformers_reading(tmp_path, capsys, model, said, words):
    model = llama(**model)
    path = write(tmp_path / "model.gguf", model, {**metadata(model), **said})
    assert main(["import-hf", str(path), "--workdir", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "run" / "huggingface" / "parity.json").read_text())
    assert found["passed"]
    if words is None:
        assert "Parity: the largest difference of a logit over 32 inputs is" in shown
        assert found["compared_with"] == f"transformers {transformers.__version__}"
        return
    assert "Parity" not in shown
    assert "Compared with itself: 21 of 21 tensors are bit for bit those of" in shown
    assert f"Not compared with another program: transformers {words}" in shown
    assert found["compared_with"] == "itself"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "longrope"},
         "rope.scaling.type = 'longrope'; it must be 'none' or 'linear' or 'yarn'"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor = 1.5; it must be 1.0"),
        ({"llama.attention.head_count_kv": [2, 4]},
         "attention.head_count_kv = [2, 4]; it must be the same whole number for all layers"),
        ({"llama.attention.head_count": None}, "attention.head_count is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None},
         "attention.layer_norm_rms_epsilon is missing"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count = 4; it must be 8"),
        ({"llama.attention.value_length": 4}, "attention.value_length = 4; it must be 8"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8; it must be 0 (mixtures of experts"),
        ({"llama.attention.sliding_window": 16}, "llama.attention.sliding_window = 16; it must"),
        ({"llama.attention.scale": 0.5},
         "llama.attention.scale = 0.5; it must be None (it belongs to another architecture)"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5; it must be 1.0"),
        ({"llama.rope.freq_bass": 5e5},
         "llama.rope.freq_bass = 500000.0 is an unknown key (the nearest is "
         "'llama.rope.freq_base')"),
        ({"general.tipe": "adapter"}, "general.tipe = 'adapter' is an unknown key"),
        ({"general.type": "adapter"}, "general.type = 'adapter'; it must be 'model'"),
        ({"split.count": 2}, "split.count = 2; it must be 0 or 1 (it is one of several files"),
        ({"tokenizer.ggml.add_bos_tokn": True},
         "tokenizer.ggml.add_bos_tokn = True is an unknown key"),
        ({"xielu.eps": 1.0}, "xielu.eps = 1.0 is an unknown key"),
    ],
)  # fmt: skip
def test_what_would_change_the_logits_is_rejected_by_name(tmp_path, said, words):
    model = llama()
    path = write(tmp_path / "model.gguf", model, {**metadata(model), **said})
    with pytest.raises(UserError, match=re.escape(words)) as error:
        _ = GgufFile(path).family_and_model
    assert f"{path}: its metadata has what is not supported here:" in str(error.value)


def keys_of(group: type) -> list[str]:
    found = []
    for value in vars(group).values():
        if isinstance(value, type):
            found += keys_of(value)
        elif isinstance(value, str) and not value.startswith("gguf."):
            found.append(value)
    return found


# Of files that hold no model, which general.type says, or of other architectures' settings.
OF_NO_LLAMA = ("adapter.", "imatrix.", "clip.", "diffusion.", "xielu.")


def test_the_table_has_every_key_that_the_package_gguf_knows():
    every = [key.replace("{arch}", "llama") for key in keys_of(Keys) if "." in key]
    assert len(every) > 250
    known = [key for key in every if not key.startswith(OF_NO_LLAMA)]
    assert [key for key in known if key_in_table(key) not in TABLE] == []
