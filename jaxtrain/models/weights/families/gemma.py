"""Gemma, Gemma 2 and Gemma 3 (text): Hugging Face names and settings."""

from typing import Any

from jaxtrain.config.key_table import only, read_keys
from jaxtrain.models.transformers.gemma import Gemma, Gemma2, Gemma3
from jaxtrain.models.weights.config_file import (
    ConfigFile,
    Row,
    constant,
    ignore,
    integer,
    number,
    write_only,
)
from jaxtrain.models.weights.families import grouped_query, rope
from jaxtrain.models.weights.families.grouped_query import GLOBAL, LOCAL, family, layer_types
from jaxtrain.models.weights.family import Name
from jaxtrain.nn.transformer.decoder import DecoderSizes

_ACTIVATION = "gelu_pytorch_tanh"
_HEAD_DIM = integer("head_dim", "head_dim", 256)
_TIED = constant("tie_word_embeddings", True)
_CAUSAL = Row({"use_bidirectional_attention": only(None, False)})
# In files of later Gemmas.
_HIDDEN_ACTIVATION = (
    constant("hidden_activation", _ACTIVATION),
    ignore("transformers reads hidden_activation", "hidden_act"),
)


def _rows(kv_heads: int, gate: Row) -> tuple[Row, ...]:
    """Return the rows of Gemma and Gemma 2; `kv_heads` if the file has none."""
    own = grouped_query.rows(
        norm_eps=1e-6, context_length=8192, rope_theta=10000.0, kv_heads=kv_heads,
        head_dim=_HEAD_DIM, tied=_TIED, gate=gate,
    )  # fmt: skip
    return (*own, constant("attention_bias", False), _CAUSAL)


_GEMMA = family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    model=Gemma,
    rows=(
        # Early files have "gelu", which transformers reads as the tanh approximation.
        *_rows(16, constant("hidden_act", _ACTIVATION, "gelu")),
        ignore("transformers reads hidden_act", "hidden_activation"),
        write_only(hidden_activation=_ACTIVATION),
    ),
    names=grouped_query.dense_names,
)
# If a part has a norm on either side, it has the second of Llama's two names.
_NORMS_ON_BOTH_SIDES = (
    Name("model.layers.{L}.input_layernorm.weight", "layers/attention_norm_scale", "LD->D"),
    Name(
        "model.layers.{L}.post_attention_layernorm.weight",
        "layers/after_attention_norm_scale",
        "LD->D",
    ),
    Name("model.layers.{L}.pre_feedforward_layernorm.weight", "layers/mlp_norm_scale", "LD->D"),
    Name(
        "model.layers.{L}.post_feedforward_layernorm.weight",
        "layers/after_mlp_norm_scale",
        "LD->D",
    ),
)


def _names(model: DecoderSizes) -> tuple[Name, ...]:
    """Return the name lines of a model with a norm on either side of each part."""
    parts = (*grouped_query.PROJECTIONS, *_NORMS_ON_BOTH_SIDES, *grouped_query.MLP)
    return (*grouped_query.embedding_names(model), *parts)


def _read_query_width(config: ConfigFile) -> dict[str, Any]:
    width = config.integer("query_pre_attn_scalar", 256)
    return {"query_width": None if width == config.integer("head_dim", 256) else width}


_QUERY_WIDTH = Row(
    read_keys("query_pre_attn_scalar"),
    _read_query_width,
    lambda model: {"query_pre_attn_scalar": model.query_width or model.head_dim},
)
_WINDOW = integer("sliding_window", "sliding_window", 4096)

_GEMMA2 = family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    model=Gemma2,
    rows=(
        *_rows(4, write_only(hidden_act=_ACTIVATION)),
        *_HIDDEN_ACTIVATION,
        # A null cap means none, a missing one the family's default.
        number("attn_logit_softcapping", "attention_softcap", 50.0, null=True),
        number("final_logit_softcapping", "logit_softcap", 30.0, null=True),
        layer_types(2),
        _WINDOW,
        _QUERY_WIDTH,
        ignore("sliding_window says it", "sliding_window_size"),
    ),
    names=_names,
)


def _read_rope(config: ConfigFile) -> dict[str, Any]:
    """Rotary positions: an object per kind of layer in files of transformers 5.

    `rope_scaling` and theta of older files complete those of global layers.
    """
    both = config.table("rope_parameters")
    for key in both.content:
        if key not in (LOCAL, GLOBAL):
            config.reject(f"rope_parameters.{key}; it must have {LOCAL} and {GLOBAL}")
    scaling = config.table("rope_scaling").content
    if "type" in scaling and "rope_type" not in scaling:
        config.reject("rope_scaling.type, which transformers does not read; it must be rope_type")
    near = {"rope_theta": config.number("rope_local_base_freq", 10000.0)}
    far = {"rope_theta": config.number("rope_theta", 1000000.0)}
    near |= both.table(LOCAL).content
    far |= {**both.table(GLOBAL).content, **scaling}
    kind = rope.validate_type(config, far, ("default", "linear"))
    rope.validate_type(config, near, ("default",))
    local, far_rope = config.inner(near), config.inner(far)
    for one in (local, far_rope):
        rope.reject_fraction(one)
    return {
        "rope_theta": far_rope.number("rope_theta"),
        "rope_scaling": far_rope.number("factor") if kind == "linear" else 1.0,
        "local_rope_theta": local.number("rope_theta"),
    }


def _write_rope(model: Gemma3) -> dict[str, Any]:
    slowed = model.rope_scaling != 1
    return {
        "rope_theta": model.rope_theta,
        "rope_local_base_freq": model.local_rope_theta,
        "rope_scaling": {"rope_type": "linear", "factor": model.rope_scaling} if slowed else None,
    }


_GEMMA3 = family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    model=Gemma3,
    rows=(
        *grouped_query.width_rows(
            context_length=131072, norm_eps=1e-6, kv_heads=4, head_dim=_HEAD_DIM, tied=_TIED
        ),
        constant("attention_bias", False),
        _CAUSAL,
        constant("final_logit_softcapping", None),
        constant("attn_logit_softcapping", None),
        *_HIDDEN_ACTIVATION,
        layer_types(6, "sliding_window_pattern"),
        _WINDOW,
        _QUERY_WIDTH,
        Row({**rope.KEYS, **read_keys("rope_local_base_freq")}, _read_rope, _write_rope),
        # In files of transformers 5; redundant with layer_types.
        ignore("layer_types says it", "_sliding_window_pattern"),
        ignore(
            "it belongs to types of rotary scaling that are not supported for this family",
            "original_max_position_embeddings",
        ),
        Row({"partial_rotary_factor": only(1.0)}),
    ),
    names=lambda model: (*_names(model), *grouped_query.HEAD_NORMS),
)  # fmt: skip

FAMILIES = (_GEMMA, _GEMMA2, _GEMMA3)
