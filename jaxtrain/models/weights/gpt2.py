"""GPT-2: Hugging Face names and settings; its Conv1D weights are [in, out], like ours."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, irrelevant, only, used
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.weights import config_keys
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.names import Name

_LAYER = "transformer.h.{L}"
_NAMES = (
    Name("transformer.wte.weight", "token_embedding", "VD->VD"),
    Name("transformer.wpe.weight", "position_embedding", "CD->CD"),
    Name(f"{_LAYER}.ln_1.weight", "layers/attention_norm_scale", "LD->D"),
    Name(f"{_LAYER}.ln_1.bias", "layers/attention_norm_bias", "LD->D"),
    Name(f"{_LAYER}.attn.c_attn.weight", "layers/qkv", "LPDNH->D(PNH)"),
    Name(f"{_LAYER}.attn.c_attn.bias", "layers/qkv_bias", "LPNH->(PNH)"),
    Name(f"{_LAYER}.attn.c_proj.weight", "layers/out", "LNHD->(NH)D"),
    Name(f"{_LAYER}.attn.c_proj.bias", "layers/out_bias", "LD->D"),
    Name(f"{_LAYER}.ln_2.weight", "layers/mlp_norm_scale", "LD->D"),
    Name(f"{_LAYER}.ln_2.bias", "layers/mlp_norm_bias", "LD->D"),
    Name(f"{_LAYER}.mlp.c_fc.weight", "layers/up", "LDF->DF"),
    Name(f"{_LAYER}.mlp.c_fc.bias", "layers/up_bias", "LF->F"),
    Name(f"{_LAYER}.mlp.c_proj.weight", "layers/down", "LFD->FD"),
    Name(f"{_LAYER}.mlp.c_proj.bias", "layers/down_bias", "LD->D"),
    Name("transformer.ln_f.weight", "norm_scale", "D->D"),
    Name("transformer.ln_f.bias", "norm_bias", "D->D"),
)


_KEYS: KeyTable = {
    **config_keys.LANGUAGE,
    **used(
        "vocab_size", "n_layer", "n_embd", "n_head", "n_positions", "n_inner", "layer_norm_epsilon"
    ),
    **irrelevant("n_positions says it", "n_ctx"),
    **irrelevant(
        "it is of a head of two, which is not imported",
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout", "predict_special_tokens",
    ),
    **irrelevant("softmax is float32 here anyway", "reorder_and_upcast_attn"),
    "activation_function": only("gelu_new", "gelu_pytorch_tanh"),
    "tie_word_embeddings": only(True),
    "scale_attn_weights": only(True),
    "scale_attn_by_inverse_layer_idx": only(False),
}  # fmt: skip


def _read(asked: Asked) -> Mapping[str, Any]:
    width = asked.whole("n_embd")
    asked.only("n_inner", [4 * width], default=4 * width)
    return {
        "vocab_size": asked.whole("vocab_size"),
        "num_layers": asked.whole("n_layer"),
        "embed_dim": width,
        "num_heads": asked.whole("n_head"),
        "context_length": asked.whole("n_positions", 1024),
        "norm_eps": asked.number("layer_norm_epsilon", 1e-5),
    }


def _write(model: GPT) -> Mapping[str, Any] | None:
    return {
        "vocab_size": model.vocab_size,
        "n_layer": model.num_layers,
        "n_embd": model.embed_dim,
        "n_head": model.num_heads,
        "n_positions": model.context_length,
        "n_inner": None,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def _names(_: GPT) -> tuple[Name, ...]:
    return _NAMES


FAMILY = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    model=GPT,
    keys=_KEYS,
    read=_read,
    write=_write,
    names=_names,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    # The causal mask, in files of transformers before 4.
    buffers=r".*\.attn\.(bias|masked_bias)",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },  # fmt: skip
    dequantized=(),  # its matrices are stored [in, out]: no linear layers
)
