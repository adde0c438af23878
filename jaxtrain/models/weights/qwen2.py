"""Qwen 2 and 2.5, dense (arXiv 2407.10671): Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import only
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked
from jaxtrain.models.weights.names import Name


def _names(model: Llama) -> tuple[Name, ...]:
    return (*grouped_query.dense_names(model), *grouped_query.BIASES)


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-6, context_length=32768, rope_theta=10000.0, kv_heads=32
    )
    grouped_query.reject_other_layers(asked)
    grouped_query.reject_own_head_dim(asked)
    return {**sizes, "qkv_bias": True}


def _write(model: Llama) -> Mapping[str, Any] | None:
    is_other = model.head_dim is not None or model.sliding_window is not None or model.qk_norm
    if is_other or not model.qkv_bias or model.rope_fraction != 1:
        return None
    said = grouped_query.write_sizes(model)
    return {**said, "use_sliding_window": False, "sliding_window": None}


FAMILY = grouped_query.family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    model=Llama,
    keys={**grouped_query.KEYS, **grouped_query.NO_WINDOW, "use_mrope": only(False)},
    read=_read,
    write=_write,
    names=_names,
)
