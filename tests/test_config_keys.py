"""Every key of a config.json is used, irrelevant or limited, by the classes of transformers."""

import dataclasses
import json
from typing import Any

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.config.key_table import Irrelevant, Used
from jaxtrain.models.weights.config_file import QUANTIZATION, ConfigFile
from jaxtrain.models.weights.family import families, model_of

transformers = pytest.importorskip("transformers", reason="its classes are the peer")

FAMILIES = {family.architecture: family for family in families()}
DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 24,
}  # fmt: skip
ENCODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 24,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
DEEPSEEK = {
    **DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
# By model_type: the settings of a small model.
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), DECODER),
    **dict.fromkeys(("gemma", "gemma2", "qwen3"), {**DECODER, "head_dim": 16}),
    "gemma3_text": {**DECODER, "head_dim": 16, "num_hidden_layers": 7},
    "phi3": {**DECODER, "pad_token_id": 0},
    "mixtral": {**DECODER, "num_local_experts": 4},
    "qwen2_moe": {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**DECODER, **EXPERTS},
    "gpt_oss": {**DECODER, "head_dim": 16, "num_local_experts": 6},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt2": {"vocab_size": 64, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "bert": ENCODER,
    "roberta": {**ENCODER, "pad_token_id": 3},
    "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "mamba": {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
    "mamba2": {
        "vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2,
        "num_heads": 8, "head_dim": 8, "n_groups": 1, "tie_word_embeddings": True,
    },
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "image_size": 16, "patch_size": 4, "num_labels": 5},
    "resnet": {"embedding_size": 8, "hidden_sizes": [32, 64, 128, 256], "num_labels": 5},
}  # fmt: skip
# Read where text is made and tokens are generated, and not with the sizes.
ELSEWHERE = {"architectures", "model_type", "quantization_config", "bos_token_id", "eos_token_id",
             "pad_token_id", "decoder_start_token_id"}  # fmt: skip


def class_of(model_type: str) -> Any:
    return type(transformers.AutoConfig.for_model(model_type))


def written(architecture: str, **settings: Any) -> dict[str, Any]:
    """What transformers writes for a model with these settings."""
    made = class_of(FAMILIES[architecture].model_type)(**settings)
    content = json.loads(json.dumps(made.to_dict()))
    return {**content, "architectures": [architecture]}


def small(architecture: str) -> dict[str, Any]:
    return written(architecture, **SMALL[FAMILIES[architecture].model_type])


def read(content: dict[str, Any]) -> Any:
    """The sizes, or that it is rejected."""
    try:
        return model_of(content, where="config.json")[1]
    except UserError:
        return "rejected"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_key_that_transformers_knows_is_in_the_table(architecture):
    family, cls = FAMILIES[architecture], class_of(FAMILIES[architecture].model_type)
    generation = transformers.GenerationConfig._get_default_generation_params()
    known = {
        *(field.name for field in dataclasses.fields(cls)),
        *cls.attribute_map, *cls.attribute_map.values(),
        *small(architecture), *transformers.PreTrainedConfig().to_dict(), *generation,
        "torch_dtype", "rope_theta", "rope_scaling", "num_labels", "per_layer_config",
    }  # fmt: skip
    if not hasattr(cls(), "rope_parameters"):
        known -= {"rope_theta", "rope_scaling"}
    assert not known - family.keys.keys() - family.aliases.keys()
    of_class = cls.attribute_map.items()
    assert {frozenset(pair) for pair in family.aliases.items()} == set(map(frozenset, of_class))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_transformers_writes_by_default_is_read(architecture):
    assert read(small(architecture)) != "rejected"
    extra = {"torch_dtype": "bfloat16", "use_cache": False, "attention_dropout": 0.1}
    assert read({**small(architecture), **extra}) == read(small(architecture))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_missing_key_has_the_default_of_transformers(architecture):
    whole, family = small(architecture), FAMILIES[architecture]
    checked = 0
    for key in whole:
        if key in ELSEWHERE - {"pad_token_id"} or isinstance(family.keys.get(key), Irrelevant):
            continue
        content = {name: value for name, value in whole.items() if name != key}
        found = read(content)
        if found == "rejected":  # said, and so never wrong
            continue
        assert found == read(written(architecture, **content)), key
        checked += 1
    assert checked > 2


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_the_table_calls_used_is_read(architecture):
    taken = set()

    class Recorded(dict):
        def get(self, key, default=None):
            taken.add(key)
            return super().get(key, default)

    family, whole = FAMILIES[architecture], small(architecture)
    old = {"sliding_window_pattern": 3, "layer_types": None}
    variants = [whole, {**whole, **old}, {**whole, "topk_method": "group_limited_greedy"}]
    variants.append({**whole, "rope_parameters": None, "rope_scaling": {"rope_type": "yarn"}})
    variants += [{name: whole[name] for name in whole if name != key} for key in whole]
    for content in variants:
        family.read(ConfigFile(Recorded(content)))
    used = {key for key, entry in family.keys.items() if isinstance(entry, Used)}
    assert not used - taken - ELSEWHERE
    assert not {key for key in taken if key not in family.keys}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_unknown_key_is_rejected_by_name(architecture):
    content = {**small(architecture), "residual_multiplier": 0.22}
    with pytest.raises(UserError, match="residual_multiplier = 0.22 is an unknown key"):
        model_of(content, where="config.json")


@pytest.mark.parametrize(
    ("architecture", "other", "name"),
    [
        (family.architecture, other, name)
        for family in families()
        for other, name in family.aliases.items()
        if name not in ("num_nextn_predict_layers", "num_layers")  # of no size, or of two
    ],
)
def test_another_name_of_a_key_is_read_as_transformers_reads_it(architecture, other, name):
    whole = small(architecture)
    values = [whole.pop(key, None) for key in (name, other)]  # it writes one of the two
    value = values[0] or values[1]
    assert read({**whole, other: value}) == read({**whole, name: value}) != "rejected"
    both = {**whole, name: value * 2, other: value}
    made = class_of(FAMILIES[architecture].model_type)(**both)
    assert getattr(made, name) == value
    assert read(both) == read({**whole, name: value})


def test_every_key_of_quantization_that_transformers_knows_is_in_its_table():
    made = {
        "awq": transformers.AwqConfig(),
        "fp8": transformers.FineGrainedFP8Config(),
        "mxfp4": transformers.Mxfp4Config(),
    }
    assert made.keys() == QUANTIZATION.keys()
    for method, settings in made.items():
        known = {*settings.to_dict(), *vars(settings)}
        assert not known - QUANTIZATION[method].keys(), method


@pytest.mark.parametrize(
    ("architecture", "method", "changes", "said"),
    [
        ("LlamaForCausalLM", "awq", {"bits": 8}, "quantization_config.bits = 8; it must be 4"),
        ("LlamaForCausalLM", "awq", {"zero_point": False}, "quantization_config.zero_point = Fal"),
        (
            "LlamaForCausalLM",
            "awq",
            {"order": 1},
            "quantization_config.order = 1 is an unknown key",
        ),
        ("LlamaForCausalLM", "fp8", {}, "quantization_config = "),
        ("DeepseekV3ForCausalLM", "fp8", {"fmt": "e5m2"}, "quantization_config.fmt = 'e5m2'"),
        ("DeepseekV3ForCausalLM", "fp8", {"activation_scheme": "static"}, "activation_scheme"),
        (
            "GptOssForCausalLM",
            "mxfp4",
            {"bits": 3},
            "quantization_config.bits = 3 is an unknown key",
        ),
    ],
)
def test_quantization_that_is_not_read_is_rejected(architecture, method, changes, said):
    quantization = {"quant_method": method, **changes}
    with pytest.raises(UserError) as error:
        model_of({**small(architecture), "quantization_config": quantization}, where="it")
    assert said in str(error.value)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("kinds", [7, "full_attention", [], ["full_attention"] * 3, [None] * 4])
def test_kinds_of_layers_that_are_none_are_rejected(architecture, kinds):
    """Of 10^9 layers too, without a list of as many."""
    for layers in (4, 10**9):
        content = {**small(architecture), "num_hidden_layers": layers, "layer_types": kinds}
        with pytest.raises(UserError, match="layer_types"):
            model_of(content, where="it")
