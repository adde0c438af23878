"""Mamba and Mamba 2: Hugging Face names and settings."""

import functools
from typing import Any

from jaxtrain.config.key_table import KeyTable, ignore_keys, only, read_keys
from jaxtrain.models.state_space.mamba import Mamba
from jaxtrain.models.state_space.mamba2 import Mamba2
from jaxtrain.models.weights import config_file
from jaxtrain.models.weights.config_file import ConfigFile, Row, constant, derive, integer, number
from jaxtrain.models.weights.family import Family, Name, linear, one_after_the_other

_LAYER = "backbone.layers.{L}"
_MIXER = f"{_LAYER}.mixer"
_MAMBA_NAMES = (
    Name("backbone.embeddings.weight", "token_embedding", "VD->VD"),
    Name(f"{_LAYER}.norm.weight", "layers/norm_scale", "LD->D"),
    Name(f"{_MIXER}.in_proj.weight", "layers/in", "LPDF->(PF)D"),
    *linear(f"{_MIXER}.conv1d", "layers/conv", "LKF->F()K", "LF->F"),
    Name(f"{_MIXER}.x_proj.weight", "layers/select", "LFR->RF"),
    *linear(f"{_MIXER}.dt_proj", "layers/step", "LRF->FR", "LF->F"),
    Name(f"{_MIXER}.A_log", "layers/decay", "LFS->FS"),
    Name(f"{_MIXER}.D", "layers/skip", "LF->F"),
    Name(f"{_MIXER}.out_proj.weight", "layers/out", "LFD->DF"),
    Name("backbone.norm_f.weight", "norm_scale", "D->D"),
)


def _mamba2_names(model: Mamba2) -> tuple[Name, ...]:
    inner, states, heads = model.block.inner_dim, 2 * model.state_dim, model.block.num_heads
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


_KEYS: KeyTable = {
    **config_file.LANGUAGE,
    **ignore_keys(
        "it is used only for random initialization",
        "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme",
        "time_step_scale", "rescale_prenorm_residual",
    ),
    **ignore_keys(
        "it changes how transformers computes, and no logits",
        "residual_in_fp32", "use_mambapy", "use_associative_scan", "chunk_size",
        "fused_add_norm",
    ),
    **ignore_keys("it is a size in the authors' code, for which transformers has another key",
                 "d_inner", "d_model", "n_layer", "pad_vocab_size_multiple"),
    "ssm_cfg": only({}),
    "rms_norm": only(True),
}  # fmt: skip


def _rows(*mixer: Row, tied: Row) -> tuple[Row, ...]:
    """Return the rows of one version.

    Args:
      mixer: the rows of the sizes inside a layer.
      tied: the row of tied embeddings.
    """
    return (
        Row(_KEYS),
        integer("vocab_size", "vocab_size"),
        integer("num_hidden_layers", "num_layers"),
        integer("hidden_size", "embed_dim"),
        *mixer,
        integer("conv_kernel", "conv_width", 4),
        # Our default: they have no limit, and the published ones were trained on 2,048 tokens.
        integer("max_position_embeddings", "context_length", 2048),
        number("layer_norm_epsilon", "norm_eps", 1e-5),
        constant("hidden_act", "silu", "swish"),
        constant("use_bias", False),
        constant("use_conv_bias", True),
        tied,
    )


def _inner_dim(config: ConfigFile) -> int:
    return config.integer("hidden_size") * config.integer("expand", 2)


def _read_step_rank(config: ConfigFile) -> dict[str, Any]:
    if config.content.get("time_step_rank", "auto") == "auto":
        return {"step_rank": None}
    rank = config.integer("time_step_rank")
    return {"step_rank": None if rank == -(-config.integer("hidden_size") // 16) else rank}


_family = functools.partial(
    Family, prefix="backbone.", copies={"lm_head.weight": "backbone.embeddings.weight"}
)
_EXPAND = integer("expand", "expand", 2)

FAMILIES = (
    _family(
        architecture="MambaForCausalLM",
        model_type="mamba",
        model=Mamba,
        rows=_rows(
            derive("intermediate_size", _inner_dim, lambda model: model.block.inner_dim),
            _EXPAND,
            integer("state_size", "state_dim", 16),
            Row(
                read_keys("time_step_rank"),
                _read_step_rank,
                lambda model: {"time_step_rank": model.block.step_rank},
            ),
            tied=constant("tie_word_embeddings", True),
        ),
        names=lambda _: _MAMBA_NAMES,
    ),
    _family(
        architecture="Mamba2ForCausalLM",
        model_type="mamba2",
        model=Mamba2,
        rows=_rows(
            _EXPAND,
            derive(
                "num_heads",
                lambda config: _inner_dim(config) // max(config.integer("head_dim", 64), 1),
                lambda model: model.block.num_heads,
                default=128,
            ),
            integer("head_dim", "head_dim", 64),
            constant("n_groups", 1, default=8),
            integer("state_size", "state_dim", 128),
            Row({
                **ignore_keys("this version has no low-rank projection of steps", "time_step_rank"),
                "time_step_limit": only([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]),
                "norm_before_gate": only(False),
            }),
            tied=constant("tie_word_embeddings", True, default=False),
        ),
        names=_mamba2_names,
    ),
)  # fmt: skip
