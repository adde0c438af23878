"""Gemma 3 (text): Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import irrelevant, only, used
from jaxtrain.models.transformers.gemma3 import Gemma3
from jaxtrain.models.weights import gemma_settings, grouped_query, rope
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.grouped_query import GLOBAL, LOCAL
from jaxtrain.models.weights.names import Name


def _names(model: Gemma3) -> tuple[Name, ...]:
    return (*grouped_query.norms_after_names(model), *grouped_query.HEAD_NORMS)


def _read(asked: Asked) -> Mapping[str, Any]:
    width = asked.whole("query_pre_attn_scalar", 256)
    sizes = {
        **grouped_query.read_widths(asked, kv_heads=4),
        "head_dim": asked.whole("head_dim", 256),
        "context_length": asked.whole("max_position_embeddings", 131072),
        "norm_eps": asked.number("rms_norm_eps", 1e-6),
        "sliding_window": asked.whole("sliding_window", 4096),
        **_read_rope(asked),
    }
    every = grouped_query.read_global_every(asked, asked.whole("sliding_window_pattern", 6))
    query_width = None if width == sizes["head_dim"] else width
    return {**sizes, "global_every": every, "query_width": query_width}


def _read_rope(asked: Asked) -> dict[str, Any]:
    """Rotary positions: an object for each kind of layer in files of transformers 5.

    `rope_scaling` and theta of older files complete those of layers that see all tokens.
    """
    both = asked.table("rope_parameters")
    for key in both.content:
        if key not in (LOCAL, GLOBAL):
            asked.reject(f"rope_parameters.{key}; here it has {LOCAL} and {GLOBAL}")
    scaling = asked.table("rope_scaling").content
    if "type" in scaling and "rope_type" not in scaling:
        asked.reject("rope_scaling.type, which transformers does not read; here it is rope_type")
    near = {"rope_theta": asked.number("rope_local_base_freq", 10000.0)}
    far = {"rope_theta": asked.number("rope_theta", 1000000.0)}
    near |= both.table(LOCAL).content
    far |= {**both.table(GLOBAL).content, **scaling}
    kind = rope.validate_type(asked, far, ("default", "linear"))
    rope.validate_type(asked, near, ("default",))
    local, far_said = asked.inner(near), asked.inner(far)
    for one in (local, far_said):
        one.only("partial_rotary_factor", [1.0], default=1.0)
    return {
        "rope_theta": far_said.number("rope_theta"),
        "rope_scaling": far_said.number("factor") if kind == "linear" else 1.0,
        "local_rope_theta": local.number("rope_theta"),
    }


def _write(model: Gemma3) -> Mapping[str, Any]:
    slowed = model.rope_scaling != 1
    scaling = {"rope_type": "linear", "factor": model.rope_scaling} if slowed else None
    return {
        **grouped_query.write_widths(model),
        "attention_bias": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "hidden_activation": gemma_settings.ACTIVATION,
        "layer_types": grouped_query.kinds(model.num_layers, model.global_every),
        "sliding_window": model.sliding_window,
        "query_pre_attn_scalar": model.query_width or model.head_dim,
        "rope_theta": model.rope_theta,
        "rope_local_base_freq": model.local_rope_theta,
        "rope_scaling": scaling,
    }


FAMILY = grouped_query.family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    model=Gemma3,
    keys={
        **gemma_settings.KEYS,
        **used(
            "sliding_window",
            "layer_types",
            "sliding_window_pattern",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
        ),
        # In a file that transformers 5 wrote; layer_types, which it writes too, says it.
        **irrelevant("layer_types says it", "_sliding_window_pattern"),
        **irrelevant("transformers reads hidden_activation", "hidden_act"),
        **irrelevant(
            "it is of types of rotary scaling that are not supported of this family",
            "original_max_position_embeddings",
        ),
        "hidden_activation": only(gemma_settings.ACTIVATION),
        "attn_logit_softcapping": only(None),
        "final_logit_softcapping": only(None),
        "partial_rotary_factor": only(1.0),
    },  # fmt: skip
    read=_read,
    write=_write,
    names=_names,
)
