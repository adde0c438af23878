"""Qwen 3, dense (arXiv 2505.09388): Hugging Face names and settings; QK-norm."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name


def _names(model: Llama) -> tuple[Name, ...]:
    return (*grouped_query.dense_names(model), *grouped_query.HEAD_NORMS)


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-6, context_length=32768, rope_theta=10000.0, kv_heads=32
    )
    grouped_query.reject_other_layers(asked)
    return {**sizes, "qk_norm": True, "head_dim": grouped_query.read_head_dim(asked, 128)}


def _write(model: Llama) -> Mapping[str, Any] | None:
    is_other = model.qkv_bias or model.sliding_window is not None or model.rope_fraction != 1
    if is_other or not model.qk_norm:
        return None
    said = grouped_query.write_sizes(model)
    return {**said, "attention_bias": False, "use_sliding_window": False, "sliding_window": None}


FAMILY = grouped_query.family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    model=Llama,
    keys={**grouped_query.KEYS, **grouped_query.NO_WINDOW},
    read=_read,
    write=_write,
    names=_names,
)
