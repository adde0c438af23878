"""Mamba 2: Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import KeyTable, Only, irrelevant, only, used
from jaxtrain.models.state_space.mamba2 import Mamba2
from jaxtrain.models.weights import mamba_keys
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.names import Name, one_after_the_other

_LAYER = "backbone.layers.{L}"
_MIXER = f"{_LAYER}.mixer"
_KEYS: KeyTable = {
    **mamba_keys.KEYS,
    **used("head_dim", "num_heads"),
    **irrelevant("steps have no low rank in this version", "time_step_rank"),
    "tie_word_embeddings": Only((True,), default=False),
    "n_groups": Only((1,), default=8),
    "time_step_limit": only([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]),
    "norm_before_gate": only(False),
}


def _read(asked: Asked) -> Mapping[str, Any]:
    width, expand = asked.whole("hidden_size"), asked.whole("expand", 2)
    head_dim = asked.whole("head_dim", 64)
    asked.only("num_heads", [width * expand // max(head_dim, 1)], default=128)
    return {
        "vocab_size": asked.whole("vocab_size"),
        "num_layers": asked.whole("num_hidden_layers"),
        "embed_dim": width,
        "expand": expand,
        "head_dim": head_dim,
        "state_dim": asked.whole("state_size", 128),
        "conv_width": asked.whole("conv_kernel", 4),
        # Not theirs: they have no limit, and the published ones were trained on 2,048 tokens.
        "context_length": asked.whole("max_position_embeddings", 2048),
        "norm_eps": asked.number("layer_norm_epsilon", 1e-5),
    }


def _write(model: Mamba2) -> Mapping[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed_dim,
        "expand": model.expand,
        "num_heads": model.layer.num_heads,
        "head_dim": model.head_dim,
        "n_groups": 1,
        "state_size": model.state_dim,
        "conv_kernel": model.conv_width,
        "max_position_embeddings": model.context_length,
        "layer_norm_epsilon": model.norm_eps,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
    }


def _names(model: Mamba2) -> tuple[Name, ...]:
    inner, states, heads = model.layer.inner_dim, 2 * model.state_dim, model.layer.num_heads
    return (
        Name("backbone.embeddings.weight", "token_embedding", "VD->VD"),
        Name(f"{_LAYER}.norm.weight", "layers/norm_scale", "LD->D"),
        *one_after_the_other(
            f"{_MIXER}.in_proj.weight",
            ("layers/in", "LPDF->(PF)D", 2 * inner),
            ("layers/select", "LDR->RD", states),
            ("layers/step", "LDN->ND", heads),
        ),
        *one_after_the_other(
            f"{_MIXER}.conv1d.weight",
            ("layers/conv", "LKF->F()K", inner),
            ("layers/select_conv", "LKR->R()K", states),
        ),
        *one_after_the_other(
            f"{_MIXER}.conv1d.bias",
            ("layers/conv_bias", "LF->F", inner),
            ("layers/select_conv_bias", "LR->R", states),
        ),
        Name(f"{_MIXER}.dt_bias", "layers/step_bias", "LN->N"),
        Name(f"{_MIXER}.A_log", "layers/decay", "LN->N"),
        Name(f"{_MIXER}.D", "layers/skip", "LN->N"),
        Name(f"{_MIXER}.norm.weight", "layers/gated_norm_scale", "LF->F"),
        Name(f"{_MIXER}.out_proj.weight", "layers/out", "LFD->DF"),
        Name("backbone.norm_f.weight", "norm_scale", "D->D"),
    )


FAMILY = Family(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    model=Mamba2,
    keys=_KEYS,
    read=_read,
    write=_write,
    names=_names,
    prefix="backbone.",
    copies={"lm_head.weight": "backbone.embeddings.weight"},
)
