"""Mistral (arXiv 2310.06825): Hugging Face names and settings; sliding window."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import used
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-6, context_length=131072, rope_theta=10000.0, kv_heads=8
    )
    return {
        **sizes,
        "head_dim": grouped_query.read_head_dim(asked),
        "sliding_window": grouped_query.read_window(asked, 4096),
    }


def _write(model: Llama) -> Mapping[str, Any] | None:
    if model.qkv_bias or model.qk_norm or model.rope_fraction != 1:
        return None
    return {**grouped_query.write_sizes(model), "sliding_window": model.sliding_window}


FAMILY = grouped_query.family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    model=Llama,
    keys={**grouped_query.KEYS, **used("sliding_window")},
    read=_read,
    write=_write,
    names=grouped_query.dense_names,
)
