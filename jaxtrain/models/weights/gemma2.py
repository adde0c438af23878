"""Gemma 2: Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import irrelevant, only, used
from jaxtrain.models.transformers.gemma2 import Gemma2
from jaxtrain.models.weights import gemma_settings, grouped_query
from jaxtrain.models.weights.asked import Asked

_CAPS = {
    "attention_softcap": ("attn_logit_softcapping", 50.0),
    "logit_softcap": ("final_logit_softcapping", 30.0),
}


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes, width = gemma_settings.read(asked, kv_heads=4), asked.whole("query_pre_attn_scalar", 256)
    # A cap that is null is none, and one that is not there the family's.
    none = {ours: asked.content.get(theirs, 0) is None for ours, (theirs, _) in _CAPS.items()}
    caps = {ours: None if none[ours] else asked.number(*_CAPS[ours]) for ours in _CAPS}
    return {
        **sizes,
        **caps,
        "sliding_window": asked.whole("sliding_window", 4096),
        "global_every": grouped_query.read_global_every(asked, 2),
        "query_width": None if width == sizes["head_dim"] else width,
    }


def _write(model: Gemma2) -> Mapping[str, Any]:
    return {
        **gemma_settings.write(model),
        **{theirs: getattr(model, ours) for ours, (theirs, _) in _CAPS.items()},
        "layer_types": grouped_query.kinds(model.num_layers, model.global_every),
        "sliding_window": model.sliding_window,
        "query_pre_attn_scalar": model.query_width or model.head_dim,
    }


FAMILY = grouped_query.family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    model=Gemma2,
    keys={
        **gemma_settings.KEYS,
        **used("sliding_window", "layer_types", "query_pre_attn_scalar"),
        **used(*(theirs for theirs, _ in _CAPS.values())),
        **irrelevant("sliding_window says it", "sliding_window_size"),
        **irrelevant("transformers reads hidden_activation", "hidden_act"),
        "hidden_activation": only(gemma_settings.ACTIVATION),
    },
    read=_read,
    write=_write,
    names=grouped_query.norms_after_names,
)
