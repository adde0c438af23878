"""Phi 3 and 4 (arXiv 2404.14219): Hugging Face names and settings; fused projections."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import irrelevant, used
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name, one_after_the_other

_LAYER = "model.layers.{L}"


def _names(model: Llama) -> tuple[Name, ...]:
    queries, keys = (heads * model.key_dim for heads in (model.num_heads, model.num_kv_heads))
    return (
        *grouped_query.around(model),
        Name(f"{_LAYER}.input_layernorm.weight", "layers/attention_norm_scale", "LD->D"),
        *one_after_the_other(
            f"{_LAYER}.self_attn.qkv_proj.weight",
            ("layers/query", "LDNH->(NH)D", queries),
            ("layers/key", "LDKH->(KH)D", keys),
            ("layers/value", "LDKH->(KH)D", keys),
        ),
        Name(f"{_LAYER}.self_attn.o_proj.weight", "layers/out", "LNHD->D(NH)"),
        Name(f"{_LAYER}.post_attention_layernorm.weight", "layers/mlp_norm_scale", "LD->D"),
        *one_after_the_other(
            f"{_LAYER}.mlp.gate_up_proj.weight",
            ("layers/gate", "LDF->FD", model.mlp_dim),
            ("layers/up", "LDF->FD", model.mlp_dim),
        ),
        Name(f"{_LAYER}.mlp.down_proj.weight", "layers/down", "LFD->DF"),
    )


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-5, context_length=4096, rope_theta=10000.0, kv_heads=None, fraction=True
    )
    return {
        **sizes,
        "head_dim": grouped_query.read_head_dim(asked),
        "sliding_window": grouped_query.read_window(asked, None),
    }


def _write(model: Llama) -> Mapping[str, Any] | None:
    is_other = model.qkv_bias or model.qk_norm or model.head_dim is not None
    if is_other or model.rope_scaling != 1:
        return None
    return {
        **grouped_query.write_sizes(model),
        "sliding_window": model.sliding_window,
        "partial_rotary_factor": model.rope_fraction,
        "original_max_position_embeddings": model.context_length,
    }


FAMILY = grouped_query.family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    model=Llama,
    keys={
        **grouped_query.KEYS,
        **used("sliding_window"),
        **irrelevant(
            "it is of sparse attention, which the architecture has none of",
            "full_attn_mod",
            "interpolate_factor",
        ),
        **irrelevant(
            "it is of rotary scaling, which is not supported of this family",
            "original_max_position_embeddings",
        ),
    },
    read=_read,
    write=_write,
    names=_names,
)
