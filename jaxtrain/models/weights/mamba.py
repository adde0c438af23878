"""Mamba: Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import only, used
from jaxtrain.models.state_space.mamba import Mamba
from jaxtrain.models.weights import mamba_keys
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.family import Family
from jaxtrain.models.weights.names import Name

_LAYER = "backbone.layers.{L}"
_MIXER = f"{_LAYER}.mixer"
_NAMES = (
    Name("backbone.embeddings.weight", "token_embedding", "VD->VD"),
    Name(f"{_LAYER}.norm.weight", "layers/norm_scale", "LD->D"),
    Name(f"{_MIXER}.in_proj.weight", "layers/in", "LPDF->(PF)D"),
    Name(f"{_MIXER}.conv1d.weight", "layers/conv", "LKF->F()K"),
    Name(f"{_MIXER}.conv1d.bias", "layers/conv_bias", "LF->F"),
    Name(f"{_MIXER}.x_proj.weight", "layers/select", "LFR->RF"),
    Name(f"{_MIXER}.dt_proj.weight", "layers/step", "LRF->FR"),
    Name(f"{_MIXER}.dt_proj.bias", "layers/step_bias", "LF->F"),
    Name(f"{_MIXER}.A_log", "layers/decay", "LFS->FS"),
    Name(f"{_MIXER}.D", "layers/skip", "LF->F"),
    Name(f"{_MIXER}.out_proj.weight", "layers/out", "LFD->DF"),
    Name("backbone.norm_f.weight", "norm_scale", "D->D"),
)


def _read(asked: Asked) -> Mapping[str, Any]:
    width, expand, rank = asked.whole("hidden_size"), asked.whole("expand", 2), None
    asked.only("intermediate_size", [width * expand], default=width * expand)
    if asked.content.get("time_step_rank", "auto") != "auto":
        rank = asked.whole("time_step_rank")
    return {
        "vocab_size": asked.whole("vocab_size"),
        "num_layers": asked.whole("num_hidden_layers"),
        "embed_dim": width,
        "expand": expand,
        "state_dim": asked.whole("state_size", 16),
        "step_rank": None if rank == -(-width // 16) else rank,
        "conv_width": asked.whole("conv_kernel", 4),
        # Not theirs: they have no limit, and the published ones were trained on 2,048 tokens.
        "context_length": asked.whole("max_position_embeddings", 2048),
        "norm_eps": asked.number("layer_norm_epsilon", 1e-5),
    }


def _write(model: Mamba) -> Mapping[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.layer.inner_dim,
        "expand": model.expand,
        "state_size": model.state_dim,
        "time_step_rank": model.layer.step_rank,
        "conv_kernel": model.conv_width,
        "max_position_embeddings": model.context_length,
        "layer_norm_epsilon": model.norm_eps,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
    }


def _names(_: Mamba) -> tuple[Name, ...]:
    return _NAMES


FAMILY = Family(
    architecture="MambaForCausalLM",
    model_type="mamba",
    model=Mamba,
    keys={
        **mamba_keys.KEYS,
        **used("intermediate_size", "time_step_rank"),
        "tie_word_embeddings": only(True),
    },
    read=_read,
    write=_write,
    names=_names,
    prefix="backbone.",
    copies={"lm_head.weight": "backbone.embeddings.weight"},
)
