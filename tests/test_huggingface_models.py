"""Random models of transformers come in, give its logits on every mesh, and go out bit for bit."""

import functools
import json
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxtrain.config.errors import UserError
from jaxtrain.models.weights.family import families, their_shapes
from jaxtrain.models.weights.folder import Folder
from jaxtrain.models.weights.formats.safetensors import raw, write
from jaxtrain.run.huggingface import importing, parameters, receipt
from jaxtrain.run.start import first_parameters
from jaxtrain.run.trainer import Trainer
from jaxtrain.run.weights import merge_adapters
from jaxtrain.training import layouts
from jaxtrain.training.compose import compose
from jaxtrain.training.published import config_text
from jaxtrain.training.settings import load_config

torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
transformers = pytest.importorskip("transformers", reason="transformers is the peer")

ENDS = {"bos_token_id": 0, "eos_token_id": 0}
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 24, **ENDS,
}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, **ENDS}
BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 24, "type_vocab_size": 3, **ENDS,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6,
}  # fmt: skip
MAMBA = {
    "vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, **ENDS,
}  # fmt: skip
MAMBA2 = {
    **MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "tie_word_embeddings": True,
}  # fmt: skip
ROBERTA = {**BERT, "max_position_embeddings": 26, "type_vocab_size": 1, "pad_token_id": 1}
EXPERTS = {
    "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "vocab_size": 64,
}  # fmt: skip
DEEPSEEK = {
    **SIZES, "num_key_value_heads": 4, "vocab_size": 64, "moe_intermediate_size": 16,
    "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 12,
}  # fmt: skip

# Case -> transformers' name of the model, its settings, our mesh, the dtype of the files.
CASES = {
    "gpt2": ("GPT2", GPT2, ["Mesh.fsdp=8"], "float32"),
    "gpt-oss": ("GptOss", {**SIZES, "head_dim": 16, "num_local_experts": 6, "sliding_window": 3,
                           "vocab_size": 64}, ["Mesh.expert=2", "Mesh.fsdp=2", "Mesh.tensor=2"],
                "bfloat16"),
    "gpt-oss-plain": ("GptOss", {**SIZES, "head_dim": 8, "num_key_value_heads": 1,
                                 "num_local_experts": 5, "num_experts_per_tok": 2,
                                 "tie_word_embeddings": True, "sliding_window": 5,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
                      ["Mesh.pipe=2", "Mesh.fsdp=4"], "float32"),
    "gpt2-tensor": ("GPT2", {**GPT2, "vocab_size": 64, "n_embd": 48},
                    ["Mesh.fsdp=2", "Mesh.tensor=4"], "bfloat16"),
    "llama": ("Llama", {**SIZES, "rope_parameters": LLAMA31}, ["Mesh.pipe=2", "Mesh.fsdp=4"],
              "float32"),
    "llama-tied-mqa": ("Llama", {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True},
                       ["Mesh.fsdp=4", "Mesh.data=2"], "float16"),
    "mistral": ("Mistral", {**SIZES, "vocab_size": 64, "num_key_value_heads": 4,
                            "sliding_window": 3}, ["Mesh.fsdp=4", "Mesh.tensor=2"], "bfloat16"),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "sliding_window": None},
                ["Mesh.fsdp=2", "Mesh.expert=4"], "float32"),
    "qwen2": ("Qwen2", {**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": True},
              ["Mesh.fsdp=8"], "bfloat16"),
    "qwen3": ("Qwen3", {**SIZES, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16},
              ["Mesh.fsdp=4", "Mesh.tensor=2"], "bfloat16"),
    "qwen3-mqa-tied": ("Qwen3", {**SIZES, "num_key_value_heads": 1, "head_dim": 4,
                                 "tie_word_embeddings": True}, ["Mesh.pipe=2"], "float32"),
    "llama-untied-mha": ("Llama", {**SIZES, "num_key_value_heads": 4, "vocab_size": 67},
                         ["Mesh.context=2", "Mesh.fsdp=4"], "bfloat16"),
    "mistral-no-window": ("Mistral", {**SIZES, "num_key_value_heads": 1, "sliding_window": None},
                          ["Mesh.pipe=2", "Mesh.fsdp=4"], "float32"),
    "mixtral-mqa": ("Mixtral", {**SIZES, "vocab_size": 64, "num_key_value_heads": 1,
                                "num_local_experts": 6, "num_experts_per_tok": 3},
                    ["Mesh.expert=2", "Mesh.data=2"], "bfloat16"),
    "mixtral-window": ("Mixtral", {**SIZES, "num_local_experts": 2, "sliding_window": 4,
                                   "tie_word_embeddings": True}, ["Mesh.pipe=2"], "float32"),
    "gemma": ("Gemma", {**SIZES, "head_dim": 16, "vocab_size": 64},
              ["Mesh.fsdp=4", "Mesh.tensor=2"], "bfloat16"),
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 16, "sliding_window": 3, "num_key_value_heads": 1,
                          "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.0,
                          "final_logit_softcapping": 3.0}, ["Mesh.pipe=2", "Mesh.fsdp=4"],
               "bfloat16"),
    "gemma2-uncapped": ("Gemma2", {**SIZES, "head_dim": 8, "vocab_size": 64, "sliding_window": 5,
                                   "query_pre_attn_scalar": 8, "attn_logit_softcapping": None,
                                   "final_logit_softcapping": None},
                        ["Mesh.fsdp=4", "Mesh.tensor=2"], "float32"),
    "gemma3": ("Gemma3", {**SIZES, "head_dim": 16, "vocab_size": 64, "sliding_window": 3,
                          "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
               ["Mesh.fsdp=4", "Mesh.tensor=2"], "bfloat16"),
    "phi3": ("Phi3", {**SIZES, "vocab_size": 64, "num_key_value_heads": 1, "pad_token_id": 0,
                      "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                          "partial_rotary_factor": 0.5}},
             ["Mesh.pipe=2", "Mesh.fsdp=4"], "bfloat16"),
    "phi3-window": ("Phi3", {**SIZES, "sliding_window": 4, "pad_token_id": 0}, ["Mesh.fsdp=8"],
                    "float32"),
    "qwen3-moe": ("Qwen3Moe", {**SIZES, **EXPERTS, "norm_topk_prob": True},
                  ["Mesh.expert=2", "Mesh.fsdp=4"], "bfloat16"),
    "qwen3-moe-plain": ("Qwen3Moe", {**SIZES, **EXPERTS, "head_dim": 4, "num_key_value_heads": 1},
                        ["Mesh.pipe=2"], "float32"),
    "qwen2-moe": ("Qwen2Moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 40},
                  ["Mesh.expert=2", "Mesh.fsdp=2", "Mesh.tensor=2"], "bfloat16"),
    "qwen2-moe-normed": ("Qwen2Moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 20,
                                      "norm_topk_prob": True, "num_key_value_heads": 1,
                                      "tie_word_embeddings": True}, ["Mesh.pipe=2"], "float32"),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 1.0,
                                   "mscale_all_dim": 1.0}}, ["Mesh.expert=2", "Mesh.fsdp=4"],
                    "float32"),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None,
                                   "topk_method": "group_limited_greedy"},
                    ["Mesh.pipe=2", "Mesh.expert=2"], "bfloat16"),
    "qwen3-yarn": ("Qwen3", {**SIZES, "head_dim": 8, "rope_parameters": YARN}, ["Mesh.pipe=2"],
                   "float32"),
    "llama-linear": ("Llama", {**SIZES, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, ["Mesh.fsdp=8"], "float32"),
    "mamba": ("Mamba", MAMBA, ["Mesh.fsdp=4", "Mesh.tensor=2"], "bfloat16"),
    "mamba2": ("Mamba2", MAMBA2, ["Mesh.fsdp=4", "Mesh.tensor=2"], "bfloat16"),
    "mamba2-odd": ("Mamba2", {**MAMBA2, "vocab_size": 61, "hidden_size": 24, "num_heads": 9,
                              "expand": 3, "conv_kernel": 3}, ["Mesh.fsdp=8"], "float32"),
    "bert-sentences": ("BertSentences", {**BERT, "num_labels": 3}, ["Mesh.fsdp=2", "Mesh.tensor=4"],
                       "bfloat16"),
    "bert-sentences-odd": ("BertSentences", {**BERT, "vocab_size": 61, "hidden_size": 36,
                                             "num_labels": 5},
                           ["Mesh.fsdp=4", "Mesh.data=2"], "float32"),
    "roberta": ("Roberta", ROBERTA, ["Mesh.fsdp=4", "Mesh.data=2"], "bfloat16"),
    "roberta-odd": ("Roberta", {**ROBERTA, "vocab_size": 61, "hidden_size": 36},
                    ["Mesh.fsdp=4", "Mesh.data=2"], "float32"),
    "roberta-one-layer": ("Roberta", {**ROBERTA, "num_hidden_layers": 1, "type_vocab_size": 2,
                                      "pad_token_id": 3, "max_position_embeddings": 28},
                          ["Mesh.data=8"], "float16"),
    "bert-embeddings": ("BertEmbeddings", BERT, ["Mesh.fsdp=2", "Mesh.tensor=4"], "bfloat16"),
    "roberta-embeddings": ("RobertaEmbeddings", {**ROBERTA, "vocab_size": 61, "hidden_size": 36},
                           ["Mesh.pipe=2", "Mesh.fsdp=4"], "float32"),
    "bert": ("Bert", BERT, ["Mesh.fsdp=2", "Mesh.tensor=4"], "bfloat16"),
}  # fmt: skip
ALWAYS = (
    "bert",
    "roberta-odd",
    "deepseek-v3",
    "gemma3",
    "mamba",
    "gpt2",
    "gpt-oss",
    "phi3",
    "llama",
    "llama-tied-mqa",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3-moe",
)


def architecture_of(kind: str) -> str:
    """The class of transformers that files name."""
    return {
        "GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "Roberta": "RobertaForMaskedLM",
        "BertSentences": "BertForSequenceClassification", "ViT": "ViTForImageClassification",
        "ResNet": "ResNetForImageClassification", "BertEmbeddings": "BertModel",
        "RobertaEmbeddings": "RobertaModel",
    }.get(kind, f"{kind}ForCausalLM")  # fmt: skip


def random_model(kind: str, settings: dict) -> torch.nn.Module:
    """With every parameter drawn, norms and biases too, wide enough that none is lost."""
    torch.manual_seed(0)
    config = {
        "Gemma3": "Gemma3TextConfig", "BertSentences": "BertConfig", "BertEmbeddings": "BertConfig",
        "RobertaEmbeddings": "RobertaConfig",
    }  # fmt: skip
    settings = getattr(transformers, config.get(kind, f"{kind}Config"))(**settings)
    made = getattr(transformers, architecture_of(kind))(settings)
    with torch.no_grad():
        for name, value in made.named_parameters():
            is_scale = "norm" in name.lower() or "ln_" in name
            middle = 1.0 if is_scale and name.endswith("weight") else 0.0
            spread = value[0].numel() ** -0.5 if value.ndim == 4 and kind == "ResNet" else 0.2
            value.normal_(middle, 2.0 if "classifier" in name else spread)
        for name, value in made.named_buffers():  # published as the parameters are
            if name.endswith(("correction_bias", "running_mean")):
                value.normal_(0.0, 0.2)
            if name.endswith("running_var"):
                value.uniform_(0.5, 2.0)
    return made.eval()


def logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        told = model(torch.from_numpy(tokens))
        if "logits" not in told:  # without a head: what the transposed embedding makes
            return (told.last_hidden_state @ model.get_input_embeddings().weight.T).float().numpy()
        return told.logits.float().numpy()


@functools.cache
def from_pretrained(folder: Path) -> torch.nn.Module:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype="float32").eval()


@pytest.mark.slow_cases(
    "bert",
    "deepseek-v3",
    "gpt-oss",
    "llama",
    "llama-tied-mqa",
    "mamba",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "roberta-odd",
    "gemma3",
    "mixtral",
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in ALWAYS else pytest.mark.slow) for c in CASES],
)
def test_a_model_comes_in_gives_the_same_logits_and_goes_out_again(case, tmp_path):
    kind, settings, mesh, dtype = CASES[case]
    there = random_model(kind, settings).to(getattr(torch, dtype))
    source, workdir, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    # Several files with an index, but for one case.
    there.save_pretrained(source, max_shard_size="20KB" if case != "gpt2" else "5GB")
    (source / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    theirs = from_pretrained(source)  # in float32, the values those of the files
    tokens = np.random.default_rng(1).integers(0, settings["vocab_size"], (1, 24))
    tokens[tokens == settings.get("pad_token_id", -1)] = 5  # has no place in a RoBERTa
    expected = logits(theirs, tokens)
    assert np.abs(expected).max() > 1.0

    config = load_config(f"hf:{source}", mesh)  # fsdp is what is left
    found = importing.import_run(config, workdir, console=Console(quiet=True), report=print)
    assert found.passed
    assert not found.differing
    assert found.logits is not None
    assert found.logits.largest_difference < 1e-4
    assert found.compared_with == f"transformers {transformers.__version__}"

    # As a run: read back from its checkpoint.
    again = load_config(workdir / "config.gin")
    trainer = Trainer(again, workdir, read_only=True)
    program, model = trainer.program.setup, again.train.model
    params = merge_adapters(program, trainer.state)
    ours = receipt.logits_of(program, model, params, tokens)
    ours = ours[:, 0] if expected.ndim == 2 else ours  # a text's class
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)

    written = trainer.export_huggingface(out)
    assert written.passed
    exported = from_pretrained(out)
    for name, tensor in theirs.state_dict().items():
        if "Embeddings" in kind and name.startswith("pooler."):
            continue  # embeddings are read before it, so it is not imported
        assert torch.equal(exported.state_dict()[name], tensor), name
    # PyTorch's sums are in another order where an array starts at another address.
    np.testing.assert_allclose(logits(exported, tokens), expected, rtol=1e-6, atol=1e-5)
    back = parameters.read_parameters(Folder(out), program, model)
    same = jax.tree.map(lambda a, b: np.array_equal(raw(a), raw(b)), params, back)
    assert all(jax.tree.leaves(same))
    if dtype == "bfloat16":  # to the bytes that came in
        trainer.export_huggingface(tmp_path / "narrow", dtype="bfloat16")
        came, went = Folder(source).tensors(), Folder(tmp_path / "narrow").tensors()
        for name, tensor in went.items():
            assert np.array_equal(raw(tensor.open()), raw(came[name].open())), name
    assert (out / "tokenizer_config.json").read_text() == '{"chat_template": "{{ messages }}"}'
    for name in ("config.json", "generation_config.json"):
        if not (source / name).exists():
            continue  # of a model that does not generate
        said = [json.loads((path / name).read_text()) for path in (source, out)]
        assert said[0].get("eos_token_id") == said[1].get("eos_token_id") == 0, name
    assert json.loads((out / "parity.json").read_text())["passed"]
    assert json.loads((workdir / "huggingface" / "parity.json").read_text())["passed"]


@pytest.mark.slow
@pytest.mark.rotated("peers")
def test_modules_that_predict_lie_where_transformers_passes_over_them(tmp_path):
    """Behind 61 layers, as V3's: the names that `DeepseekV3ForCausalLM` leaves out by itself."""
    sizes = {
        "num_layers": 61, "dense_layers": 3, "embed_dim": 32, "query_rank": 12, "plain_dim": 8,
        "value_dim": 8, "key_value_rank": 16, "mlp_dim": 24, "expert_mlp_dim": 16,
        "predicted_tokens": 2,
    }  # fmt: skip
    bindings = [f"DeepSeek.{name} = {value}" for name, value in sizes.items()]
    trainer = Trainer(load_config("deepseek_tiny", bindings))
    weights = trainer.weights()
    # Wide enough that an error would show: logits of fresh weights are hundredths.
    trainer.set_weights({**weights, "output": 100 * weights["output"]})
    assert trainer.export_huggingface(tmp_path / "out").passed
    written = [name for name in Folder(tmp_path / "out").tensors() if ".layers.61." in name]
    for last in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.o_proj"):
        assert f"model.layers.61.{last}.weight" in written
    there, told = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "out", dtype="float32", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    tokens = np.random.default_rng(1).integers(0, 256, (1, 24))
    expected = logits(there.eval(), tokens)
    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(trainer.logits(tokens), expected, rtol=0, atol=1e-4)
    # What transformers left out comes in again, and without the setting neither do we read it.
    program, model = trainer.program.setup, trainer.config.train.model
    back = parameters.read_parameters(Folder(tmp_path / "out"), program, model)
    ours = merge_adapters(program, trainer.state)
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(raw(a), raw(b)), ours, back))
    )
    alone = Trainer.from_huggingface(tmp_path / "out", bindings=["Precision.compute='float32'"])
    assert alone.config.train.model.predicted_tokens == 1
    np.testing.assert_allclose(alone.logits(tokens), expected, rtol=0, atol=1e-4)


VIT = {
    "image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48, "num_labels": 5,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
# 18 layers, as it is published but for its width.
RESNET = {
    "layer_type": "basic", "depths": [2, 2, 2, 2], "embedding_size": 8,
    "hidden_sizes": [8, 16, 32, 64], "num_labels": 5,
}  # fmt: skip
IMAGES = {
    "grey": ("ViT", {**VIT, "num_channels": 1}, ["Mesh.fsdp=4", "Mesh.tensor=2"]),
    "odd": ("ViT", {**VIT, "image_size": 15, "patch_size": 5, "hidden_size": 36, "num_labels": 3},
            ["Mesh.data=8"]),
    "one-layer": ("ViT", {**VIT, "num_hidden_layers": 1, "patch_size": 8}, ["Mesh.fsdp=8"]),
    "resnet": ("ResNet", RESNET, ["Mesh.fsdp=4", "Mesh.data=2"]),
    "resnet-bottleneck": ("ResNet", {**RESNET, "layer_type": "bottleneck", "depths": [3, 4, 6, 3],
                                     "embedding_size": 4, "hidden_sizes": [16, 32, 64, 128],
                                     "num_labels": 4}, ["Mesh.fsdp=2", "Mesh.data=4"]),
    "resnet-odd": ("ResNet", {**RESNET, "depths": [3, 4, 6, 3], "embedding_size": 6,
                              "hidden_sizes": [6, 12, 24, 48], "num_labels": 3,
                              "num_channels": 1}, ["Mesh.data=8"]),
}  # fmt: skip


@pytest.mark.slow_cases("resnet")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in ("odd", "resnet") else pytest.mark.slow) for c in IMAGES],
)
def test_a_model_of_images_comes_in_tells_the_same_and_goes_out_again(case, tmp_path):
    kind, settings, mesh = IMAGES[case]
    there = random_model(kind, settings)
    source, workdir, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    there.config.id2label = {n: f"a{n}" for n in range(settings["num_labels"])}
    there.config.label2id = {f"a{n}": n for n in range(settings["num_labels"])}
    there.save_pretrained(source)
    side, channels = settings.get("image_size", 40), settings.get("num_channels", 3)
    size = {"height": side, "width": side} if kind == "ViT" else {"shortest_edge": side}
    said = json.dumps({"image_mean": [0.25], "image_std": [0.125], "size": size})
    (source / "preprocessor_config.json").write_text(said)
    images = np.random.default_rng(1).standard_normal((3, side, side, channels), np.float32)

    def told(model: torch.nn.Module) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(images.transpose(0, 3, 1, 2).copy())).logits.numpy()

    expected = told(from_pretrained(source))
    assert np.abs(expected).max() > 1.0
    config = load_config(f"hf:{source}", mesh)
    assert config.train.data.mean == (0.25,)
    assert config.train.data.image_size == side
    found = importing.import_run(config, workdir, console=Console(quiet=True), report=print)
    assert found.passed
    assert found.logits is not None
    trainer = Trainer(load_config(workdir / "config.gin", ["Precision.compute='float32'"]),
                      workdir, read_only=True)  # fmt: skip
    np.testing.assert_allclose(trainer.logits(images), expected, rtol=0, atol=1e-4)
    assert trainer.export_huggingface(out).passed
    assert np.array_equal(told(from_pretrained(out)), expected)
    said = json.loads((out / "config.json").read_text())
    assert said["id2label"]["1"] == "a1"
    program, model = trainer.program.setup, trainer.config.train.model
    back = parameters.read_parameters(Folder(out), program, model)
    weights = nnx.merge_state(trainer.state.params, trainer.state.statistics)
    for taken in (back, first_parameters(str(workdir), trainer.config, program)):
        same = jax.tree.map(lambda a, b: np.array_equal(raw(a), raw(b)), weights, taken)
        assert all(jax.tree.leaves(same))
    came, went = Folder(source).tensors(), Folder(out).tensors()
    assert {n: x.shape for n, x in came.items()} == {n: x.shape for n, x in went.items()}
    for name in (n for n in came if came[n].dtype == "F32"):
        assert np.array_equal(raw(came[name].open()), raw(went[name].open())), name


def test_every_known_architecture_comes_in_and_goes_out():
    """In a case above; an encoder-decoder in test_t5.py."""
    kinds = [kind for kind, *_ in (*CASES.values(), *IMAGES.values())]
    compared = {architecture_of(kind) for kind in kinds} | {"T5ForConditionalGeneration"}
    assert {family.architecture for family in families()} == compared


# -- how it is read --------------------------------------------------------------------------------


@pytest.mark.slow_cases("Mesh.data=8")
@pytest.mark.parametrize("mesh", ["Mesh.fsdp=8", "Mesh.data=8"])
def test_two_layers_parts_at_most_are_held_while_reading(tmp_path, monkeypatch, mesh):
    """Beside what stays on the devices; each layer's matrices are one parameter here."""
    monkeypatch.setattr(parameters, "MOST_AT_ONCE", 1 << 20)
    # Onto devices with memory of their own: simulated ones take the host's array for theirs.
    put = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda value, device: put(value, device).copy().block_until_ready()
    )
    layers, width, wide = 6, 256, 2048
    settings = {
        "vocab_size": 64, "hidden_size": width, "intermediate_size": wide,
        "num_hidden_layers": layers, "num_attention_heads": 4, "model_type": "llama",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = load_config(f"hf:{tmp_path}", [mesh])
    program = compose(config, layouts.layout(config)).setup
    family, model = Folder(tmp_path).family_and_model
    shapes = their_shapes(family.names(model), parameters.shapes_of(program))
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(shape, np.float32) for shape in shapes.values())
    write(tmp_path / "model.safetensors", shapes, "BF16", values)
    parameters.read_parameters(Folder(tmp_path), program, model)  # imports what JAX needs late
    tracemalloc.start()
    try:
        params = parameters.read_parameters(Folder(tmp_path), program, model)
        jax.block_until_ready(params)
        stays, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = 4 * width * wide  # bytes of the largest tensor, in float32
    # JAX lets go of a host's array when it takes the next one: two pieces, of 6 layers' 12, and a
    # copy of one as the file has it, in bfloat16. The rest is Python's objects.
    assert peak - stays < 2 * largest + largest // 2 + 2**18


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"preprocessor_config\.json is not JSON \("),
        ("[]", r"preprocessor_config\.json is not a JSON object; fetch it again"),
        ('{"image_mean": ["a"], "image_std": [0.5]}', r"image_mean = \['a'\]; it must be 1 number"),
    ],
)
def test_a_damaged_file_of_the_image_processor_is_told(content, said, tmp_path):
    settings = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(UserError, match=said):
        config_text(f"hf:{tmp_path}")
