"""Llama 1 to 3.2, and models like it such as SmolLM2: Hugging Face names and settings."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.key_table import irrelevant
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.weights import grouped_query
from jaxtrain.models.weights.asked import Asked


def _read(asked: Asked) -> Mapping[str, Any]:
    sizes = grouped_query.read_sizes(
        asked, norm_eps=1e-6, context_length=2048, rope_theta=10000.0, kv_heads=None
    )
    return {**sizes, "head_dim": grouped_query.read_head_dim(asked)}


def _write(model: Llama) -> Mapping[str, Any] | None:
    if (
        model.sliding_window is not None
        or model.qkv_bias
        or model.qk_norm
        or model.rope_fraction != 1
    ):
        return None
    return {**grouped_query.write_sizes(model), "attention_bias": False, "mlp_bias": False}


FAMILY = grouped_query.family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    model=Llama,
    keys={
        **grouped_query.KEYS,
        **irrelevant("the architecture says it", "is_llama_config"),
        **irrelevant("transformers reads max_position_embeddings", "max_sequence_length"),
    },
    read=_read,
    write=_write,
    names=grouped_query.dense_names,
)
