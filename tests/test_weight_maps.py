"""Name maps: each covers its model, is its own inverse, and reads the config.json it writes."""

import dataclasses
import json
import math
import os
import re

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtrain.config.errors import UserError
from jaxtrain.models.convolutional.resnet import ResNet
from jaxtrain.models.model import Unstacked
from jaxtrain.models.state_space.mamba import Mamba
from jaxtrain.models.state_space.mamba2 import Mamba2
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.transformers.gemma import Gemma, Gemma2, Gemma3
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.gpt_oss import GPTOSS
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.models.transformers.t5 import T5
from jaxtrain.models.transformers.vit import ViT
from jaxtrain.models.weights.family import families, family_for, model_of, their_shapes
from jaxtrain.models.weights.folder import Folder, match
from jaxtrain.models.weights.formats.safetensors import write
from jaxtrain.nn.parameters import Statistic
from jaxtrain.parallel.sharding import flatten

SMALL = {"vocab_size": 13, "num_layers": 3, "embed_dim": 12, "num_heads": 6, "context_length": 10}
GROUPED = {**SMALL, "num_kv_heads": 2, "mlp_dim": 7}
DEEPSEEK = {
    **SMALL, "key_value_rank": 4, "plain_dim": 3, "rotary_dim": 2, "value_dim": 5, "mlp_dim": 7,
    "expert_mlp_dim": 3, "num_experts": 6, "experts_per_token": 2, "expert_groups": 3,
    "groups_per_token": 2, "dense_layers": 1,
}  # fmt: skip
MODELS = {
    "gpt2": GPT(**{**SMALL, "num_heads": 3}),
    "llama": Llama(
        **GROUPED, rope_scaling=8.0, rope_theta=5e5, rope_original_context_length=5, norm_eps=1e-6
    ),
    "mistral": Llama(**GROUPED, sliding_window=4, tie_embeddings=True),
    "qwen2": Llama(**GROUPED, qkv_bias=True),
    "qwen3": Llama(
        **GROUPED,
        qk_norm=True,
        head_dim=4,
        rope_type="yarn",
        rope_scaling=4.0,
        rope_high_frequency_factor=32.0,
        rope_original_context_length=5,
    ),
    "mixtral": Mixtral(**GROUPED, num_experts=5, experts_per_token=3, balance_weight=0.01),
    "gemma": Gemma(**GROUPED, head_dim=4),
    "gemma2": Gemma2(
        **GROUPED, head_dim=4, global_every=3, sliding_window=3, query_width=6, logit_softcap=None
    ),
    "gemma3_text": Gemma3(
        **GROUPED, head_dim=4, global_every=2, sliding_window=3, rope_scaling=8.0, query_width=6
    ),
    "deepseek_v3": DeepSeek(**DEEPSEEK, rope_scaling=8.0, rope_original_context_length=5),
    "deepseek_v2": DeepSeek(
        **{**DEEPSEEK, "dense_layers": 0},
        query_rank=None,
        rope_scaling=1.0,
        router="softmax",
        normalize_gates=False,
        bias_speed=0.0,
    ),
    "phi3": Llama(**{**GROUPED, "num_heads": 3, "num_kv_heads": 1}, rope_fraction=0.5),
    "qwen3_moe": Mixtral(
        **GROUPED,
        num_experts=5,
        experts_per_token=3,
        balance_weight=0.01,
        normalize_gates=False,
        qk_norm=True,
        head_dim=4,
    ),
    "qwen2_moe": Mixtral(
        **GROUPED,
        num_experts=5,
        experts_per_token=3,
        balance_weight=0.01,
        qkv_bias=True,
        shared_mlp_dim=11,
    ),
    "gpt_oss": GPTOSS(
        **GROUPED,
        head_dim=4,
        num_experts=5,
        experts_per_token=3,
        balance_weight=0.01,
        swiglu_limit=3.0,
        global_every=3,
        sliding_window=3,
        rope_original_context_length=5,
    ),
    "mamba": Mamba(
        vocab_size=13,
        num_layers=3,
        embed_dim=12,
        expand=3,
        state_dim=4,
        step_rank=2,
        conv_width=5,
        context_length=10,
        norm_eps=1e-6,
    ),
    "mamba2": Mamba2(
        vocab_size=13,
        num_layers=3,
        embed_dim=12,
        expand=3,
        head_dim=9,
        state_dim=4,
        conv_width=5,
        context_length=10,
        norm_eps=1e-6,
    ),
    "bert": BERT(**SMALL, mlp_dim=7, token_types=3, norm_eps=1e-6),
    "bert of sentences": BERT(**SMALL, mlp_dim=7, objective="token_classification", num_classes=5),
    "bert of embeddings": BERT(**SMALL, mlp_dim=7, pooling="mean"),
    "roberta": BERT(**SMALL, mlp_dim=7, token_types=1, first_position=2),
    "roberta of embeddings": BERT(**SMALL, mlp_dim=7, first_position=2, pooling="mean"),
    "vit": ViT(
        num_classes=5,
        channels=2,
        image_size=12,
        patch_size=4,
        num_layers=3,
        embed_dim=12,
        num_heads=3,
        mlp_dim=7,
        norm_eps=1e-12,
    ),
    "resnet": ResNet(depth=50, num_classes=3, channels=2, width=3),
    "t5": T5(
        **SMALL,
        head_dim=5,
        mlp_dim=7,
        mlp="gated_gelu",
        tie_embeddings=False,
        scale_outputs=False,
        buckets=8,
        distance=9,
        norm_eps=1e-5,
    ),
}


def shapes_of(model):
    module = nnx.eval_shape(lambda: model.build(jax.random.key(0)))
    shapes = nnx.state(module, (nnx.Param, Statistic))
    names, leaves, _ = flatten(shapes)
    return {name: tuple(leaf.shape) for name, leaf in zip(names, leaves, strict=True)}


def of(name):
    return family_for(MODELS[name], name)[0]


def test_every_family_stands_here():
    found = [of(name) for name in MODELS]
    assert sorted(f.architecture for f in found) == sorted(f.architecture for f in families())
    assert all(name.split()[0] == family.model_type
               for name, family in zip(MODELS, found, strict=True))  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_map_covers_every_parameter_once_and_is_its_own_inverse(name):
    model = MODELS[name]
    shapes, names = shapes_of(model), of(name).names(model)
    assert sorted(one.ours for one in names) == sorted(shapes)
    theirs = their_shapes(names, shapes)
    assert sum(map(math.prod, theirs.values())) == sum(map(math.prod, shapes.values()))
    rng = np.random.default_rng(0)
    ours = {one.ours: rng.standard_normal(shapes[one.ours]) for one in names}
    there = {tensor: np.full(shape, np.nan) for tensor, shape in theirs.items()}
    for one in names:
        first, (turn, turns) = 0 if one.rows is None else one.rows[0], one.turn or (0, 1)
        for place, tensor in one.tensors(shapes[one.ours]):
            made = one.to_theirs(ours[one.ours][place])
            its = there[tensor][first : first + len(made)][..., turn::turns]
            assert one.rows is not None or made.shape == its.shape
            assert np.isnan(its).all(), "no two have a row"
            its[...] = made
    assert not any(np.isnan(tensor).any() for tensor in there.values())
    for one in names:
        back = np.full_like(ours[one.ours], np.nan)
        for place, tensor in one.tensors(back.shape):
            back[place] = one.to_ours(there[tensor], back.shape)
        assert np.array_equal(back, ours[one.ours]), one


@pytest.mark.parametrize("name", MODELS)
def test_sizes_come_back_from_the_config_json_that_they_make(name):
    family, said = family_for(MODELS[name], name)
    content = json.loads(json.dumps({**said, "architectures": [family.architecture]}))
    assert model_of(content, where="config.json") == (family, MODELS[name])


@pytest.mark.parametrize("rope_type", ["llama3", "yarn", "linear"])
def test_every_scaling_of_positions_comes_back_from_the_file_that_it_makes(rope_type):
    own = {**GROUPED, "head_dim": 4, "rope_type": rope_type, "rope_scaling": 2.0}
    for model in (Llama(**own), GPTOSS(**own, num_experts=5, experts_per_token=3)):
        family, said = family_for(model, None)
        content = json.loads(json.dumps({**said, "architectures": [family.architecture]}))
        assert model_of(content, where="config.json") == (family, model)


def test_sizes_that_are_known_nowhere_else_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Own(Unstacked):
        pass

    for model in (Own(), ResNet(depth=20), ResNet(norm_eps=1e-3)):
        with pytest.raises(UserError, match=r"Train.model=@\w+\(\) .* is not a known"):
            family_for(model, None)


# -- what a config.json asks for -------------------------------------------------------------------


def refused(name, **changes):
    _, said = family_for(MODELS[name], name)
    content = {**said, "architectures": [of(name).architecture], **changes}
    with pytest.raises(UserError) as raised:
        model_of(content, where="there/config.json")
    headline, *reasons = str(raised.value).splitlines()
    assert headline == "there/config.json: these settings are not supported:"
    return [reason.strip() for reason in reasons]


def test_everything_that_is_not_done_here_is_said_in_one_message():
    assert refused(
        "llama",
        hidden_act="gelu",
        head_dim=7,
        attention_bias=True,
        rope_scaling={"type": "dynamic", "factor": 4.0},
        hidden_size="12",
        vocab_size=None,
        quantization_config={"bits": 4},
    ) == [
        "attention_bias = True; it must be False",
        "hidden_act = 'gelu'; it must be 'silu' or 'swish'",
        "quantization_config = {'bits': 4}; it must be None",
        "vocab_size is missing; it must be a whole number",
        "hidden_size = '12'; it must be a whole number",
        "rope_type = 'dynamic'; it must be 'default' or 'linear' or 'llama3' or 'yarn'",
        "Llama.head_dim=7 is not an even number above 0; the nearest is 8",
    ]
    assert refused(
        "resnet",
        hidden_act="gelu",
        depths=[3, 4, 6],
        embedding_size=4,
        downsample_in_first_stage=True,
        downsample_in_bottleneck=True,
    ) == [
        "hidden_act = 'gelu'; it must be 'relu'",
        "downsample_in_first_stage = True; it must be False",
        "downsample_in_bottleneck = True; it must be False",
        "depths = [3, 4, 6]; it must be [3, 4, 6, 3] or [3, 4, 23, 3] or [3, 8, 36, 3]",
        "hidden_sizes = [12, 24, 48, 96]; it must be [16, 32, 64, 128]",
    ]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("gpt2", {"n_inner": 5}, "n_inner = 5; it must be 48"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings = False; it must be True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True; it must be False"),
        ("llama", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "mscale": 0.7,
                    "original_max_position_embeddings": 4,
                }
            },
            "mscale = 0.7",
        ),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1; it must be true or false"),
        ("mistral", {"sliding_window": "all"}, "sliding_window = 'all'; it must be a whole number"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1; it must be 0.0"),
        ("mixtral", {"head_dim": 8}, "head_dim = 8; it must be hidden_size / heads"),
        ("mamba2", {"n_groups": 2}, "n_groups = 2; it must be 1"),
        ("mamba2", {"num_heads": 5}, "num_heads = 5; it must be 4"),
        ("mamba2", {"tie_word_embeddings": None}, "tie_word_embeddings = False by default"),
        ("bert of sentences", {"problem_type": "regression"}, "problem_type = 'regression'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True; it must be False"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True; it must be False"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True; it must be False"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2; it must be 1"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = [0]; it must be []"),
        ("mixtral", {"num_experts_per_tok": 9}, "Mixtral.experts_per_token=9 with"),
    ],
)
def test_a_setting_that_is_not_done_here_is_refused(name, changes, said):
    assert any(said in reason for reason in refused(name, **changes))


def test_an_unknown_architecture_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"LlamaForCausalML is not supported; did you mean 'Llama"):
        model_of({"architectures": ["LlamaForCausalML"]}, where="config.json")
    with pytest.raises(UserError, match=r"model_type 'bloom' is not supported"):
        model_of({"model_type": "bloom"}, where="config.json")


def test_of_two_heads_on_one_body_the_masked_model_is_meant_where_nothing_is_said():
    _, said = family_for(MODELS["bert"], None)
    assert model_of({**said, "model_type": "bert"}, where="")[1] == MODELS["bert"]


def test_a_window_that_is_null_is_none_and_one_that_is_not_said_is_the_familys():
    _, said = family_for(MODELS["mistral"], "mistral")
    content = {**said, "model_type": "mistral"}
    assert model_of({**content, "sliding_window": None}, where="")[1].sliding_window is None
    del content["sliding_window"]
    assert model_of(content, where="")[1].sliding_window == 4096  # of MistralConfig


# -- the folder ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A Mistral's folder, its tensors zeros."""
    path = tmp_path / "model"
    path.mkdir()
    _, said = family_for(MODELS["mistral"], "mistral")
    (path / "config.json").write_text(json.dumps({**said, "model_type": "mistral"}))
    save(path / "model.safetensors", shapes_there())
    return path


def shapes_there():
    model = MODELS["mistral"]
    return their_shapes(of("mistral").names(model), shapes_of(model))


def save(file, shapes):
    file.unlink(missing_ok=True)
    write(file, shapes, "F32", (np.zeros(shape, np.float32) for shape in shapes.values()))


def matched(path):
    found = Folder.at(str(path), named="SRC_DIR")
    family, model = found.family_and_model
    return match(family, model, shapes_of(model), found.tensors(), where=str(path))


def said_of(path):
    with pytest.raises(UserError) as raised:
        matched(path)
    return str(raised.value)


def test_a_whole_folder_matches_whatever_prefix_its_names_have(folder):
    assert matched(folder).keys() == shapes_there().keys()
    bare = {name.removeprefix("model."): shape for name, shape in shapes_there().items()}
    save(folder / "model.safetensors", {**bare, "layers.0.rotary_emb.inv_freq": (1,)})
    assert matched(folder).keys() == shapes_there().keys()


def test_missing_extra_and_misshapen_tensors_are_listed(folder):
    shapes = shapes_there()
    del shapes["model.norm.weight"]
    shapes["model.layers.1.mlp.up_proj.weight"] = (12, 7)
    shapes["model.layers.3.mlp.up_proj.weight"] = (7, 12)
    save(folder / "model.safetensors", shapes)
    headline, *lines = said_of(folder).splitlines()
    assert f"{folder}: its tensors are not those of MistralForCausalLM with " in headline
    assert [line.strip() for line in lines] == [
        "model.norm.weight [12] is missing",
        "model.layers.1.mlp.up_proj.weight is [12, 7]; it must be [7, 12]",
        "model.layers.3.mlp.up_proj.weight [7, 12] does not belong to this architecture",
    ]


def test_an_output_matrix_beside_a_tied_embedding_must_be_the_same(folder):
    file, shapes = folder / "model.safetensors", shapes_there()
    file.unlink()
    values = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()
    write(file, {name: x.shape for name, x in values.items()}, "F32", values.values())
    assert matched(folder).keys() == shapes.keys()
    values["lm_head.weight"][3, 2] = 2.0
    file.unlink()
    write(file, {name: x.shape for name, x in values.items()}, "F32", values.values())
    assert "lm_head.weight differs from model.embed_tokens.weight, to which" in said_of(folder)


def test_a_pickle_is_refused_with_the_safe_way(folder):
    (folder / "model.safetensors").unlink()
    assert "no weights there (model.safetensors or model.safetensors.index.json)" in said_of(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04}.")
    said = said_of(folder)
    assert "its weights are in a pickle (pytorch_model.bin), which runs code" in said
    assert "save_pretrained(DST)" in said


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3])
def test_an_index_that_points_outside_is_refused(folder, name):
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"names {name!r}, which is not a safetensors file in its folder" in said_of(folder)


def test_an_index_whose_files_are_missing_is_refused(folder):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "of which 1 are not there (model-00001-of-00002.safetensors)" in said_of(folder)


def test_a_link_that_leads_out_of_the_folder_is_refused_and_the_hubs_cache_is_not(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(UserError, match=re.escape(f"is a link out of its folder, to {secret}")):
        Folder(folder).extra_files()
    # As huggingface_hub lays out its cache: names are links to blobs beside the snapshots.
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        os.rename(folder / name, blobs / f"of-{name}")
        (snapshot / name).symlink_to(f"../../blobs/of-{name}")
    found = Folder.at(str(snapshot), named="SRC_DIR")
    assert found.extra_files().keys() == {"config.json"}
    assert matched(snapshot).keys() == shapes_there().keys()


def test_a_folder_without_a_config_json_and_broken_json_are_refused(folder, tmp_path):
    assert "no Hugging Face folder there (no config.json)" in said_of(tmp_path)
    (folder / "config.json").write_text('{"model_type": ')
    assert "config.json is not JSON (" in said_of(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json is not a JSON object" in said_of(folder)
