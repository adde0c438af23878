"""Rotary positions of a config.json that mixes the older and the newer form, as transformers."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from test_config_keys import FAMILIES, SMALL, class_of
from test_huggingface_models import from_pretrained, logits, random_model

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.family import model_of
from jaxtrain.models.weights.folder import Folder
from jaxtrain.run.huggingface import parameters, receipt
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose
from jaxtrain.training.finetune.tuning import Tuning
from jaxtrain.training.settings import load_config

transformers = pytest.importorskip("transformers", reason="transformers is the peer")

DECODERS = {
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GemmaForCausalLM",
    "Gemma2ForCausalLM", "GptOssForCausalLM",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6}
# What takes the place of a file's rope_parameters.
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta-alone": {"rope_theta": 500000.0},
    "theta-next-to-default": {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default"}},
    "theta-next-to-llama3": {"rope_theta": 500000.0, "rope_parameters": LLAMA3},
    "theta-in-both": {"rope_theta": 500000.0, "rope_parameters": {**LLAMA3, "rope_theta": 300.0}},
    "scaling-before-parameters": {
        "rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "scaling-with-theta": {"rope_theta": 300.0, "rope_scaling": {**LLAMA3, "rope_theta": 700.0}},
    "empty-scaling": {"rope_scaling": {}, "rope_theta": 50.0,
                      "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "empty-parameters": {"rope_parameters": {}, "rope_theta": 300.0},
    "null-parameters": {"rope_parameters": None, "rope_scaling": None, "rope_theta": 300.0},
    "older-type": {"rope_scaling": {**LLAMA3, "type": "yarn"}},
    "original-outside": {"rope_theta": 900.0, "rope_scaling": YARN,
                         "original_max_position_embeddings": 40},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 300.0},
    "original-nowhere": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
}  # fmt: skip


def with_rope(architecture: str, variant: dict[str, Any]) -> dict[str, Any]:
    settings = SMALL[FAMILIES[architecture].model_type]
    return {**settings, "max_position_embeddings": 24, **variant}


def theirs_of(architecture: str, content: dict[str, Any]) -> Any:
    config = class_of(FAMILIES[architecture].model_type)(**json.loads(json.dumps(content)))
    return getattr(transformers, architecture)(config).model.rotary_emb


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", sorted(DECODERS))
def test_frequencies_are_those_of_transformers(architecture, variant):
    content = with_rope(architecture, VARIANTS[variant])
    if (
        architecture == "GptOssForCausalLM"
    ):  # whose class does not round YaRN's pairs, nor does a file that names it
        rope = content.get("rope_scaling")
        if rope and rope.get("rope_type", rope.get("type")) == "yarn":
            content["rope_scaling"] = {**rope, "truncate": False}
    if architecture == "MixtralForCausalLM":  # whose YaRN fails there without it
        content["head_dim"] = 8
    theirs = theirs_of(architecture, content)
    ours = model_of({**content, "architectures": [architecture]}, where="config.json")[1]
    ours = ours.block.attention.rotary
    frequencies = ours.frequencies(2 * len(theirs.inv_freq))
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=2e-6)
    assert ours.scale == pytest.approx(theirs.attention_scaling, rel=1e-6)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"rope_theta": 500000.0, "rope_local_base_freq": 300.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 900.0},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_theta": 900.0},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default"},
            },
            "rope_theta": 900.0,
            "rope_local_base_freq": 300.0,
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        },
    ],
)
def test_frequencies_of_both_kinds_of_layers_are_those_of_transformers(variant):
    content = with_rope("Gemma3ForCausalLM", variant)
    theirs = theirs_of("Gemma3ForCausalLM", content)
    ours = model_of({**content, "architectures": ["Gemma3ForCausalLM"]}, where="config.json")[1]
    for own, there in (
        (ours.block.attention.rotary, theirs.full_attention_inv_freq),
        (ours.block.attention.local.rotary, theirs.sliding_attention_inv_freq),
    ):
        np.testing.assert_allclose(own.frequencies(2 * len(there)), there.numpy(), rtol=2e-6)


@pytest.mark.parametrize(
    ("architecture", "variant", "said"),
    [
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
         "rope_type = 'dynamic'; it must be 'default' or 'linear' or 'llama3' or 'yarn'"),
        ("LlamaForCausalLM", {"rope_scaling": {"factor": 2.0}},
         "factor = 2.0; it must be None or 1 (rope_type 'default' applies no scaling)"),
        ("LlamaForCausalLM", {"rope_scaling": {**LLAMA3, "beta_fast": 4.0}},
         "beta_fast = 4.0; it must be None (rope_type 'llama3' does not read it)"),
        ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 3.0}}},
         "full_attention = {'rope_theta': 3.0} is an unknown key"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
         "rope_type = 'longrope'; it must be 'default'"),
        ("Gemma3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}},
         "rope_scaling.type, which transformers does not read; it must be rope_type"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 5e5}},
         "rope_parameters.rope_theta; it must have sliding_attention and full_attention"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale_all_dim"),
        ("LlamaForCausalLM", {"rope_interleaved": True}, "rope_interleaved = True; it must be Fa"),
    ],
)  # fmt: skip
def test_rotary_positions_that_are_not_done_here_are_rejected(architecture, variant, said):
    content = {**with_rope(architecture, variant), "architectures": [architecture]}
    with pytest.raises(UserError) as error:
        model_of(content, where="config.json")
    assert said in str(error.value)


CASES = {
    "llama": ("Llama", VARIANTS["theta-next-to-llama3"]),
    "gemma3": ("Gemma3", {"rope_theta": 700.0, "rope_local_base_freq": 30.0,
                          "rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "deepseek": ("DeepseekV3", {"rope_theta": 700.0, "original_max_position_embeddings": 40,
                                "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "phi3": ("Phi3", {"rope_theta": 700.0, "partial_rotary_factor": 0.5,
                      "rope_parameters": {"rope_type": "default"}}),
}  # fmt: skip


# The cases that are left run the same code.
@pytest.mark.slow_cases("llama", "phi3")
@pytest.mark.parametrize("case", CASES)
def test_logits_of_an_edited_file_are_those_of_transformers(case, tmp_path):
    kind, variant = CASES[case]
    name = next(a for a in FAMILIES if a == f"{kind}ForCausalLM")
    made = random_model(kind, {**SMALL[FAMILIES[name].model_type], "max_position_embeddings": 24})
    made.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    content = json.loads(file.read_text())
    del content["rope_parameters"]
    file.write_text(json.dumps({**content, **variant}))
    tokens = np.random.default_rng(1).integers(1, 64, (1, 24))
    expected = logits(from_pretrained(tmp_path / "source"), tokens)

    config = load_config(f"hf:{tmp_path / 'source'}")
    program = compose(config, layouts.layout(config)).setup.replace(tuning=Tuning())
    model = config.train.model
    params = parameters.read_parameters(Folder(tmp_path / "source"), program, model)
    ours = jax.device_get(receipt.logits_of(program, model, params, tokens))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    assert np.abs(expected).max() > 1.0
