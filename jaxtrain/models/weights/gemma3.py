"""The language model of Gemma 3: names and settings elsewhere."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.gemma3 import Gemma3
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.grouped_query import GLOBAL, LOCAL
from jaxtrain.models.weights.names import Name

_ACTIVATION = "gelu_pytorch_tanh"


def _names(model: Gemma3) -> tuple[Name, ...]:
    return (*grouped_query.norms_after_names(model), *grouped_query.HEAD_NORMS)


def _read(asked: Asked) -> Mapping[str, Any]:
    asked.only("attention_bias", [False], default=False)
    asked.only("tie_word_embeddings", [True], default=True)
    asked.only("use_bidirectional_attention", [None, False], default=None)
    asked.only("hidden_activation", [_ACTIVATION], default=_ACTIVATION)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        asked.only(key, [None], default=None)
    width = asked.whole("query_pre_attn_scalar", 256)
    sizes = {
        **grouped_query.read_widths(asked, kv_heads=4),
        "head_dim": asked.whole("head_dim", 256),
        "context_length": asked.whole("max_position_embeddings", 131072),
        "norm_eps": asked.number("rms_norm_eps", 1e-6),
        "sliding_window": asked.whole("sliding_window", 4096),
        **_read_rope(asked),
    }
    every = grouped_query.read_global_every(asked, 6)
    query_width = None if width == sizes["head_dim"] else width
    return {**sizes, "global_every": every, "query_width": query_width}


def _read_rope(asked: Asked) -> dict[str, Any]:
    """Rotary positions: an object for each kind of layer in files of transformers 5."""
    both = asked.table("rope_parameters")
    if both.content:
        near, rope = both.table(LOCAL), both.table(GLOBAL)
        near.only("rope_type", ["default"], default="default")
        local, theta = near.number("rope_theta", 10000.0), rope.number("rope_theta", 1000000.0)
    else:
        rope = asked.table("rope_scaling")
        local = asked.number("rope_local_base_freq", 10000.0)
        theta = asked.number("rope_theta", 1000000.0)
    kind = rope.content.get("rope_type") or rope.content.get("type") or "default"
    if kind not in ("default", "linear"):
        asked.refuse(f"rope_type = {kind!r}; here it is 'default' or 'linear'")
    scaling = rope.number("factor") if kind == "linear" else 1.0
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _write(model: Gemma3) -> Mapping[str, Any]:
    slowed = model.rope_scaling != 1
    scaling = {"rope_type": "linear", "factor": model.rope_scaling} if slowed else None
    return {
        **grouped_query.write_widths(model),
        "attention_bias": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "hidden_activation": _ACTIVATION,
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
    read=_read,
    write=_write,
    names=_names,
)
